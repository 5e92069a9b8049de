"""Signals, made comparable."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["comparable"]


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
