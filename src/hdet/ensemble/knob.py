"""A knob: the scale on which a hyperparameter moves, its bounds, and the values of replicas on it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hdet.checks import is_finite, is_one_of, must_be, shown
from hdet.errors import ArgumentError

LEAST_MOVE = -0.9
"""A value on the relative scale moves by no less in one round, so that it never changes its sign."""
FACTOR_LIMITS = (1e-15, 1e15)
"""Bounds of the learned factor m on a schedule: a guess may be wrong by many orders of magnitude."""


ANYWHERE = (-math.inf, math.inf)
_DOMAINS = {"relative": ANYWHERE, "linear": ANYWHERE, "log": (0.0, math.inf), "logit": (0.0, 1.0)}
"""The open interval in which base values lie, on each scale."""
SCALES = tuple(_DOMAINS)


def away(scale: str, base: float, d: float) -> float:
    """The value at distance ``d`` from ``base`` in the coordinate of a scale.

    >>> round(away("log", 2.0, math.log(3)), 12)
    6.0
    >>> away("relative", 2.0, -0.25)
    1.5
    """
    if scale == "relative":
        return base * (1.0 + d)
    if scale == "linear":
        return base + d
    if scale == "log":
        return base * math.exp(min(max(d, -700.0), 700.0))
    return _sigmoid(math.log(base) - math.log1p(-base) + d)


def _sigmoid(u: float) -> float:
    if u >= 0:
        return 1.0 / (1.0 + math.exp(-u))
    e = math.exp(u)
    return e / (1.0 + e)


@dataclass(frozen=True)
class KnobSpec:
    r"""The description of one explored scalar: its scale is a coordinate u(h) of its value h.

    ============ ======================= ==============================
    scale        value at distance d     base allowed
    ============ ======================= ==============================
    ``relative`` :math:`h (1 + d)`       not 0
    ``linear``   :math:`h + d`           any
    ``log``      :math:`h e^d`           above 0
    ``logit``    logit(h) + d, mapped back  between 0 and 1
    ============ ======================= ==============================

    What is learned is the base value itself or, for a *scheduled* knob (a learning rate), the factor m on its schedule.

    >>> dropout = KnobSpec("dropout", "linear", spread=0.05, bounds=(0.0, 0.6))
    >>> dropout.value(0.1, x=-1.0)
    0.05
    >>> dropout.moved(0.1, -0.5)  # never closer to a bound than the spread
    0.05
    """

    name: str
    scale: str
    spread: float
    bounds: tuple[float, float] = ANYWHERE
    scheduled: bool = False

    def __post_init__(self) -> None:
        must_be(f"one of {SCALES}", is_one_of(self.scale, SCALES), "learning rates use 'relative'", scale=self.scale)
        relative = self.scale == "relative"
        rule = "at least 0 and at most 1 on the relative scale" if relative else "a finite number, at least 0"
        fits = is_finite(self.spread) and 0 <= self.spread <= (1 if relative else math.inf)
        cure = 'it is how far the outermost replicas are from the base, in the knob\'s scale; scale="log" takes any'
        must_be(f"{rule}, for knob {shown(self.name)}", fits, cure, spread=self.spread)
        (low, high), (lowest, highest) = _DOMAINS[self.scale], self.room
        fits = self.bounds[0] < self.bounds[1] and lowest <= highest and lowest < high and highest > low
        rule = f"such that knob {self.name!r} has room for the spread, {self.spread}, on both sides"
        must_be(rule, fits, "widen the bounds or lower the spread", bounds=self.bounds)

    @property
    def room(self) -> tuple[float, float]:
        """The lowest and the highest base that are one spread inside the bounds.

        Base values stay between them, so no replica ever leaves the bounds and the spread stays symmetric.
        """
        return self._innermost(self.bounds[0], self.spread), self._innermost(self.bounds[1], -self.spread)

    def _innermost(self, bound: float, d: float) -> float:
        """The base whose outermost replica stands on ``bound``: base with away(base, -d) == bound."""
        low, high = _DOMAINS[self.scale]
        if not low < bound < high:
            return bound  # the coordinate never reaches it
        if self.scale == "relative":
            share = 1.0 - math.copysign(d, bound * d)  # below 0 the larger factor is the lower value
            return bound / share if share > 0 else math.copysign(math.inf, bound)
        return away(self.scale, bound, d)

    def _inside(self, base: float) -> float:
        """Move ``base`` by as little as needed, so that all of base +- spread lies within the bounds."""
        lowest, highest = self.room
        return min(max(base, lowest), highest)

    def start(self, value: float) -> float:
        """What counts as learned before the first round, given the value that the user has set.

        Raises for a value that the scale cannot hold.
        """
        if self.scheduled:
            return 1.0
        low, high = _DOMAINS[self.scale]
        words = "finite and not 0" if self.scale == "relative" else f"above {low} and below {high}"
        if not low < value < high or (self.scale == "relative" and value == 0):
            raise ArgumentError(
                f"the base value of knob {self.name!r} must be {words} on scale={self.scale!r}, but got "
                f'{shown(value)}; start from another value, or use scale="linear"'
            )
        return self._inside(value)

    def value(self, base: float, x: float) -> float:
        """The value of a replica at place ``x`` in [-1, 1]."""
        return away(self.scale, base, self.spread * x)

    def factor(self, x: float) -> float:
        """rho, by which the base of a scheduled knob is multiplied at place ``x``; 1 for other knobs."""
        return self.value(1.0, x) if self.scheduled else 1.0

    def moved(self, learned: float, move: float) -> float:
        """What is learned after a round. It moves in the knob's coordinate, and stays within the bounds."""
        if self.scheduled:
            return min(max(away(self.scale, learned, move), FACTOR_LIMITS[0]), FACTOR_LIMITS[1])
        if self.scale == "relative":
            move = max(move, LEAST_MOVE)  # a value never changes its sign
        return self._inside(away(self.scale, learned, move))


def rate_knobs(names: Sequence[str], spread: float) -> list[KnobSpec]:
    """Learning rates as knobs."""
    return [KnobSpec(name, "relative", float(spread), scheduled=True) for name in names]
