"""A run's folder, as ``python -m lab train`` leaves it: ``run.json`` and ``curve.csv`` beside the journal."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from hdet.errors import JournalError
from hdet.report.numbers import finite

__all__ = ["Curve", "Summary", "read_curve", "read_summary"]

_NOTHING: Mapping[str, Any] = MappingProxyType({})


class Summary(NamedTuple):
    """``run.json``: how a run was set up and how it ended. All of it may be unknown."""

    name: str = ""
    task: str = ""
    arguments: Mapping[str, Any] = _NOTHING
    steps: int | None = None
    final: Mapping[str, float | None] = _NOTHING
    """The loss, under "loss", and metrics, at the end."""
    baseline: float | None = None
    """Final loss of the fixed schedule that it was compared with."""
    crashed: bool = False
    seconds: float | None = None
    seed: int | None = None


class Curve(NamedTuple):
    """``curve.csv``: losses and the learning rate over steps."""

    steps: tuple[float, ...] = ()
    train: tuple[float | None, ...] = ()
    validation: tuple[float | None, ...] = ()
    rates: tuple[float | None, ...] = ()
    """That each step was made with; the mean over parameter groups."""


def read_summary(path: Path) -> Summary | None:
    """Read ``run.json``; None where there is none."""
    if not path.exists():
        return None
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise JournalError(f"{path} is not JSON ({error}); remove it, or run again") from error
    if not isinstance(record, dict):
        raise JournalError(f"{path} must hold one JSON object, but holds a {type(record).__name__}; remove it")
    steps, seed = finite(record.get("steps")), finite(record.get("seed"))
    return Summary(
        name=str(record.get("name") or ""),
        task=str(record.get("task") or ""),
        arguments=_mapping(record.get("arguments")),
        steps=None if steps is None else int(steps),
        final={str(key): finite(value) for key, value in _mapping(record.get("final")).items()},
        baseline=finite(_mapping(record.get("baseline")).get("loss")),
        crashed=bool(record.get("crashed")),
        seconds=finite(record.get("seconds")),
        seed=None if seed is None else int(seed),
    )


def read_curve(path: Path) -> Curve:
    """Read ``curve.csv``; empty where there is none. A last line that was cut off is left out."""
    if not path.exists():
        return Curve()
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.reader(file))
    except (UnicodeDecodeError, csv.Error) as error:
        raise JournalError(f"{path} is not a table of text ({error}); remove it, or run again") from error
    head = rows[0] if rows else []
    if "step" not in head or "train_loss" not in head:
        raise JournalError(
            f"{path} must have the columns step, train_loss and validation_loss, but begins with {head}; remove it"
        )
    names = ("step", "train_loss", "validation_loss", "rate")
    places = [head.index(name) if name in head else -1 for name in names]
    found = [[_cell(row, place) for place in places] for row in rows[1:] if len(row) == len(head)]
    points = [(step, *rest) for step, *rest in found if step is not None]
    return Curve(*zip(*points, strict=True)) if points else Curve()


def _cell(row: Sequence[str], place: int) -> float | None:
    try:
        return finite(float(row[place])) if place >= 0 else None
    except ValueError:  # empty, or cut off
        return None


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else _NOTHING
