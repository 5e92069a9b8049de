"""The peak of a schedule: the first step at which it is highest, found by looking at a few of its steps.

Equal schedules have equal peaks, on every machine: nothing here depends on a clock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

CALLS = 60
"""So often a function of the step is asked for its peak, at most."""
EQUAL = 1e-9
"""A later rate must be higher by this part, or else the first one counts: rates computed step by step are rounded."""
_LEFT = 32
"""So many calls are left for looking closely: golden sections find one step among a million by that many."""
_PARTS = 8
"""The run is looked at in at least so many equal parts, beside the steps 1, 2, 4, 8, ..."""
_POWERS = 40
"""So many of these steps are looked at, at most."""
_NEAR = 1e-3
"""The first rise is the peak if it comes within this part of the highest: of a cyclic schedule the first cycle."""
_OTHERS = 5
"""So many calls are kept for the highest place while the first rise is looked at."""
_GOLDEN = 0.381966


class Peak(NamedTuple):
    """Where a schedule's rising phase ends."""

    step: int
    rates: list[float | None]
    """The rate of each parameter group at that step; None for a group that was added since."""


def first_highest(value: Callable[[int], float], steps: int, calls: int = CALLS) -> int:
    """The first step from 0 to ``steps - 1`` at which a function is highest, by at most ``calls`` calls.

    Exact if there are no more steps than calls. For a rise, a hold and a fall in up to a million steps it is off by at
    most some steps, in longer runs by less than a thousandth of them. A peak that is narrower than an eighth of the run
    and later than the first rise may be missed: then the highest step that was looked at counts.

    >>> first_highest(lambda t: min(t / 100_000, 1.0), 1_000_000)
    100000
    """
    known: dict[int, float] = {}

    def at(t: int) -> float:
        if t not in known:
            known[t] = value(t)
        return known[t]

    tops = _tops([(t, at(t)) for t in (range(steps) if steps <= calls else _looked_at(steps, calls))])
    best = max(tops, key=lambda top: top.value)  # the first of those that are equal
    first = next(top for top in tops if top.value >= best.value / 2)
    if first is not best:
        best.narrow(at, _OTHERS)
        first.narrow(at, calls - len(known) - _OTHERS)
    chosen = first if first.value >= best.value * (1 - _NEAR) else best
    chosen.narrow(at, calls - len(known))
    return chosen.first


def _looked_at(steps: int, calls: int) -> list[int]:
    """The first step, powers of two, equal parts and the last step."""
    powers = [2**k for k in range((steps - 1).bit_length())][-_POWERS:]
    parts = max(_PARTS, calls - _LEFT - len(powers))
    return sorted({*powers, *(part * (steps - 1) // parts for part in range(parts + 1))})


@dataclass
class _Top:
    """A place where a function is higher than on both sides, as far as is known."""

    first: int
    last: int
    """It is equally high at these two steps."""
    before: int
    after: int
    """It is lower at these two."""
    value: float
    is_level: bool = False
    """Whether it is as high between the first and the last step, too: they may lie on two sides of a peak."""

    def narrow(self, at: Callable[[int], float], calls: int) -> None:
        """Look between the four steps: by golden sections, or by halves for the edges of a level."""
        for _ in range(calls):
            left, right = self.first - self.before, self.after - self.last
            part = 0.5 if self.is_level else _GOLDEN
            if self.last - self.first > 1 and not self.is_level:
                self._look((self.first + min(self.last, 2 * self.first)) // 2, at)  # before a second cycle
            elif max(left, right) < 2:
                return
            elif right < 2 or (left > 1 and left * self.last > right * self.first):
                self._look(self.first - max(1, round(part * left)), at)
            else:
                self._look(self.last + max(1, round(part * right)), at)

    def _look(self, t: int, at: Callable[[int], float]) -> None:
        value, is_left, is_right = at(t), t < self.first, t > self.last
        if value > self.value * (1 + EQUAL):
            self.before = self.before if is_left else self.last if is_right else self.first
            self.after = self.after if is_right else self.first if is_left else self.last
            self.first, self.last, self.value, self.is_level = t, t, value, False
        elif value >= self.value * (1 - EQUAL):
            self.is_level |= not is_left and not is_right
            self.first, self.last = min(t, self.first), max(t, self.last)
        elif is_left:
            self.before = t
        else:  # between two peaks the first one counts
            self.after, self.last = t, self.last if is_right else self.first


def _tops(points: list[tuple[int, float]]) -> list[_Top]:
    """The places at which a function is higher than before and after, among the points that are known."""
    level: list[_Top] = []
    for t, value in points:
        if level and abs(value - level[-1].value) <= EQUAL * level[-1].value:
            level[-1].last = t
        else:
            level.append(_Top(t, t, t - 1, t + 1, value))
    for one, two in pairwise(level):
        one.after, two.before = two.first, one.last
    lows = [-1.0, *(one.value for one in level), -1.0]
    return [one for i, one in enumerate(level) if lows[i] < one.value > lows[i + 2]]
