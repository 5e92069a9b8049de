"""Measured parts of a run with ``auto``, and the constants of lab/benchmarks/cost_model.py that fit them best."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from cost_model import Pass, Passes, bytes_per_parameter, looks, rounds

__all__ = ["Errors", "Row", "errors", "fit", "fitted", "line", "share"]

WEIGHT_BYTES, MOMENT_BYTES = 4, 8
"""Bytes per parameter, w and v, of the measured models: fp32 with Adam."""


class Row(NamedTuple):
    """One measured model; seconds."""

    model: str
    parameters: int
    steps: int
    compiled: bool
    ratio: float
    """Time of a run with auto over that of one without."""
    step: float
    look: float
    keep: float
    keep_host: float
    end: float

    @classmethod
    def read(cls, row: Mapping[str, Any]) -> Row:
        """From a row of the JSON file of lab/benchmarks/auto_cost.py."""
        seconds = {name: float(row["parts_ms"][name]) / 1e3 for name in cls._fields[5:]}
        for name, value in seconds.items():
            if not value > 0:
                raise ValueError(
                    f"{row['model']}: {name} must have taken time, but got {1e3 * value:g} ms; measure anew"
                )
        return cls(
            str(row["model"]),
            int(row["parameters"]),
            int(row["steps"]),
            bool(row["compiled"]),
            float(row["ratio"]),
            **seconds,
        )


def fit(rows: Sequence[Row]) -> Passes:
    """Launch time and bandwidth of each kind of pass, with the least relative error.

    Where a part does not grow with the size, because launches hide it, the bandwidth of a look is taken.
    """
    if len({row.parameters for row in rows}) < 2:
        raise ValueError("a fit needs rows of at least two sizes; measure more models with lab/benchmarks/auto_cost.py")
    sizes = bytes_per_parameter(WEIGHT_BYTES, MOMENT_BYTES)
    unexplained = [row.end - (row.keep + row.keep_host) / 2 for row in rows]
    taken = (
        [row.look for row in rows],
        [row.keep for row in rows],
        [max(0.0, seconds) for seconds in unexplained],
    )
    scales = (*taken[:2], [row.end for row in rows])  # what is left of an end is judged as a part of it
    found = []
    for size, seconds, scale in zip(sizes, taken, scales, strict=True):
        fixed, slope = line([size * row.parameters for row in rows], seconds, scale)
        found.append((fixed, 1 / slope if slope > 0 else math.inf))
    bandwidth = found[0][1]
    if math.isinf(bandwidth):
        raise ValueError("the looks do not grow with the model, so no bandwidth can be fitted; measure larger models")
    return Passes(*(Pass(fixed, own if math.isfinite(own) else bandwidth) for fixed, own in found))


def line(x: Sequence[float], y: Sequence[float], scale: Sequence[float]) -> tuple[float, float]:
    """The intercept and slope, neither below 0, for which the errors over ``scale`` have the least squares.

    >>> line([1.0, 2.0, 3.0], [3.0, 5.0, 7.0], [1.0, 1.0, 1.0])
    (1.0, 2.0)
    >>> line([1.0, 3.0], [3.0, 1.0], [1.0, 1.0])
    (2.0, 0.0)
    """
    w = [1 / s**2 for s in scale]
    total = sum(w)
    mean_x, mean_y = (sum(k * a for k, a in zip(w, values, strict=True)) / total for values in (x, y))
    spread = sum(k * (a - mean_x) ** 2 for k, a in zip(w, x, strict=True))
    slope = sum(k * (a - mean_x) * (b - mean_y) for k, a, b in zip(w, x, y, strict=True)) / spread
    if slope <= 0:
        return max(0.0, mean_y), 0.0
    fixed = mean_y - slope * mean_x
    if fixed >= 0:
        return fixed, slope
    rows = list(zip(w, x, y, strict=True))
    return 0.0, sum(k * a * b for k, a, b in rows) / sum(k * a * a for k, a, _ in rows)


class Errors(NamedTuple):
    """The largest relative errors of the fit."""

    look: float
    end: float
    ratio: float
    """Of the whole run's time, with the part that ``auto`` added."""


def errors(rows: Sequence[Row], passes: Passes) -> Errors:
    """Fitted parts against measured ones."""
    pairs = [(row, *fitted(row, passes)) for row in rows]
    return Errors(
        max(abs(look / row.look - 1) for row, look, _ in pairs),
        max(abs(end / row.end - 1) for row, _, end in pairs),
        max(abs(1 + share(row, look, end, row.steps) - row.ratio) / row.ratio for row, look, end in pairs),
    )


def fitted(row: Row, passes: Passes) -> tuple[float, float]:
    """Look and end of a round of a measured model on one device; step and copies to the host are as measured."""
    sizes = [size * row.parameters for size in bytes_per_parameter(WEIGHT_BYTES, MOMENT_BYTES)]
    look, keep, measure = (one.seconds(size) for one, size in zip(passes, sizes, strict=True))
    return look, (keep + row.keep_host) / 2 + measure


def share(row: Row, look: float, end: float, steps: int) -> float:
    """What ``auto`` adds to a run of that many steps, over the run without it."""
    return (looks(steps) * look + rounds(steps) * end) / (steps * row.step)
