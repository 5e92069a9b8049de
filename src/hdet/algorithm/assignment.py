"""Reassignment: which replica carries which multiplier in a round."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256

__all__ = ["assign", "permutation"]


def permutation(seed: int, k: int, knob: int, n: int) -> list[int]:
    """The permutation of ``range(n)`` for knob ``knob`` in round ``k``: a function of its arguments alone.

    Round 0 is the identity: the published fan-out in rank order. Afterwards replicas are ranked by a hash, so no RNG is
    read, and every replica, machine and library version gets the same answer.

    >>> permutation(seed=0, k=0, knob=3, n=4)
    [0, 1, 2, 3]
    >>> sorted(permutation(seed=0, k=7, knob=3, n=4))
    [0, 1, 2, 3]
    """
    if k == 0:
        return list(range(n))
    return sorted(range(n), key=lambda r: sha256(f"{seed}:{k}:{knob}:{r}".encode()).digest())


def assign(rho: Sequence[float], seed: int, k: int, knobs: int) -> list[list[float]]:
    """Multiplier (or place) of every replica and knob in round ``k``: ``assign(...)[r][g]``.

    >>> assign([0.9, 1.1], seed=0, k=0, knobs=3)
    [[0.9, 0.9, 0.9], [1.1, 1.1, 1.1]]
    """
    columns = [[rho[i] for i in permutation(seed, k, knob, len(rho))] for knob in range(knobs)]
    return [[column[r] for column in columns] for r in range(len(rho))]
