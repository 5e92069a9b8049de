"""Runs on several ranks, one after another on the same ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks import error_of, run_ranks

import hdet
from hdet.report.data import load_run
from lab.runs.folder import Folder
from lab.runs.ranks import Ranks
from lab.runs.stop import Stop
from lab.runs.teller import Message, silent
from lab.runs.worker import run_all
from lab.tests.runs.small import new_run, weights_in


def _ranks(rank: int, size: int) -> Ranks:
    return Ranks(rank, size, torch.device("cpu"), dist.group.WORLD)


def _run_all(rank: int, paths: list[str], ask_at: int | None) -> tuple[str, list[Message]]:
    """All runs on one of two ranks; rank 1 is asked to stop, if anybody is."""
    stop, told = Stop(), []

    class Counting(Stop):
        """Is asked when it is looked at for the n-th time: once a step."""

        def __init__(self) -> None:
            self.looks = 0

        @property
        def asked(self) -> bool:  # type: ignore[override]
            self.looks += 1
            return self.looks == ask_at

    chosen = Counting() if ask_at is not None and rank == 1 else stop
    outcome = run_all([Folder(path) for path in paths], _ranks(rank, 2), told.append if rank == 0 else silent, chosen)
    return outcome, told


def test_a_warm_start_and_those_that_begin_with_it(tmp_path: Path) -> None:
    """The runs of an ablation: nobody reads weights that rank 0 has not written yet, and controls differ from HDET."""
    warm = new_run(tmp_path / "warm", replicas=2, method="none", steps=6)
    own: dict[str, dict[str, Any]] = {
        "hdet": {},
        "no-spread": {"spread": 0.0, "signal": "none"},
        "placebo": {"signal": "shuffled"},
        "plain": {"method": "none"},
        "search": {"method": "search", "lr": "auto"},
    }
    start = {"replicas": 2, "steps": 8, "start": str(warm.checkpoint), "noise": 0.01}
    folders = {name: new_run(tmp_path / name, **(start | more)) for name, more in own.items()}
    paths = [str(folder.path) for folder in (warm, *folders.values())]
    (outcome, told), _ = run_ranks(_run_all, 2, paths, None)
    assert outcome == "complete"
    assert [message["run"] for message in told if message["kind"] == "end"] == list(range(6))
    assert all(folder.complete for folder in folders.values())
    first = {name: hdet.read_journal(folder.journal).rounds[0] for name, folder in folders.items() if name != "plain"}
    apart = {name: [row["divergence"] for row in record["replicas"]] for name, record in first.items()}
    assert all(value > 0 for name in ("hdet", "no-spread", "placebo") for value in apart[name])
    assert {row["multipliers"][0] for row in first["no-spread"]["replicas"]} == {1.0}
    assert not any(apart["search"])
    assert load_run(folders["hdet"].path).replicas == 2


@pytest.mark.parametrize("method", ["replicas", "search"])
def test_all_stop_after_the_same_step(tmp_path: Path, method: str) -> None:
    """One rank is asked; both finish the step, save their mean, and later go on."""
    folder = new_run(tmp_path / "run", replicas=2, method=method, lr=5e-3 if method == "replicas" else "auto")
    (outcome, told), (other, _) = run_ranks(_run_all, 2, [str(folder.path)], 7)
    assert (outcome, other) == ("stopped", "stopped")
    assert told[-1] == {"kind": "end", "run": 0, "outcome": "stopped", "step": 7}
    assert not folder.complete
    (outcome, told), _ = run_ranks(_run_all, 2, [str(folder.path)], None)
    assert outcome == "complete"
    assert told[0]["step"] == 7
    assert [record["step"] for record in hdet.read_journal(folder.journal).resumes] == [7]
    assert all(torch.isfinite(weight).all() for weight in weights_in(folder).values())


def _first(rank: int) -> str:
    def fail() -> None:
        raise hdet.ArgumentError("in the way")

    return str(error_of(lambda: _ranks(rank, 2).first(fail)))


def test_an_error_of_rank_0_is_everybodys() -> None:
    assert run_ranks(_first, 2) == ["in the way", "rank 0: in the way"]
