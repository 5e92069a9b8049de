"""One run at a time in a journal: who is refused, who takes over, and what becomes of the lock when a run ends."""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import hdet
import hdet.journal.file
from hdet import Journal, JournalError, read_journal
from tests.patience import PATIENCE
from tests.processes import error_of, run_ranks

fcntl = pytest.importorskip("fcntl", reason="no locks on this system")
TAKES_OVER = "takes over"
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hdet.journal.file._PATIENCE", 0.2)


def a_run(path: Path | str, total_steps: int = 100) -> tuple[torch.optim.Optimizer, hdet.OneCycleLR]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    scheduler = hdet.OneCycleLR(optimizer, 0.1, total_steps, sync_every=2, cycle_momentum=False, journal=path)
    return optimizer, scheduler


def train(run: tuple[torch.optim.Optimizer, hdet.OneCycleLR], steps: int, loss: float = 1.0) -> None:
    optimizer, scheduler = run
    for _ in range(steps):
        optimizer.step()
        scheduler.step(loss)


def losses_in(path: Path) -> list[float]:
    return [record["replicas"][0]["loss"] for record in read_journal(path).rounds]


@contextmanager
def held_by_another_process(path: Path) -> Iterator[None]:
    code = "import sys, hdet; journal = hdet.Journal(sys.argv[1]); journal.lock(); print('has it', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "has it\n"
        yield
        process.communicate("\n", timeout=PATIENCE)


def is_free(path: Path) -> bool:
    """Whether another process could write to it."""
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


@pytest.mark.slow
def test_a_run_of_another_process_is_refused_until_the_first_has_ended(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    second = a_run(path)
    with held_by_another_process(path):
        with pytest.raises(
            JournalError, match=r"another run is writing to the journal .*run\.jsonl.* a file of its own"
        ):
            train(second, 1)
    third = a_run(path)
    train(third, 2)
    assert losses_in(path) == [1.0]


@pytest.mark.slow
def test_a_run_of_another_process_is_refused_on_every_rank(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    held = Journal(path)
    held.lock()
    told = run_ranks(_refused, 2, str(path))
    assert told[0].startswith("JournalError: another run is writing")
    assert told[1].startswith("JournalError: rank 0 may not write the journal")
    held.close()


def _refused(rank: int, path: str) -> str:
    hdet.journal.file._PATIENCE = 0.2
    run = a_run(path)
    error = error_of(lambda: train(run, 1))
    return f"{type(error).__name__}: {error}"


# -- one process, one run after the other ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["run.jsonl", "link.jsonl"])
def test_a_second_run_of_the_process_takes_over_and_says_so(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Early stopping, or a cell that is run again after an interrupt: the first run is still there."""
    path = tmp_path / "run.jsonl"
    (tmp_path / "link.jsonl").symlink_to(path)
    first = a_run(path)
    train(first, 5)
    began = time.monotonic()
    second = a_run(tmp_path / name)
    train(second, 4, loss=2.0)
    assert time.monotonic() - began < 2.0  # nobody was waited for
    (line,) = [record for record in caplog.records if TAKES_OVER in record.getMessage()]
    assert (line.name, line.levelno) == ("hdet", logging.WARNING)
    assert name in line.getMessage()
    assert losses_in(path) == [2.0, 2.0]
    assert not is_free(path)


def test_the_run_that_was_taken_over_trains_on_and_says_what_it_loses(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "run.jsonl"
    first, second = a_run(path), a_run(path)
    train(first, 3)
    train(second, 3, loss=2.0)
    train(first, 3)
    train(second, 1, loss=2.0)
    assert "another run is writing to the journal" in caplog.text
    assert "Rounds lost: 2" in caplog.text
    assert losses_in(path) == [2.0, 2.0]
    assert [record.getMessage() for record in caplog.records if TAKES_OVER in record.getMessage()] != []


def test_a_run_that_is_resumed_in_the_process_of_the_interrupted_one_goes_on_in_its_journal(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    first = a_run(path)
    train(first, 4)
    state = first[1].state_dict()
    train(first, 4)
    second = a_run(path)
    second[1].load_state_dict(state)
    train(second, 2, loss=2.0)
    assert losses_in(path) == [1.0, 1.0, 2.0]
    assert [json.loads(line)["kind"] for line in path.read_text().splitlines()].count("header") == 1
    assert len({json.loads(line)["run"] for line in path.read_text().splitlines()}) == 1


def test_nothing_is_taken_over_from_a_run_that_has_ended_or_is_gone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "run.jsonl"
    ended, gone = a_run(path, total_steps=4), a_run(path)
    train(ended, 4)
    assert is_free(path)
    train(gone, 1)
    assert not is_free(path)
    del gone
    assert is_free(path)
    last = a_run(path)
    train(last, 1)
    assert TAKES_OVER not in caplog.text


# -- workers -----------------------------------------------------------------------------------------------------------


class Numbers(Dataset[float]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> float:
        return float(index)


@contextmanager
def persistent_workers() -> Iterator[None]:
    """Forked here, and alive until the end."""
    loader = DataLoader(Numbers(), num_workers=1, persistent_workers=True, multiprocessing_context="fork")
    try:
        assert len(list(loader)) == 4
        yield
        assert len(list(loader)) == 4
    finally:
        loader._iterator._shutdown_workers()  # type: ignore[union-attr]


def test_persistent_workers_do_not_keep_the_lock_of_a_run_that_has_ended(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    run = a_run(path, total_steps=4)
    train(run, 1)  # the journal is open before the workers are there
    with persistent_workers():
        assert not is_free(path)  # a worker that gives it up does not give it up for the run
        train(run, 3)
        assert is_free(path)


_KILLED = """
import sys
from torch.utils.data import DataLoader
from tests.journal.test_lock import Slow, a_run, train

run = a_run(sys.argv[1])
train(run, 1)
list(DataLoader(Slow(), num_workers=1, multiprocessing_context="fork"))
"""


class Slow(Numbers):
    """Tells the worker's process, and takes its time."""

    def __getitem__(self, index: int) -> float:
        print(os.getpid(), flush=True)
        time.sleep(45.0)
        return 0.0


@pytest.mark.slow
def test_a_worker_that_outlives_a_killed_run_does_not_keep_its_lock(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with subprocess.Popen([sys.executable, "-c", _KILLED, path], cwd=ROOT, stdout=subprocess.PIPE, text=True) as killed:
        assert killed.stdout is not None
        worker = int(killed.stdout.readline())
        try:
            assert not is_free(path)
            killed.kill()
            killed.wait()
            os.kill(worker, 0)  # still fetching
            next_run = a_run(path)
            train(next_run, 2)
        finally:
            os.kill(worker, signal.SIGKILL)
    assert losses_in(path) == [1.0]


@pytest.mark.filterwarnings("error")  # Python's own, of a file that nobody closed, where a program asks for warnings
def test_a_run_that_is_let_go_closes_its_journal(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run.jsonl")
    train(run, 4)
    del run
    gc.collect()
