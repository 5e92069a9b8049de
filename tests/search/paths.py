"""The sums along a path of weights that are lists of numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import repeat

from hdet.rule.estimate import PathSums, Sums, weight_ratio


class ListedPath:
    """What the search does with tensors, and hdet.jax with trees, before it knows how the path ends."""

    def __init__(self, start: Sequence[float]) -> None:
        self.start, self.sums, self.rates, self.rate = start, PathSums(), 0.0, 0.0
        self.gradients: list[float] = []

    def step(self, gradient: Sequence[float], now: Sequence[float], rate: float, is_sampled: bool = True) -> None:
        """A step from ``now``. Of one that is not sampled only the rate counts."""
        if is_sampled:
            w = weight_ratio(self.rate, rate)
            self.sums = self.sums.with_step(self.dot(gradient, now), self.rates, w)
            self.gradients = [w * s + g for s, g in zip(self.gradients or repeat(0.0), gradient, strict=False)]
            self.rate = rate
        self.rates += rate

    def at(self, now: Sequence[float]) -> Sums:
        """What the formula takes if the path has led to ``now``."""
        return self.sums.over(self.dot(self.gradients, now), self.rates)

    def dot(self, gradient: Sequence[float], now: Sequence[float]) -> float:
        """<g, x_0 - x>."""
        return math.fsum(g * (a - b) for g, a, b in zip(gradient, self.start, now, strict=True))
