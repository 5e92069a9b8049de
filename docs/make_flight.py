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
    target: float
    """Of the rounds that follow: m times the schedule."""
    reach: float
    """The rate that the gradients ask for; 0 where they say nothing."""
    loss: float
    """Of the probe, at the weights as they are."""
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
                target=record["learned"][0] * record["shape"][0],
                reach=record["reach"],
                loss=record["replicas"][0]["signal"],
                event=record["event"] or "",
            )
        )
    return found


def draw(rounds: list[Round]) -> Drawing:
    """Rates above, losses below."""
    drawing = Drawing(900, 560, "Learning rate and probe loss of a probed run over its steps")
    total = rounds[-1].end

    def x(step: float) -> float:
        return LEFT + (RIGHT - LEFT) * step / total

    losses = [part.loss for part in rounds if math.isfinite(part.loss) and part.loss > 0]
    above = _scale([rate for part in rounds for rate in part.rates], 290, 50)
    below = _scale(losses or [1.0], 520, 340)
    _frame(drawing, above, "learning rate")
    _frame(drawing, below, "loss on the probe batch")
    for step in range(0, total + 1, _tick(total)):
        drawing.text((x(step), 544), str(step), colour="pale", size=12)
    drawing.text((LEFT - 14, 544), "step", "end", "pale", 12)
    rates: list[Point] = []
    targets: list[Point] = []
    for part, after in zip(rounds, [*rounds[1:], rounds[-1]], strict=True):
        rates += [(x(s), above.at(rate)) for s, rate in zip((part.start, part.end), part.rates, strict=True)]
        targets += [(x(s), above.at(part.target)) for s in (part.end, after.end)]
        if part.reach > 0:
            drawing.dot((x(part.end), above.at(part.reach)), "c3", 3)
        if math.isfinite(part.loss) and part.loss > 0:
            drawing.dot((x(part.end), below.at(part.loss)), "c0", 3.5)
        if "hot" in part.event:
            drawing.line([(x(part.end), 50), (x(part.end), 520)], "mark", 1, "4 4")
    drawing.line(targets, "pale", 1.5, "3 3")
    drawing.line(rates, "c0")
    _words(drawing, x, rounds)
    return drawing


def _words(drawing: Drawing, x: object, rounds: list[Round]) -> None:
    """Below the middle of the upper panel, where no line runs."""
    place = x(rounds[-1].end * 0.36)  # type: ignore[operator]
    words = [("blue: the rate", "c0"), ("grey: its target", "pale"), ("orange: what the gradients ask for", "c3")]
    if any("hot" in part.event for part in rounds):
        words.append(("violet: too hot, training goes back", "mark"))
    words += [(part.event, "ink") for part in rounds if part.event.startswith("restarted")]
    for number, (text, colour) in enumerate(words):
        drawing.text((place, 196 + 20 * number), text, "start", colour, 13)


def _tick(total: int) -> int:
    """A round number of steps, about eight to the axis.

    >>> _tick(400), _tick(1000)
    (50, 100)
    """
    power = 10 ** math.floor(math.log10(max(total / 8, 1)))
    return next(power * k for k in (1, 2, 5, 10) if power * k * 10 >= total)


def _scale(values: list[float], bottom: float, top: float) -> Axis:
    """Whole decades around the values."""
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    return Axis(10.0**low, 10.0 ** max(high, low + 1), bottom, top)


def _frame(drawing: Drawing, axis: Axis, title: str) -> None:
    drawing.text((LEFT - 60, axis.top - 20), title, "start")
    drawing.line([(LEFT, axis.top), (LEFT, axis.bottom), (RIGHT, axis.bottom)], "pale", 1)
    for power in range(round(math.log10(axis.low)), round(math.log10(axis.high)) + 1):
        drawing.line([(LEFT - 4, axis.at(10.0**power)), (LEFT, axis.at(10.0**power))], "pale", 1)
        drawing.text((LEFT - 8, axis.at(10.0**power) + 4), f"{10.0**power:g}", "end", "pale", 12)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("journal", type=Path)
    parser.add_argument("picture", type=Path, nargs="?", default=HERE / "images" / "flight.svg")
    args = parser.parse_args()
    draw(read(args.journal)).write(args.picture)


if __name__ == "__main__":
    main()
