"""The journal: what happened, one JSON line per round.

A journal file is a header line, then one line per round, and a line for every resume. Lines are appended and flushed,
so a run that dies leaves a readable file; of a round that is written again after a resume, the last line is read.

Numbers that JSON does not know are written as the strings "NaN", "Infinity" and "-Infinity".
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TextIO, runtime_checkable

from hdet.errors import ArgumentError, JournalError

__all__ = ["SCHEMA", "Journal", "JournalData", "Sink", "open_journal", "read_journal"]

SCHEMA = 1
"""Version of the schema, in every header."""
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@runtime_checkable
class Sink(Protocol):
    """Anything that takes records: a :class:`Journal`, or an adapter to an experiment tracker."""

    def write(self, record: Mapping[str, Any]) -> None:
        """Take one record: a dict with "kind" one of "header", "round", "resume"."""


class Journal:
    """A journal file. Opened at the first write, appended to, flushed after every line; never pickled open."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if self.path.is_dir():
            raise ArgumentError(f"journal must be the path of a file, but {self.path} is a folder; name a file in it")
        self._file: TextIO | None = None

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

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one line."""
        if self._file is None:
            self._file = _open_for_append(self.path)
        self._file.write(json.dumps(_encode(record), allow_nan=False, separators=(",", ":")) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file. A later write opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None


@dataclass(frozen=True)
class JournalData:
    """One run, as read from a journal."""

    header: dict[str, Any]
    rounds: list[dict[str, Any]] = field(default_factory=list)
    """In the order of their round numbers; the last line of a round wins."""
    resumes: list[dict[str, Any]] = field(default_factory=list)


def open_journal(journal: str | os.PathLike[str] | Sink | None) -> Sink | None:
    """What the ``journal=`` argument means."""
    if journal is None or isinstance(journal, Sink):
        return journal
    if isinstance(journal, (str, os.PathLike)):
        return Journal(journal)
    raise ArgumentError(
        f"journal must be a path, an object with write(record), or None, but got {journal!r}; "
        'for instance journal="run.jsonl"'
    )


def read_journal(path: str | os.PathLike[str]) -> JournalData:
    """The last run in a journal file. A last line that was cut off is left out."""
    records = _records(Path(path))
    starts = [i for i, record in enumerate(records) if record.get("kind") == "header"]
    if not starts:
        raise JournalError(f"{path} is no journal: it has no header line; give a file written by journal=")
    header = records[starts[-1]]
    if header.get("schema") != SCHEMA:
        raise JournalError(
            f"{path} has journal schema {header.get('schema')!r}, this hdet reads {SCHEMA}; use the hdet that wrote it"
        )
    run = records[starts[-1] + 1 :]
    rounds = {record["round"]: record for record in run if record["kind"] == "round"}
    resumes = [record for record in run if record["kind"] == "resume"]
    return JournalData(header, [rounds[k] for k in sorted(rounds)], resumes)


def _records(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text(encoding="utf-8").split("\n")
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            if line.strip():
                records.append(_decode(json.loads(line)))
        except json.JSONDecodeError as error:
            if not _was_cut_off(lines, number):
                raise JournalError(
                    f"{path}, line {number} is not JSON ({error}); remove that line, or give a file written by journal="
                ) from error
    return records


def _was_cut_off(lines: list[str], number: int) -> bool:
    """Whether line ``number`` may be what a killed run left: the last line, or the one before a resumed run went on."""
    following = next((line for line in lines[number:] if line.strip()), None)
    return following is None or any(f'"kind":"{kind}"' in following for kind in ("header", "resume"))


def _open_for_append(path: Path) -> TextIO:
    """Open at the end; a line that was cut off is ended first, so that it cannot swallow the next one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        if file.tell() > 0:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
    return path.open("a", encoding="utf-8")


def _encode(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {key: _encode(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_encode(item) for item in value]
    return value


def _decode(value: Any) -> Any:
    if isinstance(value, str):
        return _NON_FINITE.get(value, value)
    if isinstance(value, dict):
        return {key: _decode(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_decode(item) for item in value]
    return value
