"""Do steps follow the rate? If part of them has a rate of its own, none can be found. Pure.

With the mean rate since the first step raised by a factor R, and n steps made, the weights have then moved less far
than the sum of rates says, by max(R^``EXPONENT``, ``WANDER`` n) or more (``lab/experiments/LOG.md``, follow).
"""

from __future__ import annotations

WINDOW = 64
"""The most steps n: later, weights near a minimum move no further at any rate."""
MIN_RAISE = 20.0
"""The least R: a smaller raise tells nothing."""
EXPONENT = 0.75
"""1 would be steps that do not depend on the rate at all."""
WANDER = 3.0
"""On a path to and fro, steps that shrink as Adagrad's do move the weights less far by a factor n."""


def lags(pace: float, rate: float, *, moved: float, rates: float, steps: int) -> bool:
    """Whether the rate was raised, and the steps have not become longer.

    Args:
        pace: how far the first step moved the weights, over its rate.
        rate: that rate.
        moved: how far all steps have moved them.
        rates: the sum of their rates.
        steps: their number.

    >>> [lags(1.0, 0.01, moved=moved, rates=10.0, steps=10) for moved in (10.0, 0.1)]
    [False, True]
    """
    if not (1 < steps <= WINDOW and rates > 0 and moved > 0):
        return False  # steps may have the rate of the one before, as ASGD's have: one alone says nothing
    raised, shorter = rates / steps / rate, pace * rates / moved
    return raised >= MIN_RAISE and shorter >= max(raised**EXPONENT, WANDER * steps)
