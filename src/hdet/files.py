"""Files: paths that users give, and locks."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO, IOBase
from multiprocessing.util import Finalize
from pathlib import Path
from weakref import WeakSet

from hdet.checks import shown
from hdet.errors import ArgumentError


def path_of(path: object, name: str) -> Path:
    """The path that a user gave as the argument ``name``. Raises if no file system could have it."""
    try:
        found = Path(path)  # type: ignore[arg-type]  # checked by it
        str(found).encode()  # otherwise torch could write such a file, but not read it
        with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            found.stat()
    except (OSError, TypeError, ValueError) as error:
        raise ArgumentError(
            f"{name} must be a path, but got {shown(path)} ({getattr(error, 'strerror', error)}); give a text or a "
            "pathlib.Path"
        ) from error
    return found


def named(path: object) -> str:
    """A path as messages show it: as users write it. Anything else is shown by its repr."""
    return shown(str(path) if isinstance(path, os.PathLike) else path)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Gives a draft to write, which takes the file's place at the end: a kill leaves the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.part")
    yield draft
    os.replace(draft, path)


try:
    import fcntl
except ImportError:  # Windows: no locks
    fcntl = None  # type: ignore[assignment]


_MOST = 16
"""How many locks a process holds."""
_files: WeakSet[IOBase] = WeakSet()
"""Files with a lock on them."""


def locked(file: IOBase, patience: float) -> bool | None:
    """Whether an open file is this process's alone from now on, until it is closed.

    None if that cannot be known: on Windows, and on file systems without locks.

    Args:
        file: the lock goes with it.
        patience: seconds to wait for another process to close the file.
    """
    if fcntl is None:
        return None
    _files.add(file)
    until = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
        except OSError:
            return None
        time.sleep(0.1)


def _close_all() -> None:
    """Close all locked files in a child that was just forked.

    A lock lasts until the last process that has the file open closes it.
    """
    for file in list(_files):
        file.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_all)


class Taken(Exception):
    """Another process has the lock. The text says which one, or is empty."""


_held: dict[Path, FileIO] = {}
"""The locks of this process, in the order of the last request."""


def hold_lock(path: Path, patience: float) -> bool:
    """Take the lock at ``path`` until this process ends, or check that it is still ours.

    A lock is a small file beside what it protects. If there are more than 16 of them, the one that was requested
    longest ago is given up.

    Returns:
        False if the file system has no locks.

    Raises:
        Taken: another process has it, and still has it after ``patience`` seconds.
    """
    file = _held.pop(path, None)
    while file is None or not _is_at(path, file):  # somebody may remove it: others would lock another one
        try:
            file = FileIO(os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666), "r+")
        except OSError:  # a folder that cannot be written
            return False
        found = locked(file, patience)
        if found is None:
            _remove(path, file)
            return False
        if not found:
            raise Taken(file.read(200).decode(errors="replace").strip())
        with suppress(OSError):  # no room: only the name of the holder is lost
            file.truncate()
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        Finalize(None, _remove, (path, file), exitpriority=0)  # unlike atexit, also in multiprocessing's children
    _held[path] = file
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
