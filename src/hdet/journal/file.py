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

from hdet.checks import must_be
from hdet.errors import JournalError
from hdet.files import locked, path_of

SCHEMA = 1
"""Version of the schema, in every header."""
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_DECODER = json.JSONDecoder()
_NEEDED = {"round": "round", "resume": "step"}
"""Which number a record of a kind must have."""
_LARGEST = 2**53
"""The highest number of a round or a step: a higher one is damage."""
_log = logging.getLogger("hdet")
_PATIENCE = 10.0
"""Seconds to wait until a run of another process has left the file, since one that is being stopped may take some."""
_BEGIN = b'{"run":"'
"""How every line begins."""
_RUN = re.compile(rb'\{"run":"(\w+)"')


class Journal:
    """A journal file. It is opened at the first write and appended to. A pickled copy is closed.

    While it is open no other process can write to it. :meth:`close`, the end of this object, or the end of the process
    releases the lock. Within a process the journal that locked the file last writes to it.
    """

    _file: FileIO | None = None

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = path_of(path, "journal, its path,")
        is_file, cure = self.path.is_file() or not self.path.exists(), "it is a folder, a device or a pipe; name a file"
        must_be("the path of a file", is_file, cure, journal=str(self.path))
        cure = "it has other content; name another file"
        must_be("the path of a journal or of a new file", _is_journal(self.path), cure, journal=str(self.path))

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
    def run(self) -> str | None:
        """The id of the run that wrote the last line, which a resumed run continues; None if there is no line."""
        last = None
        if self.path.exists():
            with self.path.open("rb") as file:
                for line in file:
                    last = _RUN.match(line) or last
        return last[1].decode() if last is not None else None

    def lock(self, *, is_new_run: bool = True) -> None:
        """Open the file for this run alone. A line that was cut off is ended, so that the next one stands alone.

        A new run waits for a run of another process that is about to end. A run of this process must leave the file;
        the log says so.

        Raises:
            JournalError: another run is writing to it.
        """
        if self._file is not None and not self._file.closed:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = self.path.open("ab+", buffering=0)
        try:
            about = os.fstat(file.fileno())
            writer = _writers.get((about.st_dev, about.st_ino))
            if is_new_run and writer is not None and writer._file is not None and not writer._file.closed:
                _log.warning("a new run takes over the journal %r from a run of this process that has not ended", self)
                writer.close()
            if locked(file, _PATIENCE if is_new_run else 0.0) is False:
                raise JournalError(
                    f"another run is writing to the journal {self.path}, and the file can have one at a time; stop "
                    "that one first, or give this one a file of its own"
                )
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - 1))
            if end > 0 and file.read(1) != b"\n":
                file.write(b"\n")
        except BaseException:
            file.close()
            raise
        self._file = file
        _writers[about.st_dev, about.st_ino] = self

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one line, completely or not at all."""
        line = encoded(record)
        self.lock(is_new_run=False)  # a forked child finds it closed
        assert self._file is not None
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


_writers: WeakValueDictionary[tuple[int, int], Journal] = WeakValueDictionary()
"""The journal that opened a file last in this process, by device and number, since a file may have several paths."""


def _is_journal(path: Path) -> bool:
    """Whether a file begins as a journal does, even if it was cut off, or is empty. True if it cannot be read."""
    try:
        with path.open("rb") as file:
            return _BEGIN.startswith(file.read(len(_BEGIN)).strip().split(b"\n")[0])
    except OSError:
        return True


def encoded(record: Mapping[str, Any]) -> bytes:
    """The line of a record, with its end."""
    return (json.dumps(mapped(record, _encode), allow_nan=False, separators=(",", ":")) + "\n").encode()


def decoded(line: bytes) -> dict[str, Any]:
    """The record of a line. Raises ValueError for a line that no journal has."""
    record = _DECODER.decode(line.decode())
    if b'"NaN"' in line or b'Infinity"' in line:  # most lines have none
        record = mapped(record, lambda value: _NON_FINITE.get(value, value) if isinstance(value, str) else value)
    if not isinstance(record, dict) or not isinstance(kind := record.get("kind"), str):
        raise ValueError("it must be an object with a kind")
    needed = _NEEDED.get(kind)
    for name in ("round", "step"):
        value = record.get(name, None if name == needed else 0)
        if type(value) is not int or abs(value) > _LARGEST:
            raise ValueError("its round and step must be integers")
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
    return json.dumps(value) if isinstance(value, float) and not math.isfinite(value) else value
