"""The picture of docs/finding-the-rate.md, from the journal of a search: its rate and its train loss over the steps.

python docs/make_flight.py run.jsonl           # writes docs/images/flight.svg
"""

import argparse
import math
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from svg import Drawing, Point

import hdet
from hdet.rule.enums import event_of

HERE = Path(__file__).resolve().parent
LEFT, RIGHT = 80, 870


class Round(NamedTuple):
    """One round."""

    start: int
    end: int
    rates: tuple[float, float]
    """At its first and its last step."""
    estimated_rate: float
    """The estimated rate at its end; 0: none."""
    loss: float
    """Mean train loss."""
    event: str


class Axis(NamedTuple):
    """A logarithmic axis, from bottom to top."""

    low: float
    high: float
    bottom: float
    top: float

    def at(self, value: float) -> float:
        done = math.log(value / self.low) / math.log(self.high / self.low)
        return self.bottom - min(max(done, 0.0), 1.0) * (self.bottom - self.top)


def read(path: Path) -> list[Round]:
    """The rounds of the first parameter group; the last step of the schedule is left out."""
    records = hdet.read_journal(path).rounds
    found = []
    for before, record in zip([None, *records[:-2]], records[:-1], strict=True):
        first = record["base_before"][0] if before is None else before["base"][0]
        found.append(
            Round(
                start=0 if before is None else before["step"],
                end=record["step"],
                rates=(first, record["base_before"][0]),
                estimated_rate=record["estimated_rate"],
                loss=record["replicas"][0]["loss"] or math.nan,
                event=event_of(record) or "",
            )
        )
    return found


def draw(rounds: list[Round]) -> Drawing:
    """Rates above, losses below, over the logarithm of steps: rounds are evenly wide there."""
    drawing = Drawing(900, 560, "Learning rate and train loss of a search over its steps")
    total = rounds[-1].end

    def x(step: float) -> float:
        return LEFT + (RIGHT - LEFT) * math.log(max(step, 1)) / math.log(total)

    rates = [rate for part in rounds[1:] for rate in (*part.rates, part.estimated_rate) if rate > 0]
    losses = [part.loss for part in rounds if part.loss > 0 and math.isfinite(part.loss)]
    above, below = _scale(rates, 290, 50), _scale(losses or [0.1, 1.0], 520, 340)
    _frame(drawing, above, "learning rate")
    _frame(drawing, below, "mean train loss of a round")
    for step in (1, 3, 10, 30, 100, 300, 1000):
        if step <= total:
            drawing.text((x(step), 544), str(step), colour="pale", size=12)
    drawing.text((LEFT - 14, 544), "step", "end", "pale", 12)
    for has_estimate, stretch in groupby(rounds, lambda part: part.estimated_rate > 0):
        if has_estimate:
            drawing.line([(x(part.end), above.at(part.estimated_rate)) for part in stretch], "mark", 1.2, "3 3")
    path: list[Point] = []
    for part in rounds[1:]:  # the first step was made at a rate that says nothing
        steps = (part.start, part.end)
        path += [(x(step), above.at(rate)) for step, rate in zip(steps, part.rates, strict=True)]
    drawing.line(path, "c0")
    for part in rounds:
        if math.isfinite(part.loss):
            drawing.dot((x(part.end), below.at(part.loss)), "c3" if part.event else "c0", 3.5)
        if part.event:
            drawing.line([(x(part.end), 50), (x(part.end), 520)], "pale", 1, "4 4")
    _words(drawing, x, rounds)
    return drawing


def _words(drawing: Drawing, x: Callable[[float], float], rounds: list[Round]) -> None:
    for i, part in enumerate(part for part in rounds if part.event):
        drawing.text((x(part.end) + 10, 64 + 20 * i), part.event, "start", "c3", 13)
    drawing.text((RIGHT - 60, 256), "violet: estimated rate", "end", "mark", 13)
    drawing.text((RIGHT - 60, 276), "blue: the rate", "end", "c0", 13)


def _scale(values: list[float], bottom: float, top: float) -> Axis:
    """Whole decades around the values."""
    return Axis(10 ** math.floor(math.log10(min(values))), 10 ** math.ceil(math.log10(max(values))), bottom, top)


def _frame(drawing: Drawing, axis: Axis, title: str) -> None:
    drawing.text((LEFT - 60, axis.top - 20), title, "start")
    drawing.line([(LEFT, axis.top), (LEFT, axis.bottom), (RIGHT, axis.bottom)], "pale", 1)
    for power in range(math.ceil(math.log10(axis.low)), math.floor(math.log10(axis.high)) + 1):
        drawing.line([(LEFT - 4, axis.at(10**power)), (LEFT, axis.at(10**power))], "pale", 1)
        drawing.text((LEFT - 8, axis.at(10**power) + 4), f"{10.0**power:g}", "end", "pale", 12)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("journal", type=Path)
    parser.add_argument("picture", type=Path, nargs="?", default=HERE / "images" / "flight.svg")
    args = parser.parse_args()
    draw(read(args.journal)).write(args.picture)


if __name__ == "__main__":
    main()
