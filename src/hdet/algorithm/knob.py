"""A knob, as the method sees it: where its replicas stand and how its base value moves."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hdet.algorithm.scales import Scale
from hdet.checks import is_finite
from hdet.errors import ArgumentError

__all__ = ["FACTOR_LIMITS", "KnobSpec", "bounded_factor"]

FACTOR_LIMITS = (1e-15, 1e15)
"""Bounds of the learned factor m on a schedule: a guess may be wrong by many orders of magnitude."""


@dataclass(frozen=True)
class KnobSpec:
    """The description of one explored scalar.

    What is learned is the base value itself or, for a *scheduled* knob (a learning rate), the factor m on its schedule.

    >>> from hdet.algorithm.scales import scale_named
    >>> dropout = KnobSpec("dropout", scale_named("linear"), spread=0.05, bounds=(0.0, 0.6))
    >>> dropout.value(0.1, x=-1.0)
    0.05
    >>> dropout.moved(0.1, -0.5)  # never closer to a bound than the spread
    0.05
    """

    name: str
    scale: Scale
    spread: float
    bounds: tuple[float, float] = (-math.inf, math.inf)
    scheduled: bool = False

    def __post_init__(self) -> None:
        if not (is_finite(self.spread) and self.spread >= 0):
            raise ArgumentError(
                f"spread of knob {self.name!r} must be a finite number, at least 0, but got spread={self.spread!r}; "
                "it is the distance of the outermost replicas from the base, in the knob's scale"
            )
        if self.scale.name == "relative" and self.spread > 1:
            raise ArgumentError(
                f"spread of knob {self.name!r} must be at most 1 on the relative scale, but got "
                f'spread={self.spread!r}; use scale="log" for wider spreads'
            )
        low, high = self.bounds
        if not low < high or not self.scale.fits(self.spread, self.bounds):
            raise ArgumentError(
                f"bounds of knob {self.name!r} must leave room for the spread on both sides, but got "
                f"bounds={self.bounds} and spread={self.spread}; widen the bounds or lower the spread"
            )

    def start(self, value: float) -> float:
        """What is learned before the first round, given the value that the user has set."""
        if self.scheduled:
            return 1.0
        self.scale.check_base(value, self.name)
        return self.scale.inside(value, self.spread, self.bounds)

    def value(self, base: float, x: float) -> float:
        """The value of a replica at place ``x`` in [-1, 1]."""
        return self.scale.away(base, self.spread * x)

    def factor(self, x: float) -> float:
        """What a scheduled knob's base is multiplied by at place ``x``: rho. Other knobs are not multiplied: 1."""
        return self.scale.away(1.0, self.spread * x) if self.scheduled else 1.0

    def moved(self, learned: float, move: float) -> float:
        """What is learned after a round: moved in the knob's coordinate, and kept where it is allowed."""
        if self.scheduled:
            return bounded_factor(self.scale.away(learned, move))
        if self.scale.name == "relative":
            move = max(move, -0.9)  # a value never changes its sign
        return self.scale.inside(self.scale.away(learned, move), self.spread, self.bounds)


def bounded_factor(m: float) -> float:
    """A learned factor, kept within :data:`FACTOR_LIMITS`."""
    return min(max(m, FACTOR_LIMITS[0]), FACTOR_LIMITS[1])
