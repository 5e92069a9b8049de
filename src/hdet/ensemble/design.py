"""Rounds, and the fan-out in each: how far replicas stand from the base value, and which one stands where.

A round is T steps of fan-out, then one converge. Everything is read off the step counter.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from hashlib import sha256
from operator import mul


def default_length(total_steps: int) -> int:
    """T when the user gives none: fifty rounds, but none longer than 1000 steps.

    >>> default_length(10_000), default_length(10), default_length(10**6)
    (200, 1, 1000)
    """
    return max(1, min(1000, total_steps // 50))


@dataclass(frozen=True)
class Rounds:
    """The rounds of a run of ``total_steps`` (S) steps; None: unknown.

    A round ends at every positive multiple of ``length`` (T), at S - 1 and at S: loops that call the scheduler one time
    less than the optimizer converge as well. Step t belongs to round :meth:`index`, which counts the ends up to t.

    >>> rounds = Rounds(length=4, total_steps=10)
    >>> [t for t in range(11) if rounds.ends_at(t)]
    [4, 8, 9, 10]
    >>> [rounds.index(t) for t in (0, 3, 4, 8, 9, 10)]
    [0, 0, 1, 2, 3, 4]
    """

    length: int
    total_steps: int | None

    def ends_at(self, t: int) -> bool:
        """Whether a round ends when the counter arrives at ``t``."""
        last = self._last
        return (t % self.length == 0 or t >= last - 1) and 0 < t <= last

    def is_inside(self, t: int) -> bool:
        """Whether a round has begun and is not over at step ``t``."""
        return t > 0 and not self.ends_at(t)

    def index(self, t: int) -> int:
        """k, the number of rounds that have ended once the counter stands at ``t``."""
        k = int(max(t, 0) // self.length)
        if t >= self._last - 1:  # the two ends of the run, if they are no multiples of T
            k += sum(0 < end <= t and end % self.length != 0 for end in (self._last - 1, self._last))
        return k

    def next_end(self, t: int) -> int:
        """The first end at or after ``t``; S if there is none.

        >>> Rounds(length=4, total_steps=10).next_end(5)
        8
        """
        multiple = max(1, -(-t // self.length)) * self.length
        ends = (multiple, self._last - 1, self._last)
        return min((end for end in ends if max(t, 1) <= end <= self._last), default=self._last)

    def span(self, t: int) -> tuple[int, int]:
        """Start and end of the round that the step to ``t`` belongs to: start < t <= end.

        >>> [Rounds(length=4, total_steps=10).span(t) for t in (1, 4, 5, 9, 10)]
        [(0, 4), (0, 4), (4, 8), (8, 9), (9, 10)]
        """
        start = (t - 1) // self.length * self.length
        return (self._last - 1 if t >= self._last > 1 else start), self.next_end(t)

    def left_from(self, t: int) -> int:
        """K = ceil((S - t) / T): rounds left from step ``t`` on, at least 1.

        >>> Rounds(length=4, total_steps=10).left_from(4)
        2
        """
        return max(1, -(-(self._last - t) // self.length))

    @cached_property
    def _last(self) -> int:
        return sys.maxsize if self.total_steps is None else self.total_steps


def levels(n: int) -> list[float]:
    r"""N evenly spaced places from -1 to 1 with mean 0; a single replica stands at 0.

    .. math::
        x_r = \frac{r - (N-1)/2}{\delta}, \qquad \delta = \max\big((N-1)/2,\, 1/2\big)

    The multipliers of the paper are :math:`\rho_r = 1 + \alpha x_r`, see :meth:`hdet.ensemble.knob.KnobSpec.factor`.

    Args:
        n: number of replicas :math:`N`, at least 1.

    >>> levels(5)
    [-1.0, -0.5, 0.0, 0.5, 1.0]
    """
    middle = (n - 1) / 2
    delta = max(middle, 0.5)
    return [(r - middle) / delta for r in range(n)]


def permutation(seed: int, k: int, knob: int, n: int) -> list[int]:
    """The permutation of ``range(n)`` for knob ``knob`` in round ``k``: a function of its arguments alone.

    Round 0 is the identity: the fan-out in rank order, as in the paper. Afterwards replicas are ranked by a hash, so no
    RNG is read, and every replica, machine and library version gets the same answer.

    >>> permutation(seed=0, k=0, knob=3, n=4)
    [0, 1, 2, 3]
    >>> sorted(permutation(seed=0, k=7, knob=3, n=4))
    [0, 1, 2, 3]
    """
    if k == 0:
        return list(range(n))
    head = b"%d:%d:%d:" % (seed, k, knob)
    digests = [sha256(head + number).digest() for number in _numerals(n)]
    return sorted(range(n), key=digests.__getitem__)


@cache
def _numerals(n: int) -> list[bytes]:
    """The numbers of the replicas as text. To write them takes as long as to hash them."""
    return [b"%d" % r for r in range(n)]


def assign(rho: Sequence[float], seed: int, k: int, knobs: int) -> list[list[float]]:
    """Multiplier (or place) of every replica and knob in round ``k``: ``assign(...)[r][g]``.

    >>> assign([0.9, 1.1], seed=0, k=0, knobs=3)
    [[0.9, 0.9, 0.9], [1.1, 1.1, 1.1]]
    """
    columns = [[rho[i] for i in permutation(seed, k, knob, len(rho))] for knob in range(knobs)]
    return [[column[r] for column in columns] for r in range(len(rho))]


class Permuted:
    """The paper's design: an independent permutation per knob, rank order in round 0.

    >>> Permuted().places(n=2, knobs=3, seed=0, k=0)
    [[-1.0, -1.0, -1.0], [1.0, 1.0, 1.0]]
    """

    def places(self, n: int, knobs: int, seed: int, k: int) -> list[list[float]]:
        return assign(levels(n), seed, k, knobs)


class Balanced:
    """Near-orthogonal columns: each knob takes, of several columns, the least correlated with those before.

    Fewer than 100 replicas choose from hashed permutations. More of them choose from rotations of one permutation: a
    hash takes 2 microseconds, training waits, and a rotation needs none. Few replicas have too few rotations.

    Columns beyond the N - 1 that can be orthogonal (N / 2 if they are rotations) are independent permutations: no
    choice could separate them within one round, and over rounds they average out.
    """

    MANY = 100
    """From this number of replicas on, columns are rotations."""
    CANDIDATES = 24
    """The most permutations that a knob chooses from."""
    HASHES = 2048
    """How many hashes further candidates may cost, N for each."""
    ROTATIONS = 32
    """How many rotations the knobs choose from, and two more for each knob. Each takes a product of N numbers."""

    def places(self, n: int, knobs: int, seed: int, k: int) -> list[list[float]]:
        columns = self._rotated(n, knobs, seed, k) if n >= self.MANY else self._permuted(n, knobs, seed, k)
        x = dict(zip(range(1 - n, n, 2), levels(n), strict=True))
        return [list(map(x.__getitem__, row)) for row in zip(*columns, strict=True)]

    def _permuted(self, n: int, knobs: int, seed: int, k: int) -> list[list[int]]:
        """Of several permutations for each knob the one with the least overlap."""
        most = max(1, min(self.CANDIDATES, self.HASHES // (n * knobs)))
        columns: list[list[int]] = []
        for knob in range(knobs):
            tries = most if 0 < knob < n - 1 else 1
            # Candidates are numbered like further knobs.
            candidates = (_column(seed, k, knob + number * knobs, n) for number in range(tries))
            columns.append(min(candidates, key=partial(_overlap, columns)))
        return columns

    def _rotated(self, n: int, knobs: int, seed: int, k: int) -> list[list[int]]:
        """Of the rotations of one permutation, for each knob the one with the least overlap.

        The product of two rotations depends on how far they are apart alone: there is one product for each distance.
        """
        first, apart = _column(seed, k, 0, n), min(n // 2, self.ROTATIONS + 2 * knobs) if knobs > 1 else 1
        squares = [sum(map(mul, first, first[d:] + first[:d])) ** 2 for d in range(apart)]
        columns, overlaps = [], [0] * apart
        for _ in range(min(knobs, n // 2)):
            turn = overlaps.index(min(overlaps))
            columns.append(first[turn:] + first[:turn])
            overlaps = [overlap + squares[abs(d - turn)] for d, overlap in enumerate(overlaps)]
        return columns + [_column(seed, k, knob, n) for knob in range(len(columns), knobs)]


Design = Permuted | Balanced
"""``places(...)[r][g]``: x of each replica and knob in round ``k``; without state, equal on all replicas."""


def _column(seed: int, k: int, knob: int, n: int) -> list[int]:
    """Places in halves of the distance between two: whole numbers around 0. Round 0 is permuted as well."""
    return [2 * i - (n - 1) for i in permutation(seed, k + 1, knob, n)]


def _overlap(columns: list[list[int]], column: list[int]) -> int:
    """The sum of squared products with the columns before it, in whole numbers.

    Of two equal sums of floats one may be less by its last bit. Versions of Python round sums in different ways, and
    the design would depend on that.
    """
    return sum(sum(map(mul, column, other)) ** 2 for other in columns)
