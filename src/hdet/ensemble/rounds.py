"""Rounds: T steps of fan-out, then one converge. Everything is read off the step counter."""

from __future__ import annotations

import sys
from dataclasses import dataclass

__all__ = ["Rounds", "default_length"]


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
        return 0 < t <= self._last and (t % self.length == 0 or t >= self._last - 1)

    def index(self, t: int) -> int:
        """k, the number of rounds that have ended once the counter stands at ``t``."""
        k = int(max(t, 0) // self.length)
        if t >= self._last - 1:  # the two ends of the run, where they are no multiples
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

    @property
    def _last(self) -> int:
        return sys.maxsize if self.total_steps is None else self.total_steps
