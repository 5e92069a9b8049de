"""Designs: where each replica stands on each knob in a round, x[r][g] in [-1, 1]."""

from __future__ import annotations

from typing import Protocol

from hdet.algorithm.assignment import assign, permutation
from hdet.algorithm.spread import levels

__all__ = ["Balanced", "Design", "Permuted"]


class Design(Protocol):
    """A function of (seed, round): equal on all replicas, without state."""

    def places(self, n: int, knobs: int, seed: int, k: int) -> list[list[float]]:
        """x[r][g] for ``n`` replicas and ``knobs`` knobs in round ``k``."""


class Permuted:
    """The published design: an independent permutation per knob, rank order in round 0.

    >>> Permuted().places(n=2, knobs=3, seed=0, k=0)
    [[-1.0, -1.0, -1.0], [1.0, 1.0, 1.0]]
    """

    def places(self, n: int, knobs: int, seed: int, k: int) -> list[list[float]]:
        return assign(levels(n), seed, k, knobs)


class Balanced:
    """Near-orthogonal columns: each knob takes, of several hashed permutations, the least correlated with those before.

    Columns beyond the N - 1 that can be orthogonal are independent permutations: no choice could separate them within
    one round, and over rounds they average out.
    """

    CANDIDATES = 24

    def places(self, n: int, knobs: int, seed: int, k: int) -> list[list[float]]:
        x = levels(n)
        columns: list[list[float]] = []
        for knob in range(knobs):
            tries = self.CANDIDATES if 0 < knob < n - 1 else 1
            # Round 0 is permuted as well: k + 1. Candidates are numbered like further knobs.
            candidates = [[x[i] for i in permutation(seed, k + 1, knob + number * knobs, n)] for number in range(tries)]
            columns.append(min(candidates, key=lambda column: _overlap(column, columns)))
        return [[column[r] for column in columns] for r in range(n)]


def _overlap(column: list[float], others: list[list[float]]) -> float:
    return sum(sum(a * b for a, b in zip(column, other, strict=True)) ** 2 for other in others)
