"""Reading a journal: the last run in a file, without the rounds that a resume has undone.

A journal of a week may have a million rounds. So a file is read twice: once for the first words of its lines, which say
what belongs to the last run, and once for the rounds themselves, one after the other.
"""

from __future__ import annotations

import json
import os
import re
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from hdet.checks import shown
from hdet.errors import JournalError
from hdet.files import named, path_of
from hdet.journal.file import SCHEMA, decoded

_ROUND = re.compile(rb'\{"run":"(\w+)","kind":"round","round":(\d{1,15}),"step":(\d{1,15}),')
"""How the line of a round begins, as hdet writes it."""
_PER_KNOB = ("delta", "velocity", "error", "learned", "base_before", "base", "shape")


@dataclass(frozen=True)
class JournalData:
    """One run, as read from a journal."""

    header: dict[str, Any]
    rounds: list[dict[str, Any]] = field(default_factory=list)
    """In the order of their round numbers; the last line of a round wins."""
    resumes: list[dict[str, Any]] = field(default_factory=list)


class JournalStream(NamedTuple):
    """One run in a journal whose rounds are not kept in memory."""

    header: dict[str, Any]
    rounds: Iterator[dict[str, Any]]
    """Like :attr:`JournalData.rounds`, but read from the file one by one, once."""
    resumes: list[dict[str, Any]]
    most: int
    """No more rounds than this."""


def read_journal(path: str | os.PathLike[str]) -> JournalData:
    """The last run in a journal file. A last line that was cut off is left out.

    A resume undoes the rounds that end after its step. Lines of other runs between those of this one are left out.

    Raises:
        JournalError: the file was not written by hdet, or is damaged; names the line.
    """
    stream = stream_journal(path)
    return JournalData(stream.header, list(stream.rounds), stream.resumes)


def stream_journal(path: str | os.PathLike[str]) -> JournalStream:
    """What :func:`read_journal` reads, with rounds that are read when they are asked for. Errors in them come then."""
    file = path_of(path, "path of a journal")
    if not file.is_file():
        raise JournalError(f"path must be a journal's file, but there is none at {named(path)}; check the path")
    last = _LastRun()
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            last.see(number, line)
    if last.header is None:
        for _ in _records(file):  # another file: its first line is to blame
            pass
        raise JournalError(f"{path} has no header line, so it is not a journal; give a file written by journal=")
    if last.header.get("schema") != SCHEMA:
        raise JournalError(
            f"{path} has journal schema {shown(last.header.get('schema'))}, this hdet reads {SCHEMA}; use the hdet "
            "that wrote it"
        )
    return JournalStream(last.header, _rounds(file, last.lines), last.resumes, len(last.lines))


class _LastRun:
    """Which lines of a file are the last run's: its header, its resumes, and the rounds that these have not undone.

    Lines that are damaged do not count here: :func:`_records` finds them.
    """

    def __init__(self) -> None:
        self.header: dict[str, Any] | None = None
        self.resumes: list[dict[str, Any]] = []
        self._forget_rounds()

    def _forget_rounds(self) -> None:
        """Three columns, in the order of the rounds: eight bytes for each number of a long journal."""
        self.lines, self._rounds, self._steps = array("q"), array("q"), array("q")

    def see(self, number: int, line: bytes) -> None:
        """The next line. That of a round is not parsed beyond its first words."""
        head = _ROUND.match(line)
        if head is not None:
            run, k, step = head.groups()
            if self.header is not None and self.header.get("run") == run.decode():
                self._add(number, int(k), int(step))
            return
        try:
            record = decoded(line)
        except ValueError:
            return
        if record["kind"] == "header":
            self.header, self.resumes = record, []
            self._forget_rounds()
        elif self.header is None or record.get("run") != self.header.get("run"):
            return
        elif record["kind"] == "resume":
            self.resumes.append(record)
            while self._steps and self._steps[-1] > record["step"]:
                for column in (self.lines, self._rounds, self._steps):
                    column.pop()
        elif record["kind"] == "round":
            self._add(number, record["round"], record.get("step", 0))

    def _add(self, number: int, k: int, step: int) -> None:
        """A round; the last line of a round wins."""
        row, columns = (number, k, step), (self.lines, self._rounds, self._steps)
        at = len(self._rounds) if not self._rounds or k > self._rounds[-1] else bisect_left(self._rounds, k)
        is_there = at < len(self._rounds) and self._rounds[at] == k
        for column, value in zip(columns, row, strict=True):
            column[at : at + is_there] = array("q", [value])


def _rounds(path: Path, lines: Sequence[int]) -> Iterator[dict[str, Any]]:
    """The records in these lines, in this order; those that were cut off are left out."""
    wanted = bytearray(max(lines, default=0) + 1)
    for number in lines:
        wanted[number] = 1
    found = (record for number, record in _records(path) if number < len(wanted) and wanted[number])
    is_sorted = all(before < after for before, after in pairwise(lines))
    return found if is_sorted else iter(sorted(found, key=lambda record: int(record["round"])))


def in_order(record: Mapping[str, Any], knobs: Sequence[str]) -> Mapping[str, Any]:
    """A round whose lists have the entries of these knobs, in this order; None for knobs that it does not have.

    A round has its own list of knobs if it differs from the header's, because groups were added to an optimizer.
    """
    own = record.get("knobs")
    if own is None or list(own) == list(knobs):
        return record

    def ordered(row: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
        found = {name: dict(zip(own, row[name], strict=False)) for name in names if row.get(name) is not None}
        return {**row, **{name: [values.get(knob) for knob in knobs] for name, values in found.items()}}

    replicas = [ordered(row, ("values", "multipliers")) for row in record.get("replicas") or ()]
    return {**ordered(record, _PER_KNOB), "replicas": replicas, "knobs": list(knobs)}


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
