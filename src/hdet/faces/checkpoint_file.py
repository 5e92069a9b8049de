"""A checkpoint's file: whole or not there, with a checksum at its end, and the ones before beside it.

The file is torch's own zip, then a line with the SHA-256 of every byte before it. ``torch.load`` ignores the line.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from contextlib import suppress
from glob import escape
from hashlib import sha256
from pathlib import Path
from typing import IO, Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint

from hdet.errors import ArgumentError, CheckpointError

__all__ = ["digest_of", "fault_of", "newest_whole", "read", "write"]

_MARK = b"\nhdet checkpoint, sha256 "
_LINE = len(_MARK) + 2 * sha256().digest_size + 1
_CHUNK = 1 << 20


class _Hashed:
    """A file that knows the checksum of what was written to it.

    The first error is remembered and nothing is written after it: torch's writer would report another one, or none.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._sum = sha256()
        self._failure: Exception | None = None

    def write(self, data: bytes | memoryview) -> int:
        """All of it, as far as torch is told."""
        try:
            if self._failure is None:
                self._file.write(data)
                self._sum.update(data)
        except Exception as error:
            self._failure = error
        return len(data)

    def flush(self) -> None:
        """Asked for by torch; :meth:`finish` does it."""

    def finish(self) -> None:
        """The line with the checksum, and everything to the disk. Raises what went wrong on the way."""
        self.write(_MARK + self._sum.hexdigest().encode() + b"\n")
        if self._failure is not None:
            raise self._failure
        self._file.flush()
        os.fsync(self._file.fileno())


def write(path: Path, content: dict[str, Any], keep: int) -> None:
    """Put a new checkpoint in its place. A kill at any moment leaves a whole one at ``path``: this or the one before.

    Args:
        path: where it goes.
        content: tensors, numbers, texts, and lists and dicts of them.
        keep: how many there are afterwards: ``path``, ``path.1``, ...
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.part")
    try:
        with draft.open("wb") as file:
            hashed = _Hashed(file)
            _pickled(content, hashed)
            hashed.finish()
        _refuse_unreadable(draft)
        _move_on(path, keep)
        os.replace(draft, path)
        _sync_folder(path.parent)
    finally:
        with suppress(OSError):
            draft.unlink(missing_ok=True)


def newest_whole(path: Path) -> tuple[Path, list[str]]:
    """The newest checkpoint whose checksum fits, and what is wrong with those after it. Reads whole files."""
    faults: list[str] = []
    for candidate in _kept(path):
        fault = fault_of(candidate)
        if fault is None:
            return candidate, faults
        faults.append(f"{candidate} {fault}")
    if not faults:
        raise CheckpointError(f"there is no checkpoint at {path}; check the path, or begin without one")
    raise CheckpointError(
        f"there is no whole checkpoint at {path}: {'; '.join(faults)}. If torch.save wrote the file, use torch.load "
        "and the load_state_dict() of each part; else go back to an earlier copy"
    )


def fault_of(path: Path) -> str | None:
    """What is wrong with a file, in words; None: its checksum fits."""
    expected = digest_of(path)
    if expected is None:
        return "was cut off, or hdet.save did not write it (it has no checksum at its end)"
    found, left = sha256(), path.stat().st_size - _LINE
    with path.open("rb") as file:
        while left > 0 and (chunk := file.read(min(left, _CHUNK))):
            found.update(chunk)
            left -= len(chunk)
    return None if found.hexdigest() == expected else "is damaged (its checksum does not fit)"


def digest_of(path: Path) -> str | None:
    """The checksum at a file's end; None where there is none. Reads nothing else."""
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) < _LINE:
            return None
        file.seek(-_LINE, os.SEEK_END)
        line = file.read(_LINE)
    return line[len(_MARK) : -1].decode("ascii", "replace") if line.startswith(_MARK) else None


def read(path: Path) -> Any:
    """What :func:`write` was given. Tensors lie in the file until they are copied: all ranks of a host share them."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"{path} cannot be read by this torch ({str(error).splitlines()[0]}); use the versions of torch and hdet "
            "that wrote it"
        ) from error


def _pickled(content: dict[str, Any], file: _Hashed) -> None:
    try:
        torch.save(content, file)  # type: ignore[arg-type]  # it only writes
    except (pickle.PicklingError, AttributeError, TypeError) as error:  # a function, a lock, an open file
        raise ArgumentError(
            f"some part cannot be written to a file ({error}); save tensors, numbers, texts, and lists and dicts "
            "of them"
        ) from error


def _refuse_unreadable(draft: Path) -> None:
    """Raise for what could be written but not read again: that would be noticed when it is needed."""
    strange = get_unsafe_globals_in_checkpoint(draft)
    if strange:
        raise ArgumentError(
            f"the parts hold objects that torch.load(weights_only=True) does not read: {', '.join(sorted(strange))}; "
            "save tensors, numbers, texts, and lists and dicts of them, or allow these by "
            "torch.serialization.add_safe_globals"
        )


def _kept(path: Path) -> Iterator[Path]:
    """The checkpoints that are there, newest first."""
    if path.exists():
        yield path
    found = (file.name.removeprefix(f"{path.name}.") for file in path.parent.glob(f"{escape(path.name)}.*"))
    yield from (_older(path, number) for number in sorted(int(text) for text in found if text.isdecimal()))


def _older(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")


def _move_on(path: Path, keep: int) -> None:
    """The checkpoint that is there becomes the one before, and stays where it is until the new one replaces it."""
    for surplus in list(_kept(path))[keep:]:
        surplus.unlink()
    before = _older(path, 1)
    if keep < 2 or not path.exists() or (before.exists() and path.samefile(before)):  # killed here the last time
        return
    for number in range(keep - 1, 1, -1):
        if _older(path, number - 1).exists():
            os.replace(_older(path, number - 1), _older(path, number))
    link = path.with_name(f".{before.name}.part")
    with suppress(OSError):
        link.unlink(missing_ok=True)
    try:
        os.link(path, link)
    except OSError:  # a file system without hard links: for a moment there is only path.1
        os.replace(path, before)
    else:
        os.replace(link, before)


def _sync_folder(folder: Path) -> None:
    """What was renamed survives a loss of power; where folders cannot be opened, the system sees to it."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
