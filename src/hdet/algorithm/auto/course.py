"""The course: how the rate gets to its target."""

from __future__ import annotations

import math
from typing import NamedTuple

__all__ = ["Course"]


class Course(NamedTuple):
    """The factor on the target, from ``factor`` at ``start`` to 1 at ``end``.

    >>> Course(start=10, end=14, factor=0.25, geometric=True).at(12)
    0.5
    >>> round(Course(start=10, end=30, factor=0.0, geometric=False).at(20), 12)
    0.5
    """

    start: float = 0.0
    end: float = 0.0
    factor: float = 1.0
    geometric: bool = True
    """Equal ratios per step while taking off; afterwards a half cosine, the shape of OneCycle's own rise."""

    def at(self, t: float) -> float:
        """The factor at step ``t``."""
        if t >= self.end:
            return 1.0
        done = max(t - self.start, 0.0) / (self.end - self.start)
        if self.geometric:
            return float(self.factor ** (1 - done))
        return self.factor + (1 - self.factor) * (1 - math.cos(math.pi * done)) / 2
