"""Reading a journal: the last run in a file, without the rounds that a resume has undone.

A journal of a week may have a million rounds. So a file is read twice: once to see which lines are the last run's, and
once for its rounds, one after the other.
"""

from __future__ import annotations

import json
import os
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from hdet.checks import shown
from hdet.errors import JournalError
from hdet.files import named, path_of
from hdet.journal.file import SCHEMA, decoded


@dataclass(frozen=True)
class JournalData:
    """One run, as read from a journal."""

    header: dict[str, Any]
    rounds: list[dict[str, Any]] = field(default_factory=list)
    """In the order of their round numbers. The last line of a round counts, and undoes the rounds after it."""
    resumes: list[dict[str, Any]] = field(default_factory=list)


class JournalStream(NamedTuple):
    """One run in a journal whose rounds are not kept in memory."""

    header: dict[str, Any]
    rounds: Iterator[dict[str, Any]]
    """Like :attr:`JournalData.rounds`, but read from the file one by one, once."""
    resumes: list[dict[str, Any]]
    length: int
    """The number of rounds."""


def read_journal(path: str | os.PathLike[str]) -> JournalData:
    """The last run in a journal file. A last line that was cut off is left out.

    A resume undoes the rounds that end after its step. Lines of other runs between those of this one are left out.

    Raises:
        JournalError: the file was not written by hdet, or is damaged; names the line.
    """
    stream = stream_journal(path)
    return JournalData(stream.header, list(stream.rounds), stream.resumes)


def stream_journal(path: str | os.PathLike[str]) -> JournalStream:
    """What :func:`read_journal` reads, with rounds that are read when they are asked for."""
    file = path_of(path, "path of a journal")
    if not file.is_file():
        raise JournalError(f"path must be a journal's file, but there is none at {named(path)}; check the path")
    header: dict[str, Any] | None = None
    resumes: list[dict[str, Any]] = []
    lines, rounds, steps = array("q"), array("q"), array("q")
    for number, record in _records(file):
        kind, keep = record["kind"], len(lines)
        if kind == "header":
            header, resumes, keep = record, [], 0
        elif header is None or record.get("run") != header.get("run"):
            continue
        elif kind == "resume":
            resumes.append(record)
            keep = bisect_right(steps, record["step"])
        elif kind == "round":
            keep = bisect_left(rounds, record["round"])
        del lines[keep:], rounds[keep:], steps[keep:]
        if kind == "round":
            lines.append(number)
            rounds.append(record["round"])
            steps.append(record.get("step", 0))
    if header is None:
        raise JournalError(f"{path} has no header line, so it is not a journal; give a file written by journal=")
    if header.get("schema") != SCHEMA:
        raise JournalError(
            f"{path} has journal schema {shown(header.get('schema'))}, this hdet reads {SCHEMA}; use the hdet "
            "that wrote it"
        )
    return JournalStream(header, _at_lines(file, lines), resumes, len(lines))


def _at_lines(path: Path, lines: Iterable[int]) -> Iterator[dict[str, Any]]:
    """The records in these lines, which ascend."""
    with path.open("rb") as file:
        before = 0
        for number in lines:
            yield decoded(next(islice(file, number - before - 1, None)))
            before = number


def _records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Every record, and the number of its line.

    A line that was cut off is left out if it is the last, or if the run was resumed after it.
    """
    cut: JournalError | None = None
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.isspace():
                continue
            try:
                record = decoded(line)
            except ValueError as error:
                text = f"{path}, line {number} is not a record ({error}); remove that line, or give another file"
                if cut is not None or not isinstance(error, json.JSONDecodeError):
                    raise cut or JournalError(text) from error
                cut = JournalError(text)
                continue
            if cut is not None and record["kind"] == "round" and "lost" not in record:
                raise cut  # no run was killed before this line, and no disk was full
            cut = None
            yield number, record
