"""The journal's file: lines are appended, one run at a time."""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any

from hdet.checks import shown
from hdet.errors import ArgumentError, JournalError
from hdet.journal.lines import encoded
from hdet.paths import path_of

try:
    import fcntl
except ImportError:  # Windows: no lock
    fcntl = None  # type: ignore[assignment]

__all__ = ["Journal"]

_PATIENCE = 10.0
"""Seconds to wait for another run to leave the file. Loader workers of one that was killed hold it for some more."""
_BLOCK = 1 << 16
_RUN = re.compile(rb'^\{"run":"([^"]*)"', re.MULTILINE)


class Journal:
    """A journal file. Opened at the first write, appended to; never pickled open.

    While it is open nobody else can write to it: the lock goes with :meth:`close`, or with the process.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = path_of(path, "journal, its path,")
        if self.path.name == "" or self.path.is_dir():
            raise ArgumentError(f"journal must be the path of a file, but {shown(path)} is a folder; name a file in it")
        self._file: FileIO | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Journal) and self.path == other.path

    __hash__ = None  # type: ignore[assignment]  # equal by value and, like a list, not meant as a key

    def __repr__(self) -> str:
        return f"Journal({str(self.path)!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "_file": None}

    @property
    def begun(self) -> bool:
        """Whether the file has content already, so that a resumed run goes on in it."""
        return self.path.exists() and self.path.stat().st_size > 0

    @property
    def run(self) -> str | None:
        """The id of the run that wrote the last line; None: there is none."""
        if not self.begun:
            return None
        with self.path.open("rb") as file:
            place, text = file.seek(0, os.SEEK_END), b""
            while place > 0:
                size = min(_BLOCK, place)
                place = file.seek(place - size)
                text = file.read(size) + text[:_BLOCK]  # a line may begin in one block and go on in the next
                found = _RUN.findall(text)
                if found:
                    return str(found[-1].decode(errors="replace"))
        return None

    def claim(self) -> None:
        """Open the file for this run alone.

        Raises:
            JournalError: another run is writing to it.
        """
        if self._file is None:
            self._file = _open(self.path, _PATIENCE)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one line: all of it, or nothing."""
        line = encoded(record)
        if self._file is None:
            self._file = _open(self.path, patience=0.0)
        end = self._file.seek(0, os.SEEK_END)
        try:
            if self._file.write(line) != len(line):
                raise OSError(errno.ENOSPC, f"no room for a line of {len(line)} bytes")
        except OSError:
            with suppress(OSError):
                self._file.truncate(end)  # of this line only
            self.close()
            raise

    def close(self) -> None:
        """Close the file. A later write opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _open(path: Path, patience: float) -> FileIO:
    """Open at the end and lock. A line that was cut off is ended first, so that it cannot swallow the next one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("ab+", buffering=0)
    try:
        _lock(file, path, patience)
        end = file.seek(0, os.SEEK_END)
        if end > 0:
            file.seek(end - 1)
            if file.read(1) != b"\n":
                file.write(b"\n")
    except BaseException:
        file.close()
        raise
    return file


def _lock(file: FileIO, path: Path, patience: float) -> None:
    until = time.monotonic() + patience
    while fcntl is not None:
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError as error:
            if time.monotonic() >= until:
                raise JournalError(
                    f"another run is writing to the journal {path}, and the file can have one at a time; stop that one "
                    "first, or give this one a file of its own"
                ) from error
        except OSError:  # a file system without locks
            return
        time.sleep(0.1)
