"""A knob: the scale on which a hyperparameter moves, its bounds, and the values of replicas on it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hdet.checks import is_finite, is_one_of, must_be, shown
from hdet.errors import ArgumentError

LEAST_MOVE = -0.9
"""A value on the relative scale moves by no less in one round, so that it never changes its sign."""
FACTOR_LIMITS = (1e-15, 1e15)
"""Bounds of the learned factor m on a schedule: a guess may be wrong by many orders of magnitude."""


class Scale(NamedTuple):
    r"""A coordinate u(h) of a knob's value h.

    ============ ======================= ==============================
    name         value at distance d     base allowed
    ============ ======================= ==============================
    ``relative`` :math:`h (1 + d)`       not 0
    ``linear``   :math:`h + d`           any
    ``log``      :math:`h e^d`           above 0
    ``logit``    logit(h) + d, mapped back  between 0 and 1
    ============ ======================= ==============================

    >>> round(scale_named("log").away(2.0, math.log(3)), 12)
    6.0
    >>> scale_named("relative").away(2.0, -0.25)
    1.5
    """

    name: str

    def away(self, base: float, d: float) -> float:
        """The value at distance ``d`` from ``base`` in this coordinate."""
        if self.name == "relative":
            return base * (1.0 + d)
        if self.name == "linear":
            return base + d
        if self.name == "log":
            return base * math.exp(min(max(d, -700.0), 700.0))
        return _sigmoid(math.log(base) - math.log1p(-base) + d)

    def check_base(self, base: float, knob: str) -> None:
        """Raise for a base value that this coordinate cannot hold."""
        low, high = _DOMAINS[self.name]
        words = "finite and not 0" if self.name == "relative" else f"above {low} and below {high}"
        if not low < base < high or (self.name == "relative" and base == 0):
            raise ArgumentError(
                f"the base value of knob {knob!r} must be {words} on scale={self.name!r}, but got {shown(base)}; start "
                'from another value, or use scale="linear"'
            )

    def inside(self, base: float, spread: float, bounds: tuple[float, float]) -> float:
        """Move ``base`` by as little as needed, so that all of base +- spread lies within ``bounds``.

        Base values are kept one spread inside, so no replica ever leaves the bounds and the spread stays symmetric.

        >>> scale_named("linear").inside(0.01, 0.05, (0.0, 0.6))
        0.05
        """
        lowest, highest = self._room(spread, bounds)
        return min(max(base, lowest), highest)

    def fits(self, spread: float, bounds: tuple[float, float]) -> bool:
        """Whether some base value is one spread inside both bounds."""
        lowest, highest = self._room(spread, bounds)
        low, high = _DOMAINS[self.name]
        return lowest <= highest and lowest < high and highest > low

    def _room(self, spread: float, bounds: tuple[float, float]) -> tuple[float, float]:
        """The lowest and the highest base that are one spread inside the bounds."""
        return self._innermost(bounds[0], spread), self._innermost(bounds[1], -spread)

    def _innermost(self, bound: float, d: float) -> float:
        """The base whose outermost replica stands on ``bound``: base with away(base, -d) == bound."""
        low, high = _DOMAINS[self.name]
        if not low < bound < high:
            return bound  # the coordinate never reaches it
        if self.name == "relative":
            share = 1.0 - math.copysign(d, bound * d)  # below 0 the larger factor is the lower value
            return bound / share if share > 0 else math.copysign(math.inf, bound)
        return self.away(bound, d)


ANYWHERE = (-math.inf, math.inf)
_DOMAINS = {"relative": ANYWHERE, "linear": ANYWHERE, "log": (0.0, math.inf), "logit": (0.0, 1.0)}
"""The open interval in which base values lie."""
SCALES = tuple(_DOMAINS)


def scale_named(name: str) -> Scale:
    """The scale with that name."""
    must_be(f"one of {SCALES}", is_one_of(name, SCALES), "learning rates use 'relative'", scale=name)
    return Scale(name)


def _sigmoid(u: float) -> float:
    if u >= 0:
        return 1.0 / (1.0 + math.exp(-u))
    e = math.exp(u)
    return e / (1.0 + e)


@dataclass(frozen=True)
class KnobSpec:
    """The description of one explored scalar.

    What is learned is the base value itself or, for a *scheduled* knob (a learning rate), the factor m on its schedule.

    >>> dropout = KnobSpec("dropout", scale_named("linear"), spread=0.05, bounds=(0.0, 0.6))
    >>> dropout.value(0.1, x=-1.0)
    0.05
    >>> dropout.moved(0.1, -0.5)  # never closer to a bound than the spread
    0.05
    """

    name: str
    scale: Scale
    spread: float
    bounds: tuple[float, float] = ANYWHERE
    scheduled: bool = False

    def __post_init__(self) -> None:
        relative = self.scale.name == "relative"
        rule = "at least 0 and at most 1 on the relative scale" if relative else "a finite number, at least 0"
        fits = is_finite(self.spread) and 0 <= self.spread <= (1 if relative else math.inf)
        cure = 'it is how far the outermost replicas are from the base, in the knob\'s scale; scale="log" takes any'
        must_be(f"{rule}, for knob {shown(self.name)}", fits, cure, spread=self.spread)
        fits = self.bounds[0] < self.bounds[1] and self.scale.fits(self.spread, self.bounds)
        rule = f"such that knob {self.name!r} has room for the spread, {self.spread}, on both sides"
        must_be(rule, fits, "widen the bounds or lower the spread", bounds=self.bounds)

    def start(self, value: float) -> float:
        """What counts as learned before the first round, given the value that the user has set."""
        if self.scheduled:
            return 1.0
        self.scale.check_base(value, self.name)
        return self.scale.inside(value, self.spread, self.bounds)

    def value(self, base: float, x: float) -> float:
        """The value of a replica at place ``x`` in [-1, 1]."""
        return self.scale.away(base, self.spread * x)

    def factor(self, x: float) -> float:
        """rho, by which the base of a scheduled knob is multiplied at place ``x``; 1 for other knobs."""
        return self.scale.away(1.0, self.spread * x) if self.scheduled else 1.0

    def moved(self, learned: float, move: float) -> float:
        """What is learned after a round. It moves in the knob's coordinate, and stays within the bounds."""
        if self.scheduled:
            return min(max(self.scale.away(learned, move), FACTOR_LIMITS[0]), FACTOR_LIMITS[1])
        if self.scale.name == "relative":
            move = max(move, LEAST_MOVE)  # a value never changes its sign
        return self.scale.inside(self.scale.away(learned, move), self.spread, self.bounds)


def rate_knobs(names: Sequence[str], spread: float) -> list[KnobSpec]:
    """Learning rates as knobs."""
    scale = scale_named("relative")
    return [KnobSpec(name, scale, float(spread), scheduled=True) for name in names]
