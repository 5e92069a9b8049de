"""What hdet.save writes, replaces and removes is its own, and hdet.load reads nothing else."""

from __future__ import annotations

import os
import shutil
import socket
import stat
from pathlib import Path
from typing import Any

import pytest
import torch

import hdet
from hdet.checkpoint import file as checkpoint_file
from tests.checkpoint.files import names, save, value_in
from tests.processes import run_ranks

# -- names that others choose -----------------------------------------------------------------------------------------


def test_milestones_with_numbers_stay(tmp_path: Path) -> None:
    for number in range(1, 6):
        save(tmp_path / f"ckpt.{number}", number)
    for number in (6, 7, 8):
        save(tmp_path / "ckpt", number)
    assert names(tmp_path) == ["ckpt", *(f"ckpt.{number}" for number in range(1, 6)), "ckpt.hdet-1"]
    assert [value_in(tmp_path / f"ckpt.{number}") for number in range(1, 6)] == [1, 2, 3, 4, 5]
    assert value_in(tmp_path / "ckpt") == 8


@pytest.mark.parametrize("name", ["run.pt.20240501", "run.pt.1", "run.pt.hdet-01", "run.pt.hdet-1.bak", ".run.pt.part"])
def test_files_of_others_stay(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("precious")
    for number in range(4):
        save(tmp_path / "run.pt", number, keep=1 + number % 2)
    assert (tmp_path / name).read_text() == "precious"
    assert names(tmp_path) == sorted(["run.pt", "run.pt.hdet-1", name])


@pytest.mark.parametrize("number", [1, 7])
def test_what_is_not_there_is_not_loaded_from_another_name(tmp_path: Path, number: int) -> None:
    save(tmp_path / f"other.pt.{number}", 1)
    with pytest.raises(hdet.CheckpointError, match=r"there is no checkpoint at .*other\.pt;"):
        value_in(tmp_path / "other.pt")
    assert value_in(tmp_path / f"other.pt.{number}") == 1


# -- what is no regular file ------------------------------------------------------------------------------------------


def special(kind: str, path: Path) -> Any:
    """Make one; what must be kept alive."""
    if kind == "a pipe":
        return os.mkfifo(path)
    if kind == "a socket":
        found = socket.socket(socket.AF_UNIX)
        found.bind(str(path))
        return found
    try:
        return os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 3))  # as the null device
    except PermissionError:
        pytest.skip("only a superuser makes devices")


@pytest.mark.timeout(20)  # a pipe is waited for without end
@pytest.mark.parametrize("kind", ["a pipe", "a socket", "a device"])
@pytest.mark.parametrize("through_a_link", [False, True])
def test_special_files_are_refused_and_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, through_a_link: bool
) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's path must be short
    held, path = special(kind, Path("it")), Path("it")
    if through_a_link:
        path = Path("link")
        path.symlink_to("it")
    before = os.stat(path)
    for call in (lambda: save(path, 1), lambda: value_in(path), lambda: hdet.exists(path)):
        with pytest.raises(hdet.ArgumentError, match=rf"a regular file, but {path} is a folder, a device, a pipe"):
            call()
    assert os.path.samestat(before, os.stat(path))
    assert "hdet" not in "".join(os.listdir())
    if held is not None:
        held.close()


@pytest.mark.timeout(20)
def test_a_pipe_beside_it_is_not_waited_for(tmp_path: Path) -> None:
    save(tmp_path / "run.pt", 1)
    (tmp_path / "run.pt").write_bytes(b"damaged")
    for name in ("run.pt.1", "run.pt.hdet-1"):
        os.mkfifo(tmp_path / name)
    with pytest.raises(hdet.CheckpointError, match="no whole checkpoint"):
        value_in(tmp_path / "run.pt")


def test_the_null_device_is_refused() -> None:
    """By its name alone: nothing is tried on it."""
    with pytest.raises(hdet.ArgumentError, match="but /dev/null is a folder, a device"):
        hdet.load("/dev/null")


@pytest.mark.parametrize("name", ["lone \ud800.pt", "not UTF-8 \udcff.pt"])
def test_a_surrogate_in_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for call in (hdet.load, hdet.exists, hdet.Journal, hdet.read_journal, lambda path: save(path, 1)):
        with pytest.raises(hdet.ArgumentError, match=r"must be a path, but got .*\\ud.*surrogates not allowed"):
            call(tmp_path / name)
    assert names(tmp_path) == []


def test_a_folder_whose_name_is_not_utf_8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch would write there, and could not read it again."""
    try:
        (tmp_path / "not UTF-8 \udcff").mkdir()
    except OSError:
        pytest.skip("the file system has no such names")
    monkeypatch.chdir(tmp_path / "not UTF-8 \udcff")
    with pytest.raises(hdet.ArgumentError, match=r"path must be a path, but got .*surrogates not allowed"):
        save(Path("run.pt"), 1)


# -- modes, links and drafts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o664])
def test_a_checkpoint_keeps_its_mode(tmp_path: Path, mode: int) -> None:
    path, before = tmp_path / "run.pt", os.umask(0o027)
    try:
        save(path, 1)
        assert stat.S_IMODE(path.stat().st_mode) == 0o640  # as every new file
        path.chmod(mode)
        for number in (2, 3):
            save(path, number)
    finally:
        os.umask(before)
    assert [stat.S_IMODE(file.stat().st_mode) for file in (path, tmp_path / "run.pt.hdet-1")] == [mode, mode]


def test_a_private_checkpoint_is_private_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, modes = tmp_path / "run.pt", set[int]()
    save(path, 1)
    path.chmod(0o600)
    original = checkpoint_file._Hashed.write

    def write(self: Any, data: bytes) -> int:
        modes.update(stat.S_IMODE(file.stat().st_mode) for file in tmp_path.glob(".*.part"))
        return original(self, data)

    monkeypatch.setattr(checkpoint_file._Hashed, "write", write)
    save(path, 2)
    assert modes == {0o600}


@pytest.mark.parametrize("name", [".run.pt.part", ".run.pt.hdet-00000000.part", ".run.pt.hdet-lock"])
def test_a_planted_link_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    (tmp_path / "precious").write_text("mine")
    (tmp_path / name).symlink_to(tmp_path / "precious")
    monkeypatch.setattr("secrets.token_hex", lambda _: "00000000")  # as if somebody had guessed it
    for number in (1, 2):
        save(tmp_path / "run.pt", number)
    assert (tmp_path / "precious").read_text() == "mine"
    assert value_in(tmp_path / "run.pt") == 2


def test_a_draft_that_is_there_is_never_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are no locks, and two processes have drawn the same name."""
    monkeypatch.setattr("secrets.token_hex", lambda _: "00000000")
    monkeypatch.setattr("hdet.files.fcntl", None)
    save(tmp_path / "run.pt", 1)
    draft = tmp_path / ".run.pt.hdet-00000000.part"
    draft.write_text("another's")
    with pytest.raises(hdet.CheckpointError, match="FileExistsError"):
        save(tmp_path / "run.pt", 2)
    assert draft.read_text() == "another's"
    assert value_in(tmp_path / "run.pt") == 1


@pytest.mark.parametrize("locks", [True, False])
def test_drafts_of_processes_that_were_killed_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locks: bool) -> None:
    if not locks:
        monkeypatch.setattr("hdet.files.fcntl", None)
    new, old = (tmp_path / f".run.pt.hdet-0000000{i}.part" for i in (1, 2))
    for draft in (new, old):
        draft.write_text("half")
    os.utime(old, (0, 0))
    save(tmp_path / "run.pt", 1)
    assert [draft.exists() for draft in (new, old)] == [not locks] * 2  # without them they may be another process's


# -- hdet.exists ------------------------------------------------------------------------------------------------------


def test_exists_sees_what_load_finds(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    assert hdet.exists(path) is False
    assert not hdet.exists(tmp_path / "no" / "such" / "folder" / "run.pt")
    for number in (1, 2):
        save(path, number)
    assert hdet.exists(path) is True
    path.unlink()
    assert hdet.exists(str(path))
    assert value_in(path) == 1
    (tmp_path / "run.pt.hdet-1").unlink()
    assert not hdet.exists(path)
    path.write_bytes(b"damaged")
    assert hdet.exists(path)  # so that the load says so
    save(tmp_path / "ckpt.1", 1)
    assert not hdet.exists(tmp_path / "ckpt")


@pytest.mark.parametrize("dies", [False, True])
def test_without_hard_links_a_last_rename_that_fails_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies: bool
) -> None:
    path, replace = tmp_path / "run.pt", os.replace
    save(path, 1)

    def no_link(*_: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    def failing(source: Path, target: Path) -> None:
        if Path(target) == path:
            raise KeyboardInterrupt if dies else OSError(5, "Input/output error")
        replace(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(os, "link", no_link)
        patched.setattr(os, "replace", failing)
        with pytest.raises(KeyboardInterrupt if dies else hdet.CheckpointError):
            save(path, 2)
    assert not path.exists()
    assert hdet.exists(path)
    assert value_in(path) == 1
    save(path, 3)
    assert value_in(path) == 3
    assert value_in(tmp_path / "run.pt.hdet-1") == 1


def _sees(rank: int, folder: str) -> list[bool]:
    own = Path(folder) / str(rank)
    return [hdet.exists(own / "run.pt"), hdet.exists(Path(folder) / "nothing.pt")]


@pytest.mark.slow
def test_all_ranks_get_the_answer_of_the_first(tmp_path: Path) -> None:
    """Were they to differ, some would wait in hdet.load for the others."""
    save(tmp_path / "0" / "run.pt", 1)
    assert run_ranks(_sees, 2, str(tmp_path)) == [[True, False], [True, False]]
    shutil.move(tmp_path / "0" / "run.pt", tmp_path / "run.pt")
    assert run_ranks(_sees, 2, str(tmp_path)) == [[False, False], [False, False]]


def test_a_file_under_another_name_is_a_checkpoint_too(tmp_path: Path) -> None:
    save(tmp_path / "run.pt", 1)
    (tmp_path / "run.pt").rename(tmp_path / "best.pt")
    assert value_in(tmp_path / "best.pt") == 1
    assert "number" in torch.load(tmp_path / "best.pt", weights_only=True)["values"]
