"""Runs in this process and on several ranks: what they leave, and what is said if they fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import hdet
from hdet.report.data import load_run
from lab.runs import teller
from lab.runs.folder import Folder
from lab.runs.launch import RanksFailed, execute
from lab.runs.result import result_of
from lab.runs.teller import Message, silent
from lab.tests.runs.small import a_plan, run_here, weights_in


@pytest.fixture(autouse=True)
def every_step_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teller, "_INTERVAL", 0.0)


@pytest.mark.parametrize("own", [{}, {"method": "none"}, {"method": "search", "lr": "auto"}, {"signal": "shuffled"}])
def test_leaves_a_folder_that_the_report_reads(tmp_path: Path, own: dict[str, Any]) -> None:
    folder, told = run_here(tmp_path / "run", eval_every=12, **own)
    assert folder.complete
    run = result_of(folder)
    assert (run.name, run.about["task"], run.about["seed"]) == ("run", "feed", 0)
    assert run.final["loss"] == run.curve.validation[-1]
    assert not run.about["crashed"]
    assert [int(x) for x, y in zip(run.curve.steps, run.curve.validation, strict=True) if y] == [0, 12, 24]
    assert len([y for y in run.curve.train if y is not None]) == 24
    assert len([y for y in run.curve.rates if y]) == 24
    assert bool(run.journal and run.journal.rounds) == (own.get("method") != "none")
    kinds = [message["kind"] for message in told]
    assert (kinds[0], kinds[-1]) == ("start", "end")
    assert kinds.count("step") == 24


def test_noise_and_a_warm_start(tmp_path: Path) -> None:
    first, _ = run_here(tmp_path / "first", method="none")
    second, _ = run_here(tmp_path / "second", start=str(first.checkpoint), noise=0.01, steps=4, lr=1e-9)
    for name, warm in weights_in(second).items():
        gap = (warm - weights_in(first)[name]).abs().max()
        assert 0 < gap < 0.2, name  # the noise, and hardly any step


@pytest.mark.parametrize("method", ["replicas", "none"])
def test_a_run_that_diverges_is_marked(tmp_path: Path, method: str) -> None:
    folder, told = run_here(tmp_path / "run", method=method, lr=1e30)
    assert told[-1]["outcome"] == "crashed"
    record = folder.read()
    assert record["crashed"]
    assert record["complete"]
    assert record["final"]["loss"] is None
    assert result_of(folder).final["loss"] is None


def test_threads_are_put_back(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    run_here(tmp_path / "run", steps=2)
    assert torch.get_num_threads() == before


def test_a_warm_start_and_those_that_begin_with_it_on_two_ranks(tmp_path: Path) -> None:
    """The runs of an ablation: nobody reads weights that rank 0 has not written yet, and controls differ from HDET."""
    warm = Folder(tmp_path / "warm")
    start = {"replicas": 2, "steps": 8, "start": str(warm.checkpoint), "noise": 0.01}
    plans = {
        "warm": a_plan(replicas=2, method="none", steps=6),
        "hdet": a_plan(**start),
        "no-spread": a_plan(**start, spread=0.0, signal="none"),
        "placebo": a_plan(**start, signal="shuffled"),
        "plain": a_plan(**start, method="none"),
        "search": a_plan(**(start | {"method": "search", "lr": "auto"})),
    }
    folders = {name: Folder(tmp_path / name) for name in plans}
    for folder, plan in zip(folders.values(), plans.values(), strict=True):
        folder.begin(plan)
    told: list[Message] = []
    execute(list(folders.values()), list(plans.values()), told.append)
    assert [message["run"] for message in told if message["kind"] == "end"] == list(range(6))
    assert all(folder.complete for folder in folders.values())
    journals = {name: hdet.read_journal(folders[name].journal) for name in ("hdet", "no-spread", "placebo", "search")}
    first = {name: journal.rounds[0] for name, journal in journals.items()}
    apart = {name: [row["divergence"] for row in record["replicas"]] for name, record in first.items()}
    assert all(value > 0 for name in ("hdet", "no-spread", "placebo") for value in apart[name])
    assert {row["multipliers"][0] for row in first["no-spread"]["replicas"]} == {1.0}
    assert not any(apart["search"])
    assert load_run(folders["hdet"].path).replicas == 2


class Failing(Folder):
    """A folder in which no run can begin."""

    @property
    def journal(self) -> Path:  # type: ignore[override]
        raise ValueError("in the way")

    @journal.setter
    def journal(self, path: Path) -> None:
        pass


def test_ranks_that_fail_are_named_with_their_own_words(tmp_path: Path) -> None:
    folder, plan = Failing(tmp_path), a_plan(replicas=2)
    with pytest.raises(RanksFailed, match=r"replica \d failed: ValueError: in the way; .*ranks.log has details"):
        execute([folder], [plan], silent)
    assert "Traceback" in folder.log.read_text()
