"""The outer rate: how far along a round's mean displacement the next round should begin. Found from round to round."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import NamedTuple

__all__ = ["BOUNDS", "OuterRate", "next_rate"]

BOUNDS = (0.1, 1.5)
"""Above 2 the directions in which a round arrives, as most are that matter to the loss, would swing ever wider."""
LARGEST = 0.3
"""A round moves the logarithm of the rate by this at most."""
GAIN = 2.0
"""How fast a cosine moves it: 1/GAIN is already the largest."""
LEAN = 0.15
"""A cosine so far below 0 leaves the rate: noise alone makes displacements come back."""
ERRORS, WORSE = 2.0, 0.1
"""Losses have risen if they are above the best round's by so many standard errors, and by this part of it."""


class OuterRate(NamedTuple):
    """The rate, and the best round so far."""

    rate: float = 1.0
    """At first the plain mean."""
    best: float = math.inf
    """The mean loss of the best round."""
    error: float = 0.0
    """Its standard error."""


def next_rate(state: OuterRate, asked: float, moved: float, stepped: float, losses: Sequence[float]) -> OuterRate:
    r"""The rate after a round whose gradients have seen the last outer step.

    With s the outer step that the round began with and d the arms' displacement in it, :math:`c = \langle d, s \rangle
    / (|d|\,|s|)`. Above 0 training goes on the same way: the step was too short. Below 0 it comes back. Where losses
    have risen above those of the best round, the rate falls, whatever the gradients say: out there they mislead.

    >>> begun = OuterRate()
    >>> next_rate(begun, 0.5, 1.0, 1.0, []).rate > 1.0 > next_rate(begun, -0.5, 1.0, 1.0, []).rate
    True
    >>> next_rate(OuterRate(best=1.0), 0.5, 1.0, 1.0, [1.2, 1.3]).rate < 1.0
    True

    Args:
        state: of the step that was made.
        asked: the mean of <d, s> over the arms.
        moved: of d: the squared length.
        stepped: of s: the squared length; 0: there was no step.
        losses: the mean train loss of the round, arm by arm, lower is better; nothing where none are known.
    """
    known = bool(losses) and all(map(math.isfinite, losses))
    loss = fmean(losses) if known else math.nan
    error = stdev(losses) / math.sqrt(len(losses)) if known and len(losses) > 1 else 0.0
    limit = state.best + WORSE * abs(state.best) + ERRORS * math.hypot(error, state.error)
    size = math.sqrt(moved * stepped) if moved > 0 and stepped > 0 else 0.0
    if loss > limit:
        move = -1.0
    elif 0 < size < math.inf and math.isfinite(asked):
        move = min(max(GAIN * (asked / size + LEAN), -1.0), 1.0)
    else:
        move = 0.0
    rate = min(max(state.rate * math.exp(LARGEST * move), BOUNDS[0]), BOUNDS[1])
    return OuterRate(rate, loss, error) if loss < state.best else state._replace(rate=rate)
