"""Rounds: T steps of fan-out, then one converge. Everything is read off the step counter."""

from __future__ import annotations

import sys
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import lru_cache

__all__ = ["Growing", "Rounds", "default_length"]


def default_length(total_steps: int) -> int:
    """T when the user gives none: fifty rounds, but none longer than 1000 steps.

    >>> default_length(10_000), default_length(10), default_length(10**6)
    (200, 1, 1000)
    """
    return max(1, min(1000, total_steps // 50))


@dataclass(frozen=True)
class Rounds:
    """The rounds of a run of ``total_steps`` (S) steps; None: nobody knows where it ends.

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


@dataclass(frozen=True)
class Growing:
    """Rounds that grow with the run, for probes: about log(S) of them, and later ones see a long horizon.

    The first round is one step. Until take-off has landed rounds have ``short`` steps; a round that begins at t after
    that has ``length`` steps or, without one, max(2 short, 0.2 t). The last ends are S - 1 and S, as in
    :class:`Rounds`.

    >>> Growing(short=4, total_steps=100, landed=29).ends
    (1, 5, 9, 13, 17, 21, 25, 29, 37, 45, 54, 64, 76, 91, 99, 100)
    """

    short: int
    total_steps: int | None
    landed: int | None = None
    """The round end at which take-off ended; None: not yet."""
    length: int | None = None

    @classmethod
    def for_run(cls, total_steps: int | None, length: int | None = None) -> Growing:
        """Short rounds of 2 to 4 steps, a hundredth of the run."""
        return cls(min(max(round((total_steps or 400) / 100), 2), 4), total_steps, None, length)

    @property
    def ends(self) -> tuple[int, ...]:
        """Every round end, where the run's length is known."""
        return self._ends_until(self._last) if self.total_steps is not None else ()

    def ends_at(self, t: int) -> bool:
        """Whether a round ends when the counter arrives at ``t``."""
        return 0 < t <= self._last and self.next_end(t) == t

    def index(self, t: int) -> int:
        """k, the number of rounds that have ended once the counter stands at ``t``."""
        return len(self._ends_until(int(t)))

    def next_end(self, t: int) -> int:
        """The first end at or after ``t``; S if there is none."""
        if t >= self._last - 1:
            return min(max(t, self._last - 1), self._last)
        ends = self._endless(t)
        return min(ends[bisect_left(ends, t)], self._last - 1)

    def span(self, t: int) -> tuple[int, int]:
        """Start and end of the round that the step to ``t`` belongs to: start < t <= end."""
        before = self._ends_until(t - 1)
        return (before[-1] if before else 0), self.next_end(t)

    def _ends_until(self, t: int) -> tuple[int, ...]:
        """All ends at or before ``t``."""
        ends = self._endless(t)
        grown = ends[: min(bisect_right(ends, t), bisect_left(ends, self._last - 1))]
        return grown + tuple(end for end in (self._last - 1, self._last) if 0 < end <= t)

    def _endless(self, t: int) -> tuple[int, ...]:
        """Ends as if there were no last step, to the first after ``t`` at least."""
        return _growing_ends(self.short, self.landed, self.length, 1 << max(min(t, self._last), 1).bit_length())

    @property
    def _last(self) -> int:
        return sys.maxsize if self.total_steps is None else self.total_steps


@lru_cache(maxsize=32)
def _growing_ends(short: int, landed: int | None, length: int | None, beyond: int) -> tuple[int, ...]:
    """Kept: every step of a run asks for them."""
    ends = [1]
    while ends[-1] <= beyond:
        last = ends[-1]
        grown = length or max(2 * short, int(0.2 * last))
        ends.append(last + (grown if landed is not None and last >= landed else short))
    return tuple(ends)
