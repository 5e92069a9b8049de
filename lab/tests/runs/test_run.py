"""Runs in one process: what they leave, and that stopping and going on changes nothing."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import hdet
from hdet.report.data import load_run
from lab.runs import teller
from lab.runs.folder import Folder
from lab.runs.launch import execute
from lab.runs.ranks import Ranks
from lab.runs.run import Run
from lab.runs.stop import Stop
from lab.runs.teller import Message, Teller, silent
from lab.tests.runs.small import new_run, run_here, weights_in

HERE = Ranks(0, 1, torch.device("cpu"))


@pytest.fixture(autouse=True)
def every_step_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teller, "_INTERVAL", 0.0)


@pytest.mark.parametrize("own", [{}, {"method": "none"}, {"method": "search", "lr": "auto"}, {"signal": "shuffled"}])
def test_leaves_a_folder_that_the_report_reads(tmp_path: Path, own: dict[str, Any]) -> None:
    folder = new_run(tmp_path / "run", eval_every=12, **own)
    outcome, told = run_here(folder)
    assert outcome == "complete"
    assert folder.complete
    run = load_run(folder.path)
    assert (run.name, run.summary.task, run.summary.seed) == ("run", "feed", 0)
    assert run.summary.final["loss"] == run.curve.validation[-1]
    assert not run.summary.crashed
    assert [int(x) for x, y in zip(run.curve.steps, run.curve.validation, strict=True) if y] == [0, 12, 24]
    assert len([y for y in run.curve.train if y is not None]) == 24
    assert len([y for y in run.curve.rates if y]) == 24
    assert bool(run.rounds) == (own.get("method") != "none")
    kinds = [message["kind"] for message in told]
    assert (kinds[0], kinds[-1]) == ("start", "end")
    assert kinds.count("round") == len(run.rounds)


def test_sgd_and_noise_and_a_warm_start(tmp_path: Path) -> None:
    first = new_run(tmp_path / "first", method="none")
    run_here(first)
    second = new_run(tmp_path / "second", optimizer="sgd", start=str(first.checkpoint), noise=0.01, steps=4, lr=1e-9)
    run_here(second)
    for name, warm in weights_in(second).items():
        gap = (warm - weights_in(first)[name]).abs().max()
        assert 0 < gap < 0.2, name  # the noise, and hardly any step


def test_goes_on_from_the_copy_where_only_that_is_left(tmp_path: Path) -> None:
    """As on a file system without hard links, killed between two renames."""
    folder = new_run(tmp_path / "run")
    assert _stopped_at(folder, 8) == "stopped"
    folder.checkpoint.rename(tmp_path / "run" / "checkpoint.pt.hdet-1")
    outcome, told = run_here(folder)
    assert (outcome, told[0]["step"]) == ("complete", 8)


@pytest.mark.parametrize("method", ["replicas", "none", "search"])
@pytest.mark.parametrize("at", [7, 8], ids=["inside a round", "at its end"])
def test_stopped_and_resumed_equals_not_stopped(tmp_path: Path, method: str, at: int) -> None:
    searched = {"lr": "auto", "steps": 48} if method == "search" else {}
    whole = new_run(tmp_path / "whole", method=method, **searched)
    run_here(whole)
    parted = new_run(tmp_path / "parted", method=method, **searched)
    assert _stopped_at(parted, at) == "stopped"
    assert not parted.complete
    assert torch.load(parted.checkpoint, weights_only=True)["values"]["step"] == at
    outcome, told = run_here(parted)
    assert outcome == "complete"
    assert told[0]["step"] == at
    for name, weight in weights_in(whole).items():
        assert torch.equal(weight, weights_in(parted)[name]), name
    assert _losses(parted) == _losses(whole)
    if method != "none":
        bases = [[record["base"] for record in hdet.read_journal(one.journal).rounds] for one in (whole, parted)]
        assert bases[0] == bases[1]


def test_killed_between_rounds_loses_no_more_than_one(tmp_path: Path) -> None:
    """As if by SIGKILL: what was done after the last round's end is gone, and done again."""
    whole = new_run(tmp_path / "whole")
    run_here(whole)
    parted = new_run(tmp_path / "parted")
    with pytest.raises(_Killed):
        run_here(parted, _kill_at(11))
    outcome, told = run_here(parted)
    assert (outcome, told[0]["step"]) == ("complete", 8)
    assert _losses(parted) == _losses(whole)
    assert len(hdet.read_journal(parted.journal).rounds) == len(hdet.read_journal(whole.journal).rounds)


def test_killed_before_the_first_round_begins_anew(tmp_path: Path) -> None:
    folder = new_run(tmp_path / "run")
    with pytest.raises(_Killed):
        run_here(folder, _kill_at(2))
    outcome, told = run_here(folder)
    assert (outcome, told[0]["step"]) == ("complete", 0)
    assert [record["step"] for record in hdet.read_journal(folder.journal).rounds][-1] == 24


def test_killed_after_the_last_step_only_evaluates(tmp_path: Path) -> None:
    folder = new_run(tmp_path / "run")
    run_here(folder)
    record = folder.read()
    folder.write(record | {"complete": False})
    outcome, _ = run_here(folder)
    assert outcome == "complete"
    assert folder.read()["final"]["loss"] == record["final"]["loss"]


@pytest.mark.parametrize("method", ["replicas", "none"])
def test_a_run_that_diverges_is_marked(tmp_path: Path, method: str) -> None:
    folder = new_run(tmp_path / "run", method=method, optimizer="sgd", lr=1e18)
    outcome, _ = run_here(folder)
    assert outcome == "crashed"
    record = folder.read()
    assert record["crashed"]
    assert record["complete"]
    assert record["final"]["loss"] is None
    assert load_run(folder.path).summary.crashed


def test_several_runs_one_after_another(tmp_path: Path) -> None:
    folders = [new_run(tmp_path / name, steps=4, seed=seed) for seed, name in enumerate(["a", "b"])]
    told: list[Message] = []
    assert execute(folders, folders[0].plan(), told.append) == "complete"
    assert [message["run"] for message in told if message["kind"] == "end"] == [0, 1]
    assert all(folder.complete for folder in folders)


def test_threads_are_put_back(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    run_here(new_run(tmp_path / "run", steps=2))
    assert torch.get_num_threads() == before


def test_cuda_is_refused_where_there_is_none(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(hdet.ArgumentError, match="device=cuda needs a GPU per replica, here 1, but found 0"):
        run_here(new_run(tmp_path / "run", device="cuda"))


class _Killed(BaseException):
    pass


def _kill_at(step: int) -> Any:
    def hear(message: Message) -> None:
        if message["kind"] == "step" and message["step"] >= step:
            raise _Killed

    return hear


def _stopped_at(folder: Folder, step: int) -> str:
    stop = Stop()
    run = Run(folder.plan(), folder, HERE, Teller(silent))
    make = run._step

    def step_and_ask(number: int) -> torch.Tensor:
        if number + 1 == step:
            stop.ask()
        return make(number)

    run._step = step_and_ask  # type: ignore[method-assign]
    return run.go(stop)


def _losses(folder: Folder) -> list[tuple[str, ...]]:
    with folder.curve.open() as file:
        rows = [tuple(row) for row in csv.reader(file)][1:]
    assert all(math.isfinite(float(cell)) for row in rows for cell in row if cell)
    return rows
