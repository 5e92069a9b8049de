"""Lines: points over steps, with gaps, and few enough of them for a browser."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

__all__ = ["LIMIT", "Band", "Line", "alike", "companions", "line", "mean", "span", "thinned"]

LIMIT = 1000
"""Points that a line may have: more than a screen has columns."""
_NEAR = 0.01
"""Of a figure's height: closer than this, two lines look like one."""
_SHARE = 0.2
"""Of a line's points: so many of them near another line, and the eye loses one of the two."""
_LOOKS = 200
"""Points of a line that are looked at for that."""


class Line(NamedTuple):
    """Points in the order in which they are joined. Where ``y`` is None the line is broken."""

    x: tuple[float, ...] = ()
    y: tuple[float | None, ...] = ()

    def __bool__(self) -> bool:
        return any(value is not None for value in self.y)


class Band(NamedTuple):
    """What lies between two lines."""

    low: Line
    high: Line

    def __bool__(self) -> bool:
        """Whether it is wider than a line."""
        return any(a is not None and b is not None and a < b for a, b in zip(self.low.y, self.high.y, strict=False))

    def outline(self) -> Line:
        """Around it: forth below and back above, one closed piece for each stretch without a gap.

        >>> Band(Line((1, 2), (0.1, 0.2)), Line((1, 2), (0.3, 0.4))).outline()
        Line(x=(1, 2, 2, 1), y=(0.1, 0.2, 0.4, 0.3))
        """
        x: list[float] = []
        y: list[float | None] = []
        for low, high in zip(_pieces(self.low), _pieces(self.high), strict=False):
            around = [*low, *reversed(high)]
            if x:
                around.insert(0, (around[0][0], None))
            x += [point[0] for point in around]
            y += [point[1] for point in around]
        return Line(tuple(x), tuple(y))


def line(points: Iterable[tuple[float, float | None]], limit: int = LIMIT) -> Line:
    """A line through points; broken where a run went back to an earlier step, and thinned.

    >>> line([(1, 0.5), (2, 0.4), (1, 0.5)])
    Line(x=(1, 2, 1, 1), y=(0.5, 0.4, None, 0.5))
    """
    x: list[float] = []
    y: list[float | None] = []
    for step, value in points:
        if x and step < x[-1]:
            x.append(step)
            y.append(None)
        x.append(step)
        y.append(value)
    return thinned(Line(tuple(x), tuple(y)), limit)


def _pieces(broken: Line) -> list[list[tuple[float, float | None]]]:
    """The stretches between gaps."""
    points = zip(broken.x, broken.y, strict=True)
    groups = itertools.groupby(points, key=lambda point: point[1] is None)
    return [list(piece) for gap, piece in groups if not gap]


def alike(a: Line, b: Line) -> bool:
    """Whether two lines are one, up to rounding.

    >>> alike(Line((1,), (0.1 + 0.2,)), Line((1,), (0.3,)))
    True
    """
    if a.x != b.x:
        return False
    return all(
        u == v or (u is not None and v is not None and math.isclose(u, v)) for u, v in zip(a.y, b.y, strict=True)
    )


def span(lines: Iterable[Line]) -> tuple[float, float]:
    """The first and the last step of all of them.

    >>> span([Line((3, 9), (0.1, 0.2)), Line((1,), (0.1,)), Line()])
    (1, 9)
    """
    steps = [x for one in lines for x in one.x]
    return (min(steps), max(steps)) if steps else (0, 1)


def companions(lines: Sequence[Line], logarithmic: bool) -> tuple[int, ...]:
    """Per line, how many of those before it run along with it, so that a painter can tell them apart.

    Two lines run along with each other if a fifth of one is within a hundredth of the figure's height of the other.

    >>> flat, same, other = Line((0, 9), (1.0, 1.0)), Line((0, 5, 9), (1.0, 1.0, 1.001)), Line((0, 9), (5.0, 2.0))
    >>> companions([flat, other, same], logarithmic=False)
    (0, 0, 1)
    """
    heights = [_heights(one, logarithmic) for one in lines]
    seen = [y for one in heights for _, y in one]
    near = _NEAR * (max(seen) - min(seen)) if seen else 0.0
    return tuple(sum(_along(one, other, near) for other in heights[:i]) for i, one in enumerate(heights))


def _heights(one: Line, logarithmic: bool) -> list[tuple[float, float]]:
    """The known points in ascending order, as high as they are drawn."""
    known = [(x, y) for x, y in zip(one.x, one.y, strict=True) if y is not None and (y > 0 or not logarithmic)]
    return sorted((x, math.log(y) if logarithmic else y) for x, y in known)


def _along(one: Sequence[tuple[float, float]], other: Sequence[tuple[float, float]], near: float) -> bool:
    if not one or not other:
        return False
    steps, some = [x for x, _ in other], one[:: math.ceil(len(one) / _LOOKS)]
    close = [abs(y - _at(other, steps, x)) <= near for x, y in some if steps[0] <= x <= steps[-1]]
    return sum(close) >= max(1.0, _SHARE * len(some))


def _at(points: Sequence[tuple[float, float]], steps: Sequence[float], x: float) -> float:
    """The height at ``x``, on the straight line between the two points around it."""
    after = min(bisect.bisect_left(steps, x), len(points) - 1)
    (x0, y0), (x1, y1) = points[max(after - 1, 0)], points[after]
    return y1 if x1 == x0 else y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def thinned(long: Line, limit: int = LIMIT) -> Line:
    """At most about ``limit`` points: of each stretch the lowest and the highest, so that no spike is lost.

    First and last point and gaps are kept.

    >>> spike = [0.0] * 5000
    >>> spike[1234] = 9.0
    >>> short = thinned(Line(tuple(range(5000)), tuple(spike)), limit=100)
    >>> len(short.x) <= 102, max(short.y), short.x[0], short.x[-1]
    (True, 9.0, 0, 4999)
    """
    size = len(long.x)
    if size <= limit:
        return long
    stretches = max(1, limit // 3)  # a lowest, a highest and perhaps a gap of each
    edges = [i * size // stretches for i in range(stretches + 1)]
    keep = {0, size - 1}
    for begin, end in itertools.pairwise(edges):
        keep |= _worth_keeping(long.y, begin, end)
    chosen = sorted(keep)
    return Line(tuple(long.x[i] for i in chosen), tuple(long.y[i] for i in chosen))


def _worth_keeping(y: Sequence[float | None], begin: int, end: int) -> set[int]:
    known = [(value, i) for i, value in enumerate(y[begin:end], start=begin) if value is not None]
    gap = next((i for i in range(begin, end) if y[i] is None), begin)
    return {gap} if not known else {min(known)[1], max(known)[1], gap}


def mean(values: Iterable[float | None]) -> float | None:
    """Of those that are known; None if none is.

    >>> mean([1.0, None, 2.0]), mean([None])
    (1.5, None)
    """
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None
