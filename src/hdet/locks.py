"""Locks on files, which die with their process: a child that is forked, such as a loader's worker, keeps none."""

from __future__ import annotations

import os
import time
from io import IOBase
from weakref import WeakSet

try:
    import fcntl
except ImportError:  # Windows: no locks
    fcntl = None  # type: ignore[assignment]

__all__ = ["locked"]

_files: WeakSet[IOBase] = WeakSet()


def locked(file: IOBase, patience: float) -> bool:
    """Whether an open file is this process's alone from now on, until it is closed.

    True also where nobody can know: on Windows, and on file systems without locks.

    Args:
        file: the lock goes with it.
        patience: seconds to wait for another process to close the file.
    """
    _files.add(file)
    until = time.monotonic() + patience
    while fcntl is not None:
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
        except OSError:  # a file system without locks
            return True
        time.sleep(0.1)
    return True


def _close_all() -> None:
    """In a child that was just forked: a lock lasts until the last process that has the file open closes it."""
    for file in list(_files):
        file.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_all)
