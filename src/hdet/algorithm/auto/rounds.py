"""The rounds of a probed run: they grow with it."""

from __future__ import annotations

import math
import sys
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import lru_cache

from hdet.algorithm.auto import constants as c

__all__ = ["Growing", "heard"]


def heard(step: int, length: int) -> bool:
    """Whether step ``step`` of a round of so many, counted from 0, is listened to: 8 at most, evenly spread.

    >>> [step for step in range(40) if heard(step, 40)]
    [0, 5, 10, 15, 20, 25, 30, 35]
    """
    return step % max(1, math.ceil(length / c.HEARD)) == 0


@dataclass(frozen=True)
class Growing:
    """Rounds that grow with the run: about log(S) of them, and later ones see a long horizon.

    The first round is one step; one that begins at t has max(2, 0.2 t) steps. The last ends are S - 1 and S, as in
    :class:`hdet.algorithm.rounds.Rounds`.

    >>> Growing(total_steps=100).ends
    (1, 3, 5, 7, 9, 11, 13, 15, 18, 21, 25, 30, 36, 43, 51, 61, 73, 87, 99, 100)
    """

    total_steps: int | None

    @property
    def ends(self) -> tuple[int, ...]:
        """Every round end, where the run's length is known."""
        return self._ends_until(self._last) if self.total_steps is not None else ()

    def ends_at(self, t: int) -> bool:
        """Whether a round ends when the counter arrives at ``t``."""
        last = self._last
        return 0 < t <= last and (t >= last - 1 or t in _end_set(1 << int(t).bit_length()))

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
        return _growing_ends(1 << int(max(min(t, self._last), 1)).bit_length())

    @property
    def _last(self) -> int:
        return sys.maxsize if self.total_steps is None else self.total_steps


@lru_cache(maxsize=32)
def _end_set(beyond: int) -> frozenset[int]:
    """Asked at every step."""
    return frozenset(_growing_ends(beyond))


@lru_cache(maxsize=32)
def _growing_ends(beyond: int) -> tuple[int, ...]:
    """Cached, because looks and ends of rounds ask again and again."""
    ends = [1]
    while ends[-1] <= beyond:
        ends.append(ends[-1] + max(c.SHORT, int(c.GROWING * ends[-1])))
    return tuple(ends)
