"""The found schedule: base values over steps, out of a journal, for use elsewhere."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hdet.errors import ArgumentError
from hdet.journal import JournalData, read_journal
from hdet.schedulers.replay import found_schedules, value_at

__all__ = ["FoundSchedule", "found_schedule", "journal_at"]


class FoundSchedule(NamedTuple):
    """A table: a row per step, a column per knob."""

    knobs: tuple[str, ...]
    steps: tuple[int, ...]
    values: tuple[tuple[float | None, ...], ...]
    """Per step the base values, in the order of the knobs; None before a knob was added."""

    def as_csv(self) -> str:
        """With a head; steps count from 0."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["step", *self.knobs])
        for step, row in zip(self.steps, self.values, strict=True):
            writer.writerow([step, *("" if value is None else repr(value) for value in row)])
        return text.getvalue()

    def as_dict(self) -> dict[str, Any]:
        """``steps``, and a list of values for each knob."""
        columns = map(list, zip(*self.values, strict=True))
        return {"steps": list(self.steps), "values": dict(zip(self.knobs, columns, strict=True))}


def journal_at(path: Path) -> JournalData:
    """The journal that is at a path, or in a run's folder."""
    file = path / "journal.jsonl" if path.is_dir() else path
    if not path.exists():
        raise ArgumentError(f"a run must be a journal or a run's folder, but {path} does not exist; check the path")
    if not file.exists():
        raise ArgumentError(
            f"{path} has no journal, so no schedule was found there; give a run of a search or of replicas"
        )
    return read_journal(file)


def found_schedule(journal: JournalData, every_step: bool = False) -> FoundSchedule:
    """The base values at the steps that a journal knows, or at every step from the first to the last.

    They are those that :func:`hdet.schedule_from` replays: between two known steps the square root goes evenly.
    """
    found = found_schedules(journal)
    known = sorted({step for steps, _ in found.values() for step in steps})
    steps = range(known[0], known[-1] + 1) if every_step else known
    rows = [tuple(_at(step, *one) for one in found.values()) for step in steps]
    return FoundSchedule(tuple(found), tuple(steps), tuple(rows))


def _at(step: int, steps: Sequence[int], values: Sequence[float]) -> float | None:
    """A knob's value at a step; None before it was there.

    >>> _at(2, [0, 4], [1.0, 9.0]), _at(9, [0, 4], [1.0, 9.0]), _at(0, [1, 4], [1.0, 9.0])
    (4.0, 9.0, None)
    """
    return None if step < steps[0] else value_at(step, steps, values)
