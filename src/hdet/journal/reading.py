"""Reading a journal: the last run in a file, without what a resume has undone.

The file is gone through twice: once for where the rounds stand, once for what is in them.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from hdet.checks import shown
from hdet.errors import JournalError
from hdet.files import path_of
from hdet.journal.file import SCHEMA, decoded

_ROUND = re.compile(rb'\{(?:"run":"([^"\\]*)",)?"kind":"round","round":(\d{1,18}),"step":(\d{1,18})[,}]')
"""How a line of a round begins: enough to know where it belongs."""

_PER_KNOB = ("delta", "velocity", "error", "learned", "base_before", "base", "shape")


@dataclass(frozen=True)
class JournalData:
    """One run, as read from a journal."""

    header: dict[str, Any]
    rounds: list[dict[str, Any]] = field(default_factory=list)
    """In the order of their round numbers; the last line of a round wins."""
    resumes: list[dict[str, Any]] = field(default_factory=list)


class _Place(NamedTuple):
    """Where a round stands."""

    line: int
    offset: int
    step: int | None


class RoundLine(NamedTuple):
    """A round as it stands in the file."""

    path: Path
    number: int
    """Of the line."""
    text: bytes

    def record(self) -> dict[str, Any]:
        """All of it."""
        return _parsed(self.path, self.number, self.text)


@dataclass(frozen=True)
class LastRun:
    """The last run in a file: its rounds are read one after the other, when they are asked for."""

    path: Path
    header: dict[str, Any]
    resumes: list[dict[str, Any]]
    places: dict[int, _Place]
    """By number of the round."""

    def rounds(self) -> Iterator[RoundLine]:
        """In the order of their numbers."""
        return self._lines(sorted(self.places))

    def _lines(self, numbers: Sequence[int]) -> Iterator[RoundLine]:
        if not numbers:  # there may be no file
            return
        with self.path.open("rb") as file:
            for place in (self.places[number] for number in numbers):
                file.seek(place.offset)
                yield RoundLine(self.path, place.line, file.readline())


def read_journal(path: str | os.PathLike[str]) -> JournalData:
    """The last run in a journal file. A last line that was cut off is left out.

    Raises:
        JournalError: the file was not written by hdet, or is damaged; names the line.
    """
    run = last_run(path)
    return JournalData(run.header, [line.record() for line in run.rounds()], run.resumes)


def in_order(record: dict[str, Any], knobs: Sequence[str]) -> dict[str, Any]:
    """A round with the entries of these knobs in its lists, in this order; None for those that it does not have.

    A round has knobs of its own where they are not the header's, since groups were added to an optimizer.
    """
    own = record.get("knobs")
    if own is None or list(own) == list(knobs):
        return record

    def ordered(row: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
        found = {name: dict(zip(own, row[name], strict=False)) for name in names if row.get(name) is not None}
        return {**row, **{name: [values.get(knob) for knob in knobs] for name, values in found.items()}}

    replicas = [ordered(row, ("values", "multipliers")) for row in record.get("replicas") or ()]
    return {**ordered(record, _PER_KNOB), "replicas": replicas, "knobs": list(knobs)}


def last_run(path: str | os.PathLike[str]) -> LastRun:
    """Where in a journal file its last run is.

    A resume takes back the rounds that end after its step. Lines of another run, which got in between, are left out.
    """
    file = _file_at(path)
    header: dict[str, Any] | None = None
    resumes: list[dict[str, Any]] = []
    places: dict[int, _Place] = {}
    for line, offset, run, kind, record in _lines(file):
        if kind == "header":
            header, resumes, places = record, [], {}
        elif header is None or run not in (None, header.get("run")):
            continue
        elif kind == "resume":
            resumes.append(record)
            places = {k: place for k, place in places.items() if place.step is None or place.step <= record["step"]}
        elif kind == "round":
            places[record["round"]] = _Place(line, offset, record.get("step"))
    if header is None:
        raise JournalError(f"{path} is no journal: it has no header line; give a file written by journal=")
    if header.get("schema") != SCHEMA:
        raise JournalError(
            f"{path} has journal schema {shown(header.get('schema'))}, this hdet reads {SCHEMA}; use the hdet that "
            "wrote it"
        )
    return LastRun(file, header, resumes, places)


class _Line(NamedTuple):
    number: int
    offset: int
    run: str | None
    kind: str
    record: dict[str, Any]
    """All of it; of a round perhaps only its number and step."""


def _lines(path: Path) -> Iterator[_Line]:
    """Every line with a record. One that was cut off is left out: the last, or the one before a run went on.

    A round whose beginning tells enough is not parsed, unless it may have been cut off.
    """
    with path.open("rb") as file:
        for (text, number, offset, line), (after, *_, following) in pairwise(
            chain(_glances(file), [(b"", 0, 0, None)])
        ):
            goes_on = following is not None and (following.kind in ("header", "resume") or b'"lost":' in after)
            may_be_cut_off = goes_on or not after
            if line is not None and (line.kind != "round" or not may_be_cut_off):
                yield line
            else:
                yield from _waited(path, number, offset, text, cut_off=may_be_cut_off)


def _glances(file: Iterable[bytes]) -> Iterator[tuple[bytes, int, int, _Line | None]]:
    """Lines that are not empty, where they stand, and what a glance at each tells."""
    offset = 0
    for number, text in enumerate(file, start=1):
        if not text.isspace():
            yield text, number, offset, _glance(number, offset, text)
        offset += len(text)


def _waited(path: Path, number: int, offset: int, text: bytes, *, cut_off: bool) -> Iterator[_Line]:
    """A line that may have been cut off."""
    try:
        record = _parsed(path, number, text)
    except JournalError as error:
        if not (cut_off and isinstance(error.__cause__, json.JSONDecodeError)):
            raise
    else:
        yield _Line(number, offset, record.get("run"), record["kind"], record)


def _glance(number: int, offset: int, text: bytes) -> _Line | None:
    """A line, of a round no more than its beginning; None for one that is no record."""
    begins = _ROUND.match(text)
    if begins is not None:
        run = begins[1].decode(errors="replace") if begins[1] is not None else None
        return _Line(number, offset, run, "round", {"round": int(begins[2]), "step": int(begins[3])})
    try:
        record = decoded(text)
    except ValueError:
        return None
    return _Line(number, offset, record.get("run"), record["kind"], record)


def _parsed(path: Path, number: int, text: bytes) -> dict[str, Any]:
    try:
        return decoded(text)
    except UnicodeDecodeError as error:
        raise JournalError(
            f"{path}, line {number} is not text ({error}); remove that line, or give a file written by journal="
        ) from error
    except ValueError as error:
        found = "is not JSON" if isinstance(error, json.JSONDecodeError) else "is no record"
        raise JournalError(
            f"{path}, line {number} {found} ({error}); remove that line, or give a file written by journal="
        ) from error


def _file_at(path: object) -> Path:
    file = path_of(path, "path of a journal")
    if not file.is_file():
        raise JournalError(f"path must be a journal's file, but there is none at {shown(str(path))}; check the path")
    return file
