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
    """The path. Raises if no file system could have it; ``name``: the argument's."""
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    if not isinstance(text, str) or "\0" in text:
        raise ArgumentError(f"{name} must be a path, but got {shown(path)}; give a text or a pathlib.Path")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # torch could write such a file, but not read it
        raise ArgumentError(
            f"{name} must be a path that UTF-8 can write, but got {text!a}, which has a surrogate at character "
            f"{error.start}; give the file or folder another name"
        ) from error
    try:
        Path(text).exists()
    except OSError as error:  # too long a name
        raise ArgumentError(f"{name} must be a path, but got {shown(text)} ({error.strerror}); shorten it") from error
    return Path(text)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A draft to write inside, which then takes the file's place: a kill leaves the old one or the new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.part")
    yield draft
    os.replace(draft, path)


def write_atomically(path: Path, text: str) -> None:
    """Write a text file completely or not at all."""
    with replacing(path) as draft:
        draft.write_text(text, encoding="utf-8")


try:
    import fcntl
except ImportError:  # Windows: no locks
    fcntl = None  # type: ignore[assignment]


_files: WeakSet[IOBase] = WeakSet()


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
    """In a child that was just forked: a lock lasts until the last process that has the file open closes it."""
    for file in list(_files):
        file.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_all)


class Taken(Exception):
    """Another process has the lock; the text says which one, or is empty."""


class Locks:
    """The locks that this process holds until it ends, each in a small file of its own, beside what it protects.

    Args:
        most: how many are held; beyond that, the one that was requested longest ago is given up.
    """

    def __init__(self, most: int = 16) -> None:
        self._most = most
        self._files: dict[Path, FileIO] = {}
        """In the order of the last request."""
        self._process: int | None = None

    def hold(self, path: Path, patience: float) -> bool:
        """Take the lock at ``path``, or check that it is still ours. False if the file system has no locks.

        Raises:
            Taken: another process has it, and still has it after ``patience`` seconds.
        """
        self._begin()
        file, until = self._files.pop(path, None), time.monotonic() + patience
        try:
            while file is None or not _is_at(path, file):  # somebody may remove it: others would lock another one
                if file is not None:
                    file.close()
                file = _opened(path)
                found = locked(file, until - time.monotonic())
                if found is False:
                    raise Taken(_holder(file))
                if found is None:
                    _removed(path, file)
                    return False
                _sign(file)
        except Taken:
            if file is not None:
                file.close()
            raise
        except OSError:  # a folder that cannot be written
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
        """In a process that was forked: the locks are its parent's, and their files are closed."""
        if self._process != os.getpid():
            self._files, self._process = {}, os.getpid()
            Finalize(None, self.release, exitpriority=0)  # unlike atexit, also at the end of multiprocessing's children


def _opened(path: Path) -> FileIO:
    follows_no_link = getattr(os, "O_NOFOLLOW", 0)
    return FileIO(path, "r+", opener=lambda name, flags: os.open(name, flags | os.O_CREAT | follows_no_link, 0o666))


def _sign(file: FileIO) -> None:
    """Write into the lock file which process has the lock."""
    with suppress(OSError):  # no room: only the name of the holder is lost
        file.seek(0)
        file.truncate()
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())


def _holder(file: FileIO) -> str:
    """The process that has signed the lock file, as far as it can be shown."""
    file.seek(0)
    return "".join(filter(str.isprintable, file.read(200).decode(errors="replace")))


def _is_at(path: Path, file: FileIO) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path, follow_symlinks=False))
    except OSError:
        return False


def _removed(path: Path, file: FileIO) -> None:
    """Remove the lock file. A process that waits for the lock sees that it is gone, and makes another."""
    with suppress(OSError):
        if _is_at(path, file):
            path.unlink()
    file.close()
