"""Curves in letters, for a terminal or a log."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hdet.report import numbers as say
from hdet.report.lines import Line

__all__ = ["plot"]


def plot(names: Sequence[str], lines: Sequence[Line], title: str, width: int = 80, height: int = 14) -> str:
    """The lines over each other, each in its letter; where several meet the last is seen. Losses on a log scale.

    >>> print(plot(["a run", "another"], [Line((0, 1, 2), (4.0, 2.0, 1.0)), Line((0, 2), (4.0, 4.0))], "Loss", 24, 3))
    Loss
           4 ┤b           b
           2 ┤     a
           1 ┤            a
             └─────────────
              0           2
    a: a run, b: another
    """
    letters = [chr(ord("a") + i % 26) for i in range(len(names))]
    points = [(x, y, letter) for line, letter in zip(lines, letters, strict=True) for x, y in _known(line)]
    if not points:
        return f"{title}: none of the runs has a curve"
    columns = max(2, width - 11)
    left, right = min(x for x, _, _ in points), max(x for x, _, _ in points)
    heights = [math.log(y) if all(y > 0 for _, y, _ in points) else y for _, y, _ in points]
    low, high = min(heights), max(heights)
    grid = [[" "] * columns for _ in range(height)]
    for (x, _, letter), y in zip(points, heights, strict=True):
        row = round((height - 1) * (high - y) / (high - low or 1.0))
        grid[row][round((columns - 1) * (x - left) / (right - left or 1.0))] = letter
    logarithmic = all(y > 0 for _, y, _ in points)
    marks = [high - (high - low) * i / max(1, height - 1) for i in range(height)]
    labels = [say.number(math.exp(mark) if logarithmic else mark, 3) for mark in marks]
    drawn = [f"{label:>8} ┤{''.join(cells).rstrip()}" for label, cells in zip(labels, grid, strict=True)]
    axis = f"{say.number(left, 6)}{say.number(right, 6):>{columns - len(say.number(left, 6))}}"
    legend = ", ".join(f"{letter}: {name}" for letter, name in zip(letters, names, strict=True))
    return "\n".join([title, *drawn, " " * 9 + "└" + "─" * columns, " " * 10 + axis, legend])


def _known(line: Line) -> list[tuple[float, float]]:
    return [(x, y) for x, y in zip(line.x, line.y, strict=True) if y is not None]
