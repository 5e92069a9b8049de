"""The published decay of the base value, corrected so that it decays."""

from __future__ import annotations

import math

__all__ = ["decay_rate"]


def decay_rate(start: float, floor: float, rounds: int) -> float:
    r"""The per-round decay that takes ``start`` to ``floor`` in ``rounds`` rounds.

    .. math:: \gamma = 1 - (\eta_{floor} / \eta_{S_{warm}})^{1/K}

    As printed in the paper, with ``f_div / f_final`` of OneCycleLR's defaults, gamma is negative and the rate grows.

    Args:
        start: base value at S_warm.
        floor: the schedule's last value, ``min_lr``.
        rounds: K.

    >>> gamma = decay_rate(start=1.0, floor=0.01, rounds=2)
    >>> round((1 - gamma) ** 2, 12)
    0.01
    >>> decay_rate(start=0.0, floor=0.0, rounds=5)  # nothing to decay
    0.0
    """
    if start <= 0.0 or floor >= start:
        return 0.0
    return 1.0 - math.pow(max(floor, 0.0) / start, 1.0 / rounds)
