"""Two processes with one path: the second is told until the first has ended, and no file is ever half of two."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import hdet
from hdet import files as locks
from hdet.checkpoint import file as checkpoint_file
from tests.checkpoint.files import save, value_in
from tests.processes import CONTEXT

pytestmark = [
    pytest.mark.skipif(locks.fcntl is None, reason="no locks on this system"),
    pytest.mark.usefixtures("impatient"),
]
TOLD = r"another process writes its checkpoints to .*run\.pt \(process (\d+) on .*\).*; stop that one, or give"


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_file, "_PATIENCE", 0.0)


@contextmanager
def other(action: Any, *args: Any) -> Iterator[tuple[BaseProcess, Connection]]:
    """A process that calls ``action(pipe, *args)``; killed afterwards."""
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=action, args=(theirs, *args))
    process.start()
    theirs.close()
    try:
        yield process, ours
    finally:
        process.kill()
        process.join()
        ours.close()


def heard(pipe: Connection) -> Any:
    assert pipe.poll(60)
    return pipe.recv()


def _saves_and_stays(pipe: Connection, path: Path) -> None:
    save(path, 1)
    pipe.send("saved")
    pipe.recv()


def test_the_second_is_told_until_the_first_has_ended(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    with other(_saves_and_stays, path) as (first, pipe):
        heard(pipe)
        with pytest.raises(hdet.CheckpointError, match=TOLD) as told:
            save(path, 2)
        assert f"process {first.pid} " in str(told.value)
        assert value_in(path) == 1  # reading is free
        save(tmp_path / "mine.pt", 2)
        first.kill()
        first.join()
        save(path, 3)
        assert value_in(path) == 3


def _answers(pipe: Connection, path: Path) -> None:
    """Try to save, whenever asked."""
    checkpoint_file._PATIENCE = 0.0
    while True:
        number = pipe.recv()
        try:
            save(path, number)
            pipe.send("saved")
        except hdet.CheckpointError as error:
            pipe.send(str(error))


def test_the_first_goes_on_and_the_second_stays_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    with other(_answers, path) as (_, pipe):
        for number in range(3):
            save(path, number)
            pipe.send(-1)
            assert "another process writes" in heard(pipe)
            assert value_in(path) == number


def test_a_lock_that_somebody_removed_is_noticed(tmp_path: Path) -> None:
    """The one who saves first afterwards goes on."""
    path = tmp_path / "run.pt"
    save(path, 1)
    (tmp_path / ".run.pt.hdet-lock").unlink()
    with other(_answers, path) as (_, pipe):
        pipe.send(2)
        assert heard(pipe) == "saved"
        with pytest.raises(hdet.CheckpointError, match=TOLD):
            save(path, 3)
    assert value_in(path) == 2


def test_a_lock_that_this_process_lost_is_taken_again(tmp_path: Path) -> None:
    """Whoever copies the folder opens and closes the lock's file, which gives it up."""
    path = tmp_path / "run.pt"
    save(path, 1)
    (tmp_path / ".run.pt.hdet-lock").read_text()
    save(path, 2)
    with other(_answers, path) as (_, pipe):
        pipe.send(3)
        assert "another process writes" in heard(pipe)


def _worker(pipe: Connection) -> None:
    pipe.send(os.getpid())  # it runs: on a busy machine that can be seconds after the fork
    time.sleep(60)


def _saves_with_a_worker(pipe: Connection, path: Path) -> None:
    save(path, 1)
    get_context("fork").Process(target=_worker, args=(pipe,)).start()
    pipe.recv()


def test_a_forked_worker_does_not_keep_the_lock_of_a_parent_that_was_killed(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    with other(_saves_with_a_worker, path) as (parent, pipe):
        worker = heard(pipe)
        parent.kill()
        parent.join()
        try:
            os.kill(worker, 0)  # it lives on
            save(path, 2)
        finally:
            os.kill(worker, signal.SIGKILL)
    assert value_in(path) == 2


def _forks_and_saves(pipe: Connection, path: Path) -> None:
    """A child that ends in order; then the parent still has its lock."""
    save(path, 1)
    child = os.fork()
    if child == 0:
        checkpoint_file._PATIENCE = 0.0
        try:
            save(path, 2)
        except hdet.CheckpointError:
            os._exit(3)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    pipe.send(os.waitstatus_to_exitcode(status))
    pipe.recv()


def test_a_forked_child_is_another_process(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    with other(_forks_and_saves, path) as (_, pipe):
        assert heard(pipe) == 3
        with pytest.raises(hdet.CheckpointError, match=TOLD):
            save(path, 3)


def _milestones(pipe: Connection, folder: Path) -> None:
    for number in range(40):
        save(folder / f"{number}.pt", number, keep=1)
        save(folder / "last.pt", number)
    pipe.send(len(list(folder.glob(".*"))))


def test_many_paths_leave_no_trail_of_locks(tmp_path: Path) -> None:
    with other(_milestones, tmp_path) as (process, pipe):
        assert heard(pipe) <= 16
        process.join(30)
        assert process.exitcode == 0
    assert not list(tmp_path.glob(".*"))
    assert len(list(tmp_path.iterdir())) == 42


# -- no file is half of two -------------------------------------------------------------------------------------------


def _saves_without_end(pipe: Connection, path: Path, offset: int, has_locks: bool) -> None:
    checkpoint_file._PATIENCE = 0.0
    if not has_locks:
        locks.fcntl = None  # type: ignore[assignment]
    model, refused = nn.Linear(200, 100), 0
    for number in itertools.count(offset):
        for p in model.parameters():
            nn.init.constant_(p, number)
        try:
            hdet.save(path, model=model, number=number)
        except hdet.CheckpointError as error:
            if "another process writes" not in str(error):
                raise
            refused += 1
        pipe.send(refused)


@pytest.mark.parametrize("has_locks", [True, False])
def test_whoever_looks_finds_whole_checkpoints(tmp_path: Path, has_locks: bool) -> None:
    """Also where the file system has no locks: drafts have names of their own."""
    path, model = tmp_path / "run.pt", nn.Linear(200, 100)
    with (
        other(_saves_without_end, path, 0, has_locks) as (_, one),
        other(_saves_without_end, path, 10**6, has_locks) as (_, two),
    ):
        for pipe in (one, two, one, two):  # both have saved, or tried to, more than once
            heard(pipe)
        refused = [0, 0]
        for _ in range(100):
            for file in (path, tmp_path / "run.pt.hdet-1"):
                digest, found = checkpoint_file._sums_of(file)
                assert digest == found
            with suppress(hdet.CheckpointError):  # it was replaced while it was read
                number = hdet.load(path, model=model)["number"]
                assert all(bool((p == number).all()) for p in model.parameters())
            for i, pipe in enumerate((one, two)):
                while pipe.poll():
                    refused[i] = pipe.recv()
    assert [count > 0 for count in sorted(refused)] == [False, has_locks]
