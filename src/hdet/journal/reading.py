"""Reading a journal: the last run in a file, without the rounds that a resume has undone, and the schedules it found.

A journal of a week may have a million rounds. So a file is read twice: once to see which lines are the last run's, and
once for its rounds, one after the other. Needs no torch.
"""

from __future__ import annotations

import json
import os
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from hdet.errors import ArgumentError, JournalError
from hdet.files import named, path_of
from hdet.journal.file import SCHEMA, decoded
from hdet.rule.enums import Event
from hdet.state import reading, version_words


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
            version_words(f"the schema of the journal {path}", header.get("schema"), SCHEMA, header.get("hdet"))
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


# -- the schedules that a run has found --------------------------------------------------------------------------------


class Found(NamedTuple):
    """The base value of one knob over the steps of a run, as far as a journal knows it."""

    steps: Sequence[int]
    """In ascending order."""
    values: Sequence[float]
    """The base value at each of them."""
    begins: int = 0
    """The step from which the knob exists."""
    fall: tuple[float, float] | None = None
    """The step after which a trapezoid falls, and its last one; None: it is none, or does not fall."""

    def at(self, t: int) -> float:
        """The value at a step: between two known ones its square root is interpolated linearly; outside the nearest.

        In the fall of a trapezoid it is what has fallen since the last known one.

        >>> [Found([1, 3], [1.0, 9.0]).at(t) for t in (0, 2, 9)]
        [1.0, 4.0, 9.0]
        >>> [Found([0, 9], [8.0, 0.0], fall=(5, 9)).at(t) for t in (5, 6, 9)]
        [8.0, 4.0, 0.0]
        """
        steps, values, fall = self.steps, self.values, self.fall
        i = bisect_right(steps, t)
        if i in (0, len(steps)):
            return values[max(i - 1, 0)]
        done = (t - steps[i - 1]) / (steps[i] - steps[i - 1])
        before, after = values[i - 1], values[i]
        if done == 0:
            return before
        if fall is not None and steps[i] > fall[0]:
            then, now = (1 - (max(step - fall[0], 0) / (fall[1] - fall[0])) ** 0.5 for step in (steps[i - 1], t))
            return float(before * now / then)
        if before < 0 or after < 0:
            return before + (after - before) * done
        return float((before**0.5 * (1 - done) + after**0.5 * done) ** 2)


@dataclass
class _Course:
    """The base value of one knob over the steps of a run, in two columns: a journal may have a million rounds."""

    begins: int
    """As in :class:`Found`: the step at which the knob's group was added, or 0."""
    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))
    last: tuple[int, float] | None = None
    """Step and value at the end of the last round."""
    top: float = 0.0
    """The schedule's highest value so far."""
    fall: tuple[float, float] | None = None
    """As in :class:`Found`."""

    def end_round(self, step: int, before: float, after: float) -> None:
        """A round has ended with one value at its last step, and has another at ``step``, the one after it."""
        for t, value in ((step - 1, before),) if self.last is None else (self.last, (step - 1, before)):
            if not self.steps or t > self.steps[-1]:
                self.steps.append(t)
                self.values.append(value)
        self.last = step, after

    def see_fall(self, step: int, schedule: float, last: int) -> None:
        """Of a trapezoid that ends at step ``last``: its value at ``step`` says where the fall began."""
        self.top = max(self.top, schedule)
        left = 1 - (1 - schedule / self.top) ** 2 if self.top > 0 else 0.0
        if step < last and 0 < left < 1:
            self.fall = last - (last - step) / left, last

    def forget_from(self, step: float) -> None:
        """Forget this step and those after it."""
        at = bisect_left(self.steps, step)
        del self.steps[at:], self.values[at:]

    def found(self, start: int) -> Found:
        """What is replayed, where steps before ``start`` do not count: until the first that does, the value is its."""
        first, begins = bisect_left(self.steps, start), self.begins
        steps, values = self.steps[first:], self.values[first:]
        if not steps:
            return Found([begins], [float(self.last[1]) if self.last is not None else 0.0], begins)
        if start <= 0 and begins <= 0:
            return Found(steps, values)
        later = bisect_right(steps, begins)
        return Found(array("q", [begins]) + steps[later:], array("d", [values[0]]) + values[later:], begins)


@reading("the journal", "it is damaged: give another file")
def found_schedules(journal: str | os.PathLike[str] | JournalData) -> dict[str, Found]:
    """The base value of every knob over the steps of a run: at the beginning of each round, and at its end.

    What was rolled back is forgotten, and so is the first step of a search: its rate is arbitrary.
    """
    data = journal if isinstance(journal, JournalData) else stream_journal(journal)
    courses: dict[str, _Course] = {}
    arguments = data.header.get("arguments") or {}
    total, start, before, record = arguments.get("total_steps"), 0, 0, None
    is_trapezoid = arguments.get("schedule") == "trapezoid"
    for record in data.rounds:
        step, undone = int(record["step"]), record.get("rolled_back_to")
        total = record.get("total_steps", total)  # it may change
        for g, name in enumerate(record.get("knobs") or data.header["knobs"]):  # its own, if groups were added
            course = courses[str(name)] = courses.get(str(name)) or _Course(before)
            course.end_round(step, record["base_before"][g], record["base"][g])
            if is_trapezoid and total:
                course.see_fall(step, record["shape"][g], total - 1)
            if undone is not None:  # step N began from the weights of step N
                course.forget_from(undone)
        if record.get("event") in (Event.FIRST_STEP, Event.RESTARTED):
            start = step
        for name, begins in (record.get("added") or {}).items():
            courses[name].begins = begins
        before = step
    if record is None:
        raise ArgumentError("the journal has no round yet; give one of a run that has ended at least one")
    if isinstance(total, int) and total:
        for course in courses.values():
            course.forget_from(total)
    fall = next((one.fall for one in courses.values() if one.fall), None)  # of a knob that is there from the beginning
    return {name: one.found(start)._replace(fall=fall) for name, one in courses.items()}
