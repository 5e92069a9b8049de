"""The rounds of a probed run: they grow with it."""

from __future__ import annotations

import sys
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import lru_cache

from hdet.algorithm.auto import constants as c

__all__ = ["Growing"]


@dataclass(frozen=True)
class Growing:
    """Rounds that grow with the run: about log(S) of them, and later ones see a long horizon.

    The first round is one step. Until take-off has landed rounds have two steps; a round that begins at t after that
    has ``length`` steps or, without one, max(8, 0.2 t). The last ends are S - 1 and S, as in
    :class:`hdet.algorithm.rounds.Rounds`.

    >>> Growing(total_steps=100, landed=9).ends
    (1, 3, 5, 7, 9, 17, 25, 33, 41, 49, 58, 69, 82, 98, 99, 100)
    """

    total_steps: int | None
    landed: int | None = None
    """The round end at which take-off ended; None: not yet."""
    length: int | None = None

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
        return _growing_ends(self.landed, self.length, 1 << max(min(t, self._last), 1).bit_length())

    @property
    def _last(self) -> int:
        return sys.maxsize if self.total_steps is None else self.total_steps


@lru_cache(maxsize=32)
def _growing_ends(landed: int | None, length: int | None, beyond: int) -> tuple[int, ...]:
    """Cached, because it is called at every step."""
    ends = [1]
    while ends[-1] <= beyond:
        last = ends[-1]
        grown = length or max(c.GROWING_LEAST, int(c.GROWING * last))
        ends.append(last + (grown if landed is not None and last >= landed else c.SHORT))
    return tuple(ends)
