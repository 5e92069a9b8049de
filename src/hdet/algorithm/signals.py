"""Signals, made comparable."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["comparable"]


def comparable(signals: Sequence[float]) -> list[float] | None:
    """Signals without what is not finite: such a one counts as worse than the worst by their range.

    It then says which side is bad without setting the scale. None if fewer than two are finite.

    >>> comparable([1.0, 3.0, math.nan, math.inf])
    [1.0, 3.0, 5.0, 5.0]
    >>> comparable([1.0, math.nan]) is None
    True
    """
    finite = [s for s in signals if math.isfinite(s)]
    if len(finite) < 2:
        return None
    best, worst = min(finite), max(finite)
    return [s if math.isfinite(s) else worst + (worst - best) for s in signals]
