"""The picture of lab/benchmarks/scale.py: percent that ``auto`` adds against the steps of a run."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from cost_fit import Row, fitted, share
from cost_model import Machine, Passes, added

sys.path.append(str(Path(__file__).resolve().parents[2] / "docs"))
from svg import Drawing, Point

__all__ = ["TITLE", "Curve", "curves", "draw"]

TITLE = "Percent that auto adds to the time of a run, against its steps"
FEWEST, MOST, PER_DECADE = 100, 1_000_000, 8
LEFT, RIGHT, TOP, BOTTOM = 80, 640, 50, 420
MEASURED_COLOURS, PAPER_COLOURS = ("c1", "c0", "ink"), ("c2", "c3", "mark")
COMPILED, PAPER = "2 4", "6 4"
"""Dashes."""


class Curve(NamedTuple):
    """One model: percent at each length, and what runs of it have measured."""

    label: str
    colour: str
    dash: str
    steps: list[int]
    percent: list[float]
    dots: list[tuple[int, float]]


def curves(
    rows: Sequence[Row], passes: Passes, machine: Machine, sizes: Sequence[float], gpus: int
) -> tuple[list[Curve], list[Curve]]:
    """The measured models by the fit, and the sizes on paper, sharded."""
    models, measured = list(dict.fromkeys(row.model for row in rows)), []
    for model, compiled in dict.fromkeys((row.model, row.compiled) for row in rows):
        same = [row for row in rows if (row.model, row.compiled) == (model, compiled)]
        curve = _curve(model, MEASURED_COLOURS[models.index(model) % len(MEASURED_COLOURS)], _share(same[0], passes))
        dots = [(row.steps, 100 * (row.ratio - 1)) for row in same]
        if compiled:
            curve = curve._replace(label=f"{model}, compiled", dash=COMPILED)
        measured.append(curve._replace(dots=dots))
    paper = [
        _curve(f"{size / 1e9:g} B", PAPER_COLOURS[place % len(PAPER_COLOURS)], _paper(machine, size, gpus), PAPER)
        for place, size in enumerate(sizes)
    ]
    return measured, paper


def _share(row: Row, passes: Passes) -> Callable[[int], float]:
    """Percent of a measured model by the number of steps."""
    look, end = fitted(row, passes)
    return lambda steps: 100 * share(row, look, end, steps)


def _paper(machine: Machine, size: float, gpus: int) -> Callable[[int], float]:
    return lambda steps: added(machine, size, gpus, steps, sharded=True).percent


def _curve(label: str, colour: str, percent: Callable[[int], float], dash: str = "") -> Curve:
    powers = range(round(PER_DECADE * math.log10(MOST / FEWEST)) + 1)
    steps = [round(FEWEST * 10 ** (power / PER_DECADE)) for power in powers]
    return Curve(label, colour, dash, steps, [percent(length) for length in steps], [])


def draw(rows: Sequence[Row], passes: Passes, machine: Machine, sizes: Sequence[float], gpus: int) -> Drawing:
    """Both axes are logarithmic. Dots are runs; one that cost nothing, or less, lies on the axis."""
    measured, paper = curves(rows, passes, machine, sizes, gpus)
    every = [value for curve in (*measured, *paper) for value in curve.percent]
    low, high = (10.0 ** turn(math.log10(pick(every))) for turn, pick in ((math.floor, min), (math.ceil, max)))
    drawing = Drawing(900, 480, TITLE)

    def at(steps: float, percent: float) -> Point:
        across = math.log(steps / FEWEST) / math.log(MOST / FEWEST)
        up = math.log(max(percent, low) / low) / math.log(high / low)
        return LEFT + (RIGHT - LEFT) * across, BOTTOM - (BOTTOM - TOP) * min(up, 1.0)

    _frame(drawing, at, low, high)
    y = TOP + 10
    for title, group in (("measured, one GPU", measured), (f"on paper, {gpus} GPUs, sharded", paper)):
        drawing.text((RIGHT + 30, y), title, "start", "pale", 13)
        for curve in group:
            y += 24
            points = [at(*point) for point in zip(curve.steps, curve.percent, strict=True)]
            for line in (points, [(RIGHT + 30, y - 5), (RIGHT + 60, y - 5)]):
                drawing.line(line, curve.colour, 2.2, curve.dash)
            for dot in curve.dots:
                drawing.dot(at(*dot), curve.colour)
            drawing.text((RIGHT + 70, y), curve.label, "start", size=13)
        y += 40
    return drawing


def _frame(drawing: Drawing, at: Callable[[float, float], Point], low: float, high: float) -> None:
    drawing.text((LEFT - 60, TOP - 20), "percent added", "start")
    drawing.line([(LEFT, TOP), (LEFT, BOTTOM), (RIGHT, BOTTOM)], "pale", 1)
    for power in range(round(math.log10(low)), round(math.log10(high)) + 1):
        x, y = at(FEWEST, 10.0**power)
        drawing.line([(x - 4, y), (x, y)], "pale", 1)
        drawing.text((x - 8, y + 4), f"{10.0**power:g}", "end", "pale", 12)
    for power in range(round(math.log10(FEWEST)), round(math.log10(MOST)) + 1):
        drawing.text((at(10.0**power, low)[0], BOTTOM + 20), f"{10**power:,}".replace(",", " "), colour="pale", size=12)
    drawing.text((RIGHT, BOTTOM + 42), "steps of the run", "end", "pale", 12)
