"""Controllers: signals of the replicas in, moves of the base values out. Pure functions with explicit state.

A controller sees the replicas that were not excluded:

- ``signals[r]``: the number compared across replicas, lower is better (mean train loss of the round, or a probe);
- ``offsets[r][g]``: replica r's distance from the base value of knob g, in the knob's coordinate;

and returns its new state and ``moves[g]`` in the same coordinate. The coordinate of a learning rate is relative: a
replica at rho times the base has the offset rho - 1, and a move takes the base to base * (1 + move).
:mod:`hdet.ensemble.knob` has the coordinates of other knobs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

__all__ = ["Controller", "Update", "comparable"]


class Update(NamedTuple):
    """What a controller decided in one round."""

    state: Any
    """New state: a NamedTuple of lists of numbers, one entry per knob."""
    moves: list[float]
    """Per knob: how far the base moves, in the knob's coordinate."""
    weights: list[float]
    """Per replica: how much it counted (for people; need not sum to one)."""
    deltas: list[float]
    """Per knob: the slope that was seen; above 0, more is better (:class:`Published`: Delta before smoothing)."""


@runtime_checkable
class Controller(Protocol):
    """Anything that can be given as ``auto_lr=``."""

    def init(self, knobs: int) -> Any:
        """State before the first round, for that many knobs: a NamedTuple of lists of numbers."""

    def update(self, state: Any, signals: Sequence[float], offsets: Sequence[Sequence[float]]) -> Update:
        """One round. Must not change its arguments."""


def comparable(signals: Sequence[float]) -> list[float] | None:
    """Signals in which what is not finite is replaced by the worst plus the range.

    It then says which side is bad without setting the scale. None if fewer than two are finite.

    >>> comparable([1.0, 3.0, math.nan, math.inf])
    [1.0, 3.0, 5.0, 5.0]
    >>> comparable([1.0, 1.0, math.nan])
    [1.0, 1.0, 2.0]
    >>> comparable([1.0, math.nan]) is None
    True
    """
    finite = [s for s in signals if math.isfinite(s)]
    if len(finite) < 2:
        return None
    best, worst = min(finite), max(finite)
    bad = worst + ((worst - best) or max(1.0, abs(worst)))
    return [s if math.isfinite(s) else bad for s in signals]
