"""A checkpoint's file, complete or not there at all, with a checksum at its end, and earlier ones beside it.

The file is torch's own zip, then a line with the SHA-256 of every byte before it. ``torch.load`` ignores the line.
Everything else that hdet writes beside it has ``hdet`` in its name. Files with other names are never touched.
"""

from __future__ import annotations

import os
import pickle
import re
import secrets
import socket
import stat
from contextlib import suppress
from hashlib import sha256
from io import FileIO
from itertools import pairwise
from multiprocessing.util import Finalize
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint

from hdet.errors import ArgumentError, CheckpointError
from hdet.files import locked

_MARK = b"\nhdet checkpoint, sha256 "
_LINE = len(_MARK) + 2 * sha256().digest_size + 1
_CHUNK = 1 << 20
_CURE = "save tensors, numbers, texts, and lists and dicts of them"
_PATIENCE = 5.0
"""Seconds to wait for another process to give up a path: one that was told to stop may still be writing."""
_MOST = 16
"""How many locks a process holds."""
_held: dict[Path, FileIO] = {}
"""The locks of this process, in the order of the last request."""
_known: set[tuple[int, ...]] = set()
"""The files that this process knows to be whole, because it has written or read them: their device, number, size and
time of the last change. Checkpoints are large: none is read again unless it has changed."""


class _Hashed:
    """A file that knows the checksum of what was written to it.

    The first error is remembered and nothing is written after it: torch's writer would report another one, or none.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._sum = sha256()
        self._failure: Exception | None = None

    def write(self, data: bytes | memoryview) -> int:
        """Write everything. Returns the length also after an error, which :meth:`finish` raises."""
        try:
            if self._failure is None:
                self._file.write(data)
                self._sum.update(data)
        except Exception as error:
            self._failure = error
        return len(data)

    def flush(self) -> None:
        """torch calls it; :meth:`finish` flushes."""

    def finish(self) -> None:
        """Write the line with the checksum, and everything to the disk. Raises the first error of all writes."""
        self.write(_MARK + self._sum.hexdigest().encode() + b"\n")
        if self._failure is not None:
            raise self._failure
        self._file.flush()
        os.fsync(self._file.fileno())


# -- writing ----------------------------------------------------------------------------------------------------------


def write(path: Path, content: dict[str, Any], keep: int) -> None:
    """Put a new checkpoint in its place. A kill at any moment leaves the newest one that was whole, or this one.

    It lies at ``path``. If the file system has no hard links, it lies at the first of the copies for a moment.

    Args:
        path: where it goes.
        content: tensors, numbers, texts, and lists and dicts of them.
        keep: how many there are afterwards: ``path``, ``path.hdet-1``, ...

    Raises:
        CheckpointError: another process writes there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if _hold_lock(path):
        for draft in _beside(path, rf"\.{re.escape(path.name)}\.hdet-[0-9a-f]{{8}}\.part"):
            draft.unlink(missing_ok=True)  # its process was killed
    draft, before = _new_draft(path), checkpoints_at(path)
    with draft.open("xb") as file:  # never an existing one, or the target of a link
        try:
            if before:
                with suppress(OSError):  # a file system without modes
                    draft.chmod(stat.S_IMODE(before[0].stat().st_mode))
            hashed = _Hashed(file)
            _pickled(content, hashed)
            hashed.finish()
            file.close()
            _refuse_unreadable(draft)
            _known.add(_marks_of(draft.stat()))
            _move_on(path, keep)
            os.replace(draft, path)
            for surplus in _copies(path)[keep - 1 :]:
                surplus.unlink(missing_ok=True)
            _sync_folder(path.parent)
        finally:
            with suppress(OSError):
                draft.unlink(missing_ok=True)


def _new_draft(path: Path) -> Path:
    """A new name beside the file."""
    return path.with_name(f".{path.name}.hdet-{secrets.token_hex(4)}.part")


def _pickled(content: dict[str, Any], file: _Hashed) -> None:
    try:
        torch.save(content, file)  # type: ignore[arg-type]  # it only writes
    except (pickle.PicklingError, AttributeError, TypeError) as error:  # a function, a lock, an open file
        raise ArgumentError(f"some part cannot be written to a file ({error}); {_CURE}") from error


def _refuse_unreadable(draft: Path) -> None:
    """Raise for objects that could be written but not read again, which would be noticed too late."""
    strange = get_unsafe_globals_in_checkpoint(draft)
    if strange:
        raise ArgumentError(
            f"the parts hold objects that torch.load(weights_only=True) does not read: {', '.join(sorted(strange))}; "
            f"{_CURE}, or allow these by torch.serialization.add_safe_globals"
        )


def _move_on(path: Path, keep: int) -> None:
    """Each checkpoint becomes the one before, up to the first place that is free: nothing is there, or a damaged file.

    A damaged file, or one of somebody else, moves on too, but never to the place of a whole one. The one at ``path``
    stays there until the new one replaces it.
    """
    places = [path, *(_copy(path, number) for number in range(1, keep))]
    pairs = enumerate(pairwise(places))
    is_free = (n for n, (file, older) in pairs if not _is_whole(file) and (not file.exists() or _is_whole(older)))
    free = next(is_free, keep - 1)
    if free > 0 and places[1].exists() and path.samefile(places[1]):  # killed here the last time
        return
    for number in range(free, 1, -1):
        os.replace(places[number - 1], places[number])
    if free > 0:
        link = _new_draft(path)
        try:
            os.link(path, link)
        except OSError:  # a file system without hard links: for a moment there is only the copy
            link = path
        os.replace(link, places[1])


def _marks_of(found: os.stat_result) -> tuple[int, ...]:
    """What changes if a file does."""
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _is_whole(file: Path) -> bool:
    """Whether a file is there and its checksum fits. Reads it, unless it is known."""
    with suppress(OSError):  # not there, or it cannot be read
        if _marks_of(file.stat()) in _known:
            return True
        digest, own = _sums_of(file)
        return digest == own
    return False


def _sync_folder(folder: Path) -> None:
    """Make renames survive a loss of power; on systems that cannot open folders they do so anyway."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


# -- one process writes -----------------------------------------------------------------------------------------------


def _hold_lock(path: Path) -> bool:
    """Keep other processes from writing checkpoints to ``path`` until this one ends. False: there are no locks here.

    A lock is a small file beside the checkpoint. If there are more than 16 of them, the one that was requested longest
    ago is given up.

    Raises:
        CheckpointError: another process has it, and still has it after some seconds.
    """
    place = path.with_name(f".{path.name}.hdet-lock")
    file = _held.pop(place, None)
    while file is None or not _is_at(place, file):  # somebody may remove it: others would lock another one
        try:
            file = FileIO(os.open(place, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666), "r+")
        except OSError:  # a folder that cannot be written
            return False
        is_ours = locked(file, _PATIENCE)
        if is_ours is None:
            _remove(place, file)
            return False
        if not is_ours:
            holder = file.read(200).decode(errors="replace").strip()
            raise CheckpointError(
                f"another process writes its checkpoints to {path}{f' ({holder})' if holder else ''}, and two would "
                "overwrite each other's; stop that one, or give this one a path of its own. If both are ranks of one "
                "run, call torch.distributed.init_process_group before hdet.save: then one of them writes"
            )
        with suppress(OSError):  # no room: only the name of the holder is lost
            file.truncate()
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        Finalize(None, _remove, (place, file), exitpriority=0)  # unlike atexit, also in multiprocessing's children
    _held[place] = file
    for oldest in list(_held)[:-_MOST]:
        _remove(oldest, _held.pop(oldest))
    return True


def _is_at(path: Path, file: FileIO) -> bool:
    """Whether an open file is the one at ``path``. In a process that was forked, those of its parent are closed."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except (OSError, ValueError):
        return False


def _remove(path: Path, file: FileIO) -> None:
    """Remove the lock file. A process that waits for the lock sees that it is gone, and makes another."""
    with suppress(OSError):
        if _is_at(path, file):
            path.unlink()
    file.close()


# -- which files ------------------------------------------------------------------------------------------------------


def checkpoints_at(path: Path) -> list[Path]:
    """The checkpoints that are there, newest first."""
    return [*([path] if path.is_file() else []), *_copies(path)]


def _copy(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.hdet-{number}")


def _copies(path: Path) -> list[Path]:
    """The checkpoints before the one at ``path``, newest first."""
    found = _beside(path, rf"{re.escape(path.name)}\.hdet-[1-9][0-9]*")
    return sorted((file for file in found if file.is_file()), key=lambda file: int(file.name.rpartition("-")[2]))


def _beside(path: Path, name: str) -> list[Path]:
    """Files in the same folder whose names match."""
    try:
        return [path.with_name(one) for one in os.listdir(path.parent) if re.fullmatch(name, one)]
    except OSError:  # no folder yet, or one that may not be read
        return []


# -- reading ----------------------------------------------------------------------------------------------------------


class Whole(NamedTuple):
    """A checkpoint whose checksum fits."""

    file: Path
    digest: str
    faults: list[str]
    """What is wrong with newer ones."""


def newest_whole(path: Path) -> Whole:
    """The newest checkpoint whose checksum fits. Reads whole files."""
    faults: list[str] = []
    for file in checkpoints_at(path):
        try:
            digest, found = _sums_of(file)
        except FileNotFoundError:  # the writing process has just renamed it
            continue
        if digest == found:
            return Whole(file, found, faults)
        cut = "was cut off, or hdet.save did not write it (it has no checksum at its end)"
        faults.append(f"{file} {cut if digest is None else 'is damaged (its checksum does not fit)'}")
    if not faults:
        raise CheckpointError(f"there is no checkpoint at {path}; check the path, or begin without one")
    raise CheckpointError(
        f"there is no whole checkpoint at {path}: {'; '.join(faults)}. If torch.save wrote the file, use torch.load "
        "and the load_state_dict() of each part; else go back to an earlier copy"
    )


def digest_of(path: Path) -> str | None:
    """The checksum at a file's end; None if there is none. Reads nothing else."""
    with path.open("rb") as file:
        return _digest_in(file)


def _digest_in(file: IO[bytes]) -> str | None:
    if file.seek(0, os.SEEK_END) < _LINE:
        return None
    file.seek(-_LINE, os.SEEK_END)
    line = file.read(_LINE)
    return line[len(_MARK) : -1].decode("ascii", "replace") if line.startswith(_MARK) else None


def _sums_of(path: Path) -> tuple[str | None, str]:
    """The checksum at a file's end, and that of the rest. Opened once: it may be replaced meanwhile."""
    with path.open("rb") as file:
        seen, digest = os.fstat(file.fileno()), _digest_in(file)
        found, left = sha256(), file.seek(0, os.SEEK_END) - _LINE
        file.seek(0)
        while digest is not None and left > 0 and (chunk := file.read(min(left, _CHUNK))):
            found.update(chunk)
            left -= len(chunk)
    if digest == found.hexdigest():
        _known.add(_marks_of(seen))
    return digest, found.hexdigest()


def read(path: Path) -> Any:
    """What :func:`write` was given. Tensors lie in the file until they are copied: all ranks of a host share them."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except OSError:
        raise
    except pickle.UnpicklingError as error:  # torch's words recommend to read it in a way that runs code
        raise CheckpointError(f"{path} cannot be read by this torch: {_strange_in(path)}") from error
    except Exception as error:
        why, _, _ = f"{type(error).__name__}: {error}".partition("\n")
        cure = "use the versions of torch and hdet that wrote it"
        raise CheckpointError(f"{path} cannot be read by this torch ({why}); {cure}") from error


def _strange_in(path: Path) -> str:
    """What is in a file that :func:`write` would have refused, and what to do."""
    strange: list[str] = []
    with suppress(Exception):  # any: somebody may have made the file to fail here
        strange = sorted(get_unsafe_globals_in_checkpoint(path))
    named = f" ({', '.join(strange)})" if strange else ""
    return (
        f"it holds objects that are not allowed{named}, and reading them could run code. If you wrote it, allow them "
        "by torch.serialization.add_safe_globals, as when it was saved; else do not load it"
    )
