"""The rates of every step, in plain letters: schedule, groups and products as they are documented, and no code of hdet.

The rate of group g at step t is ``eta_g(t)``, its schedule, times ``F(t)``, what hdet makes of it: the factor of a
search, or m times rho of a replica.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

RISE, DECAY = 10, 0.98
"""Of the schedule of one's own: ten steps of warm-up, and a decay from the first step on."""
LEAST_RISE = 0.3
SEARCHING = 1
"""The phase of a search that has measured its first step and does not keep to the guess."""


class Group(NamedTuple):
    """A parameter group: what the user gave it, and when."""

    lr: float
    peak: float
    """Its rate at the schedule's peak; of a search the guess."""
    added: int | None = None
    """The first step that it trains in, at ``lr``; None: it was there from the beginning."""


def onecycle(peak: float, t: float, total: int) -> float:
    """eta(t) of a OneCycle: a cosine from peak / 25 up to the peak, and one down to 1 / 250,000 of it."""
    low, least, top = peak / 25, peak / 25 / 1e4, 0.3 * total - 1
    if t <= top:
        return _cosine(low, peak, t / top)
    return _cosine(peak, least, (t - top) / (total - 1 - top))


def trapezoid_held(peak: float, t: int, total: int) -> float:
    """eta(t) of a trapezoid under a search: at the peak until 0.6 of the run, and from there down by 1 - sqrt."""
    least, hold = peak / 25 / 1e4, 0.6 * total - 1
    return peak - (peak - least) * math.sqrt(max(t - hold, 0) / (total - 1 - hold))


def own_shape(t: int) -> float:
    """f(t) of the schedule of one's own, which multiplies whatever rate a group has: highest where its warm-up ends."""
    return (0.1 + 0.9 * min(t, RISE) / RISE) * DECAY**t


def own_schedule(group: Group, t: int) -> float:
    """eta(t): a group that was added at step s had its rate there."""
    begin = group.added or 0
    return group.lr * own_shape(t) / (own_shape(begin) if group.added is not None else 1.0)


def own_held(group: Group, t: int) -> float:
    """The same under a search. Only groups that were there when the schedule was rehearsed can be held at its peak."""
    return own_schedule(group, max(t, RISE) if group.added is None else t)


def search_factor(search: Mapping[str, Any], t: int) -> float:
    """F(t) = m r(t), and below the ceiling, from what a search has saved of itself."""
    climbs = search["phase"] == SEARCHING and t < search["peak"]
    rise = max(LEAST_RISE, (t + 1) / (search["peak"] + 1)) if climbs else 1.0
    return min(math.exp(search["log_factor"]) * rise, math.exp(min(search["ceiling"], 700.0)))


def _cosine(start: float, end: float, part: float) -> float:
    return end + (start - end) / 2 * (1 + math.cos(math.pi * part))
