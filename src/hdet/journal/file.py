"""The journal's file: how its lines of JSON are written and read.

One run at a time appends to a file, which is locked while it is open, also against other processes.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from hdet.checks import is_int, shown
from hdet.errors import ArgumentError, JournalError
from hdet.files import locked, path_of

SCHEMA = 1
"""Version of the schema, in every header."""
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_log = logging.getLogger("hdet")
_PATIENCE = 10.0
"""Seconds to wait until a run of another process has left the file, since one that is being stopped may take some."""
_LONGEST = 1 << 20
"""Bytes of a header that are read; a longer one counts as cut off there."""
_RUN = re.compile(rb'\{"run":"([^"]*)"')


class Journal:
    """A journal file. It is opened at the first write and appended to. A pickled copy is closed.

    While it is open no other process can write to it. :meth:`close`, the end of this object, or the end of the process
    releases the lock. Within a process the journal that locked the file last writes to it.
    """

    _file: FileIO | None = None

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = path_of(path, "journal, its path,")
        _check(self.path)

    def __del__(self) -> None:
        self.close()  # otherwise Python warns of a file that was not closed

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Journal) and self.path == other.path

    __hash__ = None  # type: ignore[assignment]  # equal by value and, like a list, not meant as a key

    def __repr__(self) -> str:
        return f"Journal({str(self.path)!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "_file": None}

    @property
    def begun(self) -> bool:
        """Whether the file has content already, so that a resumed run continues it."""
        return self.path.exists() and self.path.stat().st_size > 0

    @property
    def run(self) -> str | None:
        """The id of the run that wrote the last line; None: there is none."""
        if not self.begun:
            return None
        last = None
        with self.path.open("rb") as file:
            for line in file:
                last = _RUN.match(line) or last
        return last[1].decode(errors="replace") if last is not None else None

    def lock(self) -> None:
        """Open the file for this run alone. A run of this process that has it must leave it; the log says so.

        Raises:
            JournalError: a run of another process is writing to it.
        """
        if self._file is None or self._file.closed:
            self._file = self._opened(_PATIENCE, take_over=True)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one line, completely or not at all."""
        line = encoded(record)
        if self._file is None or self._file.closed:  # a forked child finds it closed
            self._file = self._opened(patience=0.0)
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

    def _opened(self, patience: float, *, take_over: bool = False) -> FileIO:
        """The file, locked, at its end. A line that was cut off is ended, so that the next one stands alone."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = self.path.open("ab+", buffering=0)
        try:
            about = os.fstat(file.fileno())
            writer = _writers.get((about.st_dev, about.st_ino))
            if take_over and writer is not None and writer._file is not None and not writer._file.closed:
                _log.warning("a new run takes over the journal %r from a run of this process that has not ended", self)
                writer.close()
            if locked(file, patience) is False:
                raise JournalError(
                    f"another run is writing to the journal {self.path}, and the file can have one at a time; stop "
                    "that one first, or give this one a file of its own"
                )
            end = file.seek(0, os.SEEK_END)
            if end > 0:
                file.seek(end - 1)
                if file.read(1) != b"\n":
                    file.write(b"\n")
        except BaseException:
            file.close()
            raise
        _writers[about.st_dev, about.st_ino] = self
        return file


_writers: WeakValueDictionary[tuple[int, int], Journal] = WeakValueDictionary()
"""The journal that opened a file last in this process, by device and number, since a file may have several paths."""


def _check(path: Path) -> None:
    """Raise unless lines may be appended there. A file that cannot be read is tried again when a line is written."""
    what = None
    if path.name == "" or path.is_dir():
        what = "the path of a file", "is a folder; name a file in it"
    elif path.exists() and not path.is_file():
        what = "the path of a file", "is a device or a pipe; name a file"
    elif path.exists() and not _is_journal(path):
        what = "the path of a journal or of a new file", "has other content; name another file"
    if what is not None:
        raise ArgumentError(f"journal must be {what[0]}, but {shown(str(path))} {what[1]}")


def _is_journal(path: Path) -> bool:
    """Whether a file begins with a record, even one that was cut off, or is empty. True if it cannot be read."""
    try:
        with path.open("rb") as file:
            first = next((line for line in iter(lambda: file.readline(_LONGEST), b"") if not line.isspace()), b"")
        return decoded(first)["kind"] in ("header", "resume", "round")
    except OSError:
        return True
    except ValueError:
        return any(first[: len(begin)] == begin[: len(first)] for begin in (b'{"run":"', b'{"kind":"'))


def encoded(record: Mapping[str, Any]) -> bytes:
    """The line of a record, with its end."""
    return (json.dumps(mapped(record, _encode), allow_nan=False, separators=(",", ":")) + "\n").encode()


def decoded(line: bytes) -> dict[str, Any]:
    """The record of a line. Raises ValueError for a line that no journal has."""
    try:
        record = json.loads(line)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if b'"NaN"' in line or b'Infinity"' in line:  # most lines have none
        record = mapped(record, _decode)
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
        raise ValueError("it must be an object with a kind")
    needed = {"round": "round", "resume": "step"}.get(record["kind"])
    if any(not is_int(record.get(name, 0)) for name in ("round", "step")) or (needed and needed not in record):
        raise ValueError(f"it must have an integer as {needed!r}")
    return record


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """``change`` applied to each value in nested dicts and lists; tuples become lists.

    >>> mapped({"steps": (1, 2)}, str)
    {'steps': ['1', '2']}
    """
    if isinstance(value, Mapping):
        return {key: mapped(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [mapped(item, change) for item in value]
    return change(value)


def _encode(value: Any) -> Any:
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _decode(value: Any) -> Any:
    return _NON_FINITE.get(value, value) if isinstance(value, str) else value
