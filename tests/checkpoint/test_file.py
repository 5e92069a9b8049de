"""A checkpoint's file: after a kill at any byte, on a full disk, with a flipped bit the one before is there."""

from __future__ import annotations

import errno
import itertools
import os
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hdet
from hdet.checkpoint import file as checkpoint_file
from tests.checkpoint.files import names, value_in, weights
from tests.checkpoint.searching import Searching
from tests.processes import CONTEXT


def test_the_file_is_torchs_own(tmp_path: Path) -> None:
    path = tmp_path / "made" / "on the way" / "run.pt"
    hdet.save(path, model=weights(1.0), number=1, extra=[None, 2.5, {"text": torch.ones(2)}])
    content = torch.load(path, weights_only=True)
    assert torch.equal(content["states"]["model"]["weight"], torch.ones(2, 3))
    values = hdet.load(path)
    assert values["number"] == 1
    assert values["extra"][:2] == [None, 2.5]
    assert torch.equal(values["extra"][2]["text"], torch.ones(2))
    assert hdet.load(path, number=7, missing=3) | {"extra": 0} == {"number": 1, "missing": 3, "extra": 0}


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_last_ones_are_kept(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "run.pt"
    for number in range(5):
        hdet.save(path, model=weights(number), number=number, keep=keep)
    files = [path, *(tmp_path / f"run.pt.hdet-{i}" for i in range(1, keep))]
    assert names(tmp_path) == sorted(file.name for file in files)
    assert [value_in(file) for file in files] == [4 - i for i in range(keep)]
    hdet.save(path, model=weights(5), number=5, keep=1)
    assert names(tmp_path) == ["run.pt"]


class _Dies(BaseException):
    """As a kill, but this process goes on."""


def test_a_kill_at_any_byte_of_the_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the write had come to, what is found is the checkpoint before, whole, and without a warning."""
    path = tmp_path / "run.pt"
    for number in (1, 2):
        hdet.save(path, model=weights(number), number=number)
    whole = path.read_bytes()
    hdet.save(tmp_path / "other.pt", model=weights(3), number=3)
    written = (tmp_path / "other.pt").read_bytes()
    assert len(written) == len(whole)
    for length in range(0, len(written), 97):
        (tmp_path / ".run.pt.hdet-0123cdef.part").write_bytes(written[:length])  # what a kill leaves
        assert value_in(path) == 2
        assert path.read_bytes() == whole
    hdet.save(path, model=weights(3), number=3)
    assert value_in(path) == 3
    assert names(tmp_path) == ["other.pt", "run.pt", "run.pt.hdet-1"]


@pytest.mark.parametrize("call", ["link", "replace", "fsync", "open"])
def test_a_kill_between_the_steps_of_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """Before each call to the system in turn: ``path`` is there and whole, and the next save goes on."""
    original = getattr(os, call)
    for nth in range(1, 9):
        folder = tmp_path / str(nth)
        path = folder / "run.pt"
        for number in (1, 2):
            hdet.save(path, model=weights(number), number=number, keep=3)
        calls = 0

        def dying(*args: Any, nth: int = nth, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == nth:
                raise _Dies
            return original(*args, **kwargs)

        with monkeypatch.context() as patched:
            patched.setattr(checkpoint_file.os, call, dying)
            try:
                hdet.save(path, model=weights(3), number=3, keep=3)
            except _Dies:
                pass
            else:
                break
        assert value_in(path) in (2, 3)
        hdet.save(path, model=weights(4), number=4, keep=3)
        assert value_in(path) == 4
        assert value_in(folder / "run.pt.hdet-1") in (2, 3)
    assert nth > 1, "nothing was interrupted"


@pytest.mark.parametrize("room", range(0, 1800, 150))
def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    path = tmp_path / "run.pt"
    hdet.save(path, model=weights(1), number=1)
    original = checkpoint_file._Hashed.write

    class Full:
        def __init__(self, file: Any) -> None:
            self.file, self.left = file, room

        def write(self, data: bytes) -> int:
            self.left -= len(data)
            if self.left < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return int(self.file.write(data))

    def write(self: Any, data: bytes) -> int:
        if not isinstance(self._file, Full):
            self._file = Full(self._file)
        return original(self, data)

    monkeypatch.setattr(checkpoint_file._Hashed, "write", write)
    with pytest.raises(hdet.CheckpointError, match=r"No space left on device.*what was there before is still there"):
        hdet.save(path, model=weights(2), number=2)
    assert value_in(path) == 1
    assert names(tmp_path) == ["run.pt"]


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "not there"])
def test_falls_back_to_the_one_before_and_says_so(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "run.pt"
    for number in (1, 2):
        hdet.save(path, model=weights(number), number=number)
    content = bytearray(path.read_bytes())
    path.unlink()  # the copy may be the same file
    if damage == "flipped":
        content[len(content) // 2] ^= 4
    if damage != "not there":
        path.write_bytes({"cut": content[:-100], "empty": b"", "flipped": content}[damage])
        with pytest.warns(
            hdet.CheckpointWarning, match=r"run\.pt (is damaged|was cut off).*went back to .*run\.pt\.hdet-1"
        ):
            assert value_in(path) == 1
    else:
        assert value_in(path) == 1


def test_every_flipped_bit_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    hdet.save(path, model=weights(1), number=1, keep=1)
    content, model = path.read_bytes(), weights(5)
    for place in range(0, len(content), 61):
        damaged = bytearray(content)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        with pytest.raises(hdet.CheckpointError, match="no whole checkpoint"):
            hdet.load(path, model=model)
    assert all(bool((p == 5).all()) for p in model.parameters())


def test_files_of_others(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    with pytest.raises(hdet.CheckpointError, match=r"there is no checkpoint at .*; check the path"):
        hdet.load(path, model=weights(1))
    torch.save({"model": weights(1).state_dict()}, path)
    with pytest.raises(hdet.CheckpointError, match=r"it has no checksum at its end.*use torch\.load"):
        hdet.load(path, model=weights(1))
    with pytest.raises(hdet.ArgumentError, match=r"is a folder, .*; name a file in a folder"):
        hdet.save(tmp_path, number=1)
    with pytest.raises(hdet.ArgumentError, match="path must be a path, but got 3"):
        hdet.load(3)  # type: ignore[arg-type]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "last.pt").symlink_to(tmp_path / "there" / "run.pt")
    for number in (1, 2):
        hdet.save(tmp_path / "last.pt", model=weights(number), number=number)
    assert (tmp_path / "last.pt").is_symlink()
    assert names(tmp_path / "there") == ["run.pt", "run.pt.hdet-1"]
    assert value_in(tmp_path / "last.pt") == 2


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(hdet.CheckpointError, match=r"writing .*; what was there before is still there"):
        hdet.save(tmp_path / "file" / "run.pt", number=1)


def test_a_search_is_in_the_file_and_can_be_left_out(tmp_path: Path) -> None:
    run = Searching().go(0, 20)
    run.save(tmp_path / "with.pt")
    run.save(tmp_path / "without.pt", search=False)
    sizes = [(tmp_path / name).stat().st_size for name in ("with.pt", "without.pt")]
    assert sizes[0] > 2 * sizes[1]


def _save_without_end(said: Connection, path: Path) -> None:
    model = nn.Linear(200, 300)
    for number in itertools.count():
        for p in model.parameters():
            nn.init.constant_(p, number)
        hdet.save(path, model=model, number=number)
        said.send(number)


@pytest.mark.slow
def test_real_kills(tmp_path: Path) -> None:
    """SIGKILL at moments that nobody chose: what was said to be saved is there, and nothing is half of two."""
    path = tmp_path / "run.pt"
    for pause in (0.0, 0.002, 0.006, 0.012):
        ours, theirs = CONTEXT.Pipe(duplex=False)
        process = CONTEXT.Process(target=_save_without_end, args=(theirs, path), daemon=True)
        process.start()
        theirs.close()
        for _ in range(3):
            assert ours.poll(60)
            last = ours.recv()
        time.sleep(pause)
        process.kill()
        process.join()
        with suppress(EOFError):
            while ours.poll(1):
                last = ours.recv()
        model = nn.Linear(200, 300)
        number = hdet.load(path, model=model)["number"]
        assert number in (last, last + 1)
        assert all(bool((p == number).all()) for p in model.parameters())
