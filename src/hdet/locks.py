"""Locks that die with their process: each in a small file of its own, beside what it protects."""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from io import FileIO
from multiprocessing.util import Finalize
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: no lock
    fcntl = None  # type: ignore[assignment]

__all__ = ["Locks", "Taken"]


class Taken(Exception):
    """Another process has the lock; the text says which one, or is empty."""


class Locks:
    """The locks that this process holds until it ends.

    A record lock of POSIX: it ends with its process, however that ends; the processes that it forks, such as the
    workers of a loader, do not have it; and network file systems know it.

    Args:
        most: how many are held; where there are more, the one that was asked for longest ago is given up.
    """

    def __init__(self, most: int = 16) -> None:
        self._most = most
        self._files: dict[Path, FileIO] = {}
        """Last asked for last."""
        self._process: int | None = None

    def hold(self, path: Path, patience: float) -> bool:
        """Take the lock at ``path``, or see that it is still ours. False: there are no locks to be had there.

        Raises:
            Taken: another process has it, and still has it after ``patience`` seconds.
        """
        if fcntl is None:
            return False
        self._begin()
        file, until = self._files.pop(path, None), time.monotonic() + patience
        try:
            while True:
                file = _opened(path) if file is None else file
                _lock(file, until)  # also one that was ours: whoever closes the file in this process gives it up
                if _is_at(path, file):
                    break
                file.close()  # somebody removed it: others would lock another one
                file = None
        except Taken:
            if file is not None:
                file.close()
            raise
        except OSError:  # a folder that cannot be written, or a file system without locks
            if file is not None:
                _removed(path, file)
            return False
        self._files[path] = file
        for oldest in list(self._files)[: -self._most]:
            _removed(oldest, self._files.pop(oldest))
        return True

    def release(self) -> None:
        """Give all of them up."""
        self._begin()
        while self._files:
            _removed(*self._files.popitem())

    def _begin(self) -> None:
        """In a process that was forked: the locks are its parent's."""
        if self._process != os.getpid():
            for file in self._files.values():
                file.close()
            self._files, self._process = {}, os.getpid()
            Finalize(None, self.release, exitpriority=0)  # unlike atexit, also at the end of multiprocessing's children


def _opened(path: Path) -> FileIO:
    follows_no_link = getattr(os, "O_NOFOLLOW", 0)
    return FileIO(path, "r+", opener=lambda name, flags: os.open(name, flags | os.O_CREAT | follows_no_link, 0o666))


def _lock(file: FileIO, until: float) -> None:
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            if time.monotonic() >= until:
                raise Taken(_holder(file)) from error
        else:
            break
        time.sleep(0.1)
    with suppress(OSError):  # no room: only the name of the holder is lost
        file.seek(0)
        file.truncate()
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())


def _holder(file: FileIO) -> str:
    """Who has noted that it has the lock; no more than can be shown."""
    file.seek(0)
    return "".join(filter(str.isprintable, file.read(200).decode(errors="replace")))


def _is_at(path: Path, file: FileIO) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path, follow_symlinks=False))
    except OSError:
        return False


def _removed(path: Path, file: FileIO) -> None:
    """Nothing is left behind. Who waits for the lock sees that the file is gone, and makes another."""
    with suppress(OSError):
        if _is_at(path, file):
            path.unlink()
    file.close()
