"""What a run has left in its folder: ``run.json``, ``curve.csv``, and its journal if it has one."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hdet.report.data import RunData, load_run
from hdet.report.numbers import finite
from hdet.report.series import Figure, Line, base_rate, curves, line
from lab.runs.folder import Folder

__all__ = ["Curve", "Result", "figures_of", "result_of"]


class Curve(NamedTuple):
    """``curve.csv``: losses and the learning rate over steps. A cell that is empty or not finite is None."""

    steps: tuple[float, ...] = ()
    train: tuple[float | None, ...] = ()
    validation: tuple[float | None, ...] = ()
    rates: tuple[float | None, ...] = ()
    """The rate of each step; the mean over parameter groups."""


class Result(NamedTuple):
    """One run. A run of torch's own scheduler has no journal."""

    name: str
    about: Mapping[str, Any]
    """``run.json``."""
    final: Mapping[str, float | None]
    """The loss, under "loss", and metrics, at the end."""
    curve: Curve
    journal: RunData | None


def result_of(folder: Folder) -> Result:
    """Read a run's folder. The journal of a run that crashed early is empty, and then there is none."""
    about, curve = folder.read(), Curve()
    name = about.get("name") or folder.path.resolve().name
    final = {key: finite(value) for key, value in (about.get("final") or {}).items()}
    has_begun = folder.journal.exists() and folder.journal.stat().st_size > 0
    journal = load_run(folder.path)._replace(name=name) if has_begun else None
    if folder.curve.exists():
        with folder.curve.open(encoding="utf-8", newline="") as file:
            rows = [[finite(float(cell)) if cell else None for cell in row] for row in list(csv.reader(file))[1:]]
        curve = Curve(*zip(*rows, strict=True)) if rows else curve
    return Result(name, about, final, curve, journal)


def figures_of(results: Sequence[Result]) -> tuple[Figure, ...]:
    """The runs over each other: validation loss, and learning rate."""
    losses = {one.name: _line(one.curve.steps, one.curve.validation) for one in results}
    rates = {one.name: base_rate(one.journal) if one.journal else _rates(one) for one in results}
    found = curves("Validation loss", "Validation loss of every run.", losses, "validation loss")
    return found + curves("Learning rate", "The mean over parameter groups.", rates, "learning rate")


def _rates(one: Result) -> Line:
    return _line(one.curve.steps, one.curve.rates)


def _line(steps: Sequence[float], values: Sequence[float | None]) -> Line:
    return line((x, y) for x, y in zip(steps, values, strict=True) if y is not None)
