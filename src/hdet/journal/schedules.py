"""The schedules that a run has found, read from its journal. Needs no torch."""

from __future__ import annotations

import os
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hdet.errors import ArgumentError
from hdet.journal.reading import JournalData, stream_journal
from hdet.rule.enums import Event
from hdet.state import reading


class Found(NamedTuple):
    """The base value of one knob over the steps of a run, as far as a journal knows it."""

    steps: Sequence[int]
    """In ascending order."""
    values: Sequence[float]
    """The base value at each of them."""
    fall: tuple[float, float] | None = None
    """The step after which a trapezoid falls, and its last one; None: it is none, or does not fall."""


def found_schedules(journal: str | os.PathLike[str] | JournalData) -> dict[str, Found]:
    """The base value of every knob over the steps of a run: at the beginning of each round, and at its end."""
    return begun_and_found(journal)[1]


def value_at(t: int, steps: Sequence[int], values: Sequence[float], fall: tuple[float, float] | None = None) -> float:
    """The value at a step: between two known ones its square root is interpolated linearly; outside the nearest.

    In the fall of a trapezoid it is what has fallen since the last known one.

    >>> [value_at(t, [1, 3], [1.0, 9.0]) for t in (0, 2, 9)]
    [1.0, 4.0, 9.0]
    >>> [value_at(t, [0, 9], [8.0, 0.0], fall=(5, 9)) for t in (5, 6, 9)]
    [8.0, 4.0, 0.0]
    """
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
    """The step from which the knob exists: the one at which its group was added, or 0."""
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
        first = bisect_left(self.steps, start)
        steps, values = self.steps[first:], self.values[first:]
        if not steps:
            return Found([self.begins], [float(self.last[1]) if self.last is not None else 0.0])
        if start <= 0 and self.begins <= 0:
            return Found(steps, values)
        later = bisect_right(steps, self.begins)
        return Found(array("q", [self.begins]) + steps[later:], array("d", [values[0]]) + values[later:])


@reading("the journal", "it is damaged: give another file")
def begun_and_found(journal: str | os.PathLike[str] | JournalData) -> tuple[dict[str, int], dict[str, Found]]:
    """For every knob the step from which it exists, and what was found, round by round.

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
        if record.get("event") in (Event.FIRST_STEP, Event.RESTARTED):
            start = step
        for g, name in enumerate(record.get("knobs") or data.header["knobs"]):  # its own, if groups were added
            course = courses[str(name)] = courses.get(str(name)) or _Course(before)
            course.end_round(step, record["base_before"][g], record["base"][g])
            if is_trapezoid and total:
                course.see_fall(step, record["shape"][g], total - 1)
            if undone is not None:  # step N began from the weights of step N
                course.forget_from(undone)
        for name, begins in (record.get("added") or {}).items():
            courses[name].begins = begins
        before = step
    if record is None:
        raise ArgumentError("the journal has no round yet; give one of a run that has ended at least one")
    if isinstance(total, int) and total:
        for course in courses.values():
            course.forget_from(total)
    fall = next((one.fall for one in courses.values() if one.fall), None)  # of a knob that is there from the beginning
    found = {name: one.found(start)._replace(fall=fall) for name, one in courses.items()}
    return {name: one.begins for name, one in courses.items()}, found
