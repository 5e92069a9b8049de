"""From a workload's file to its scores: pure functions, numbers in, numbers out.

A row's *ratio* from a start is the mean over seeds of its final validation loss over that of plain training at the
best fixed value, seed by seed. Its *excess* is what it loses against plain training that stays at the guess, in
standard errors of the difference.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any, NamedTuple

from knobs.rows import PLAIN, STARTS
from knobs.task import Knob

__all__ = ["ENOUGH", "NEAR", "WORTH", "Cell", "matters", "meets", "score", "standard_error"]

NEAR, ERRORS, ENOUGH, WORTH = 1.03, 2.0, 4, 1.05
"""The target: within 3 % of the best fixed value's loss from every start, never worse than staying at the guess by more
than two standard errors, on four workloads of six; a workload counts if its knob is worth 5 %."""


class Cell(NamedTuple):
    """A row from one start."""

    start: float
    ratio: float
    error: float
    """Standard error of the ratio."""
    excess: float
    """Over staying at the guess, as a part of the best's loss."""
    excess_error: float
    value: float
    """At the end over the best one, on the knob's own scale; geometric mean over seeds."""

    @property
    def near(self) -> bool:
        return self.ratio <= NEAR

    @property
    def harmless(self) -> bool:
        """Not worse than staying at the guess, as far as the seeds can tell."""
        return self.excess <= ERRORS * self.excess_error


def score(content: Mapping[str, Any], row: str, knob: Knob) -> list[Cell]:
    """A row of a workload's file, start by start."""
    found, stayed = content["rows"][row], content["rows"][PLAIN]
    seeds = [seed for seed in found["seeds"] if seed in stayed["seeds"]]
    best = _finals(stayed, STARTS.index(1.0), seeds)
    cells = []
    for place, start in enumerate(STARTS):
        own, guess = _finals(found, place, seeds), _finals(stayed, place, seeds)
        ratios = [a / b for a, b in zip(own, best, strict=True)]
        excess = [(a - g) / b if a < math.inf else math.inf for a, g, b in zip(own, guess, best, strict=True)]
        values = [found["found"][place][found["seeds"].index(seed)] for seed in seeds]
        over = math.exp(fmean(math.log(knob.over(value, content["best"]["value"])) for value in values))
        errors = standard_error(ratios), standard_error(excess)
        cells.append(Cell(start, fmean(ratios), errors[0], fmean(excess), errors[1], over))
    return cells


def _finals(row: Mapping[str, Any], place: int, seeds: Sequence[int]) -> list[float]:
    """What is missing was not finite."""
    curves = row["curves"][place]
    ends = [curves[row["seeds"].index(seed)][-1] for seed in seeds]
    return [math.inf if end is None else end for end in ends]


def standard_error(values: Sequence[float]) -> float:
    """Of their mean; infinite for one value, or where one is.

    >>> standard_error([1.0, 3.0]), standard_error([1.0])
    (1.0, inf)
    """
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return math.inf
    return stdev(values) / math.sqrt(len(values))


def meets(cells: Sequence[Cell]) -> bool:
    """Whether a row meets the target on a workload."""
    return all(cell.near and cell.harmless for cell in cells)


def matters(content: Mapping[str, Any], knob: Knob) -> bool:
    """Whether the value is worth 5 % of the validation loss: the worse of the two wrong guesses costs as much."""
    return max(cell.ratio for cell in score(content, PLAIN, knob)) >= WORTH
