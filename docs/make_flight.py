"""The picture of docs/finding-the-rate.md, from a journal of a probed run: its rate and its probe loss over the steps.

python docs/make_flight.py run.jsonl           # writes docs/images/flight.svg
"""

import argparse
import math
from pathlib import Path
from typing import NamedTuple

from svg import Drawing, Point

import hdet

HERE = Path(__file__).resolve().parent
LEFT, RIGHT = 80, 870


class Round(NamedTuple):
    """One round."""

    start: int
    end: int
    rates: tuple[float, float]
    """At its first and its last step."""
    loss: float
    """Probe loss at the point nearest to the base value."""
    event: str
    moved: bool


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
        nearest = min(record["replicas"], key=lambda point: abs(math.log(point["multipliers"][0])))
        found.append(
            Round(
                start=0 if before is None else before["step"],
                end=record["step"],
                rates=(first, record["base_before"][0]),
                loss=nearest["signal"],
                event=record["event"] or "",
                moved=before is not None and record["learned"] != before["learned"],
            )
        )
    return found


def draw(rounds: list[Round]) -> Drawing:
    """Rates above, losses below."""
    drawing = Drawing(900, 560, "Learning rate and probe loss of a probed run over its steps")
    total = rounds[-1].end
    landed = max((part.end for part in rounds if part.event), default=0)

    def x(step: float) -> float:
        return LEFT + (RIGHT - LEFT) * step / total

    above, below = _scale([rate for part in rounds for rate in part.rates], 290, 50), Axis(0.003, 3.0, 520, 340)
    _frame(drawing, above, "learning rate")
    _frame(drawing, below, "loss on the probe batch")
    for step in range(0, total + 1, 50):
        drawing.text((x(step), 544), str(step), colour="pale", size=12)
    drawing.text((LEFT - 14, 544), "step", "end", "pale", 12)
    drawing.line([(x(landed), 50), (x(landed), 520)], "pale", 1, "4 4")
    path: list[Point] = []
    for part in rounds:
        steps = (part.start, part.end)
        path += [(x(step), above.at(rate)) for step, rate in zip(steps, part.rates, strict=True)]
        colour = "c3" if part.event else "c0"
        drawing.line(path[-2:] if part.start == landed else path[-3:], colour)
        if math.isfinite(part.loss):
            drawing.dot((x(part.end), below.at(part.loss)), colour, 3.5)
        if part.moved and not part.event:
            drawing.dot((x(part.end), above.at(part.rates[1])), "mark", 4.5)
    _words(drawing, x, rounds, landed)
    return drawing


def _words(drawing: Drawing, x: object, rounds: list[Round], landed: int) -> None:
    place = x(landed) + 10  # type: ignore[operator]
    event = next(part.event for part in rounds if part.end == landed)
    drawing.text((place, 236), event, "start", "c3")
    drawing.text((place, 256), "before: take-off (orange); after: climb and schedule (blue)", "start", "ink", 13)
    if any(part.moved and not part.event for part in rounds):
        drawing.text((place, 276), "violet: the line search moves the rate", "start", "mark", 13)


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
