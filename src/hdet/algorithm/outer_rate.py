"""The outer rate: how far along a round's mean displacement the next round should begin. Found from round to round."""

from __future__ import annotations

import math

__all__ = ["BOUNDS", "START", "next_rate"]

START = 1.0
"""The plain mean."""
BOUNDS = (0.1, 1.5)
"""Above 2 the directions in which a round arrives, as most are that matter to the loss, would swing ever wider."""
LARGEST = 0.3
"""A round moves the logarithm of the rate by this at most."""
GAIN = 2.0
"""How fast a cosine moves it: 1/GAIN is already the largest."""


def next_rate(rate: float, asked: float, moved: float, stepped: float) -> float:
    r"""The rate after a round whose gradients have seen the last outer step.

    With s the outer step that the round began with and d the arms' displacement in it, :math:`c = \langle d, s \rangle
    / (|d|\,|s|)`. Above 0 training goes on the same way: the step was too short. Below 0 it comes back.

    >>> next_rate(1.0, asked=0.5, moved=1.0, stepped=1.0) > 1.0 > next_rate(1.0, -0.5, 1.0, 1.0)
    True
    >>> next_rate(0.7, asked=0.0, moved=1.0, stepped=0.0)  # there was no step
    0.7

    Args:
        rate: that the step was made with.
        asked: the mean of <d, s> over the arms.
        moved: of d: the squared length.
        stepped: of s: the squared length.
    """
    size = math.sqrt(moved * stepped) if moved > 0 and stepped > 0 else 0.0
    if not (0 < size < math.inf and math.isfinite(asked)):
        return rate
    move = LARGEST * min(max(GAIN * asked / size, -1.0), 1.0)
    return min(max(rate * math.exp(move), BOUNDS[0]), BOUNDS[1])
