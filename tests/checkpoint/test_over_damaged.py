"""hdet.save beside damaged files: one that is not whole never replaces one that is, wherever the process is killed."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import hdet
from hdet.checkpoint import file as checkpoint_file
from tests.checkpoint.files import save, value_in, weights

pytestmark = [pytest.mark.quick, pytest.mark.filterwarnings("ignore::hdet.CheckpointWarning")]
NEW = 9
STATES = list(itertools.product(["whole", "damaged", "missing"], repeat=3))


class Killed(BaseException):
    """The process is dead: nothing of it runs any more."""


@contextmanager
def killed_at(moment: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Die before the n-th change of the folder; afterwards every further one fails too, as after a kill."""
    done: list[str] = []

    def deadly(real: Callable[..., Any]) -> Callable[..., Any]:
        def change(*args: Any, **kwargs: Any) -> Any:
            if len(done) >= moment:
                raise Killed
            done.append(real.__name__)
            return real(*args, **kwargs)

        return change

    with monkeypatch.context() as patched:
        for name in ("replace", "rename", "link", "unlink", "remove"):
            patched.setattr(os, name, deadly(getattr(os, name)))
        yield done


def rot(path: Path) -> None:
    """Change one bit."""
    content = bytearray(path.read_bytes())
    content[700] ^= 4
    path.write_bytes(content)


def place(path: Path, number: int) -> Path:
    return path if number == 0 else path.with_name(f"{path.name}.hdet-{number}")


def prepare(path: Path, states: tuple[str, ...]) -> None:
    """Checkpoints 5, 4, 3, the newest first, as ``states`` says: whole, damaged or missing."""
    for number in reversed(range(len(states))):
        save(path, 5 - number, keep=len(states))
    for number, state in enumerate(states):
        if state == "damaged":
            rot(place(path, number))
        elif state == "missing":
            place(path, number).unlink()


@pytest.mark.parametrize(("keep", "has_links"), [(1, True), (2, True), (2, False), (3, True)])
@pytest.mark.parametrize("states", STATES, ids="-".join)
def test_a_kill_at_every_change(
    tmp_path: Path, states: tuple[str, ...], keep: int, has_links: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a kill the newest checkpoint that was whole is there, or the new one; and the next save works."""
    if not has_links:
        monkeypatch.setattr(os, "link", _no_links)
    newest = next((5 - number for number, state in enumerate(states) if state == "whole"), None)
    for moment in itertools.count():
        path = tmp_path / str(moment) / "run.pt"
        prepare(path, states)
        try:
            with killed_at(moment, monkeypatch) as done:
                save(path, NEW, keep=keep)
        except Killed:
            if newest is not None:
                assert value_in(path) in (newest, NEW)
        else:
            break
        save(path, NEW + 1, keep=keep)
        assert value_in(path) == NEW + 1
    assert len(done) < moment + 1
    assert value_in(path) == NEW


def _no_links(*_: Any) -> None:
    raise OSError("no hard links here")


@pytest.mark.parametrize("states", STATES, ids="-".join)
def test_the_whole_ones_stay(tmp_path: Path, states: tuple[str, ...]) -> None:
    """Of those that were whole only the oldest makes room, and only if there is no other."""
    path = tmp_path / "run.pt"
    prepare(path, states)
    save(path, NEW, keep=3)
    whole = [place(path, number) for number in range(3) if checkpoint_file._is_whole(place(path, number))]
    before = [5 - number for number, state in enumerate(states) if state == "whole"]
    found = []
    for file in whole:
        model = weights(-1.0)
        file.rename(tmp_path / "one.pt")
        found.append(hdet.load(tmp_path / "one.pt", model=model)["number"])
        (tmp_path / "one.pt").unlink()
    assert found == [NEW, *before][:3]


def test_a_known_file_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints are large. One that this process wrote or loaded is read again only if it has changed since."""
    read: list[str] = []
    real = checkpoint_file._sums_of
    monkeypatch.setattr(checkpoint_file, "_sums_of", lambda path: read.append(path.name) or real(path))
    path = tmp_path / "run.pt"
    for number in range(5):
        save(path, number, keep=4)
    assert read == []
    checkpoint_file._known.clear()  # another process
    assert value_in(path) == 4
    save(path, 5)
    assert read == ["run.pt"]
    rot(path)
    save(path, 6)
    assert read == ["run.pt"] * 2
    rot(path)
    assert value_in(path) == 4


def test_a_file_of_somebody_else_is_kept_once(tmp_path: Path) -> None:
    (tmp_path / "run.pt").write_text("not a checkpoint of hdet")
    save(tmp_path / "run.pt", 1)
    assert (tmp_path / "run.pt.hdet-1").read_text() == "not a checkpoint of hdet"
    save(tmp_path / "run.pt", 2)
    rot(tmp_path / "run.pt")
    assert value_in(tmp_path / "run.pt") == 1
