"""Files: paths that users give, and locks."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import IOBase
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
