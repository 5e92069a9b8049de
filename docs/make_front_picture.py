"""The picture of the README and of the site's home page, from lab/experiments/results/front.json.

    python docs/make_front_picture.py              # draws docs/images/front.svg
    python docs/make_front_picture.py --train      # runs lab/experiments/bad_guess.py first

Validation loss on the left, learning rate on the right; mean and range over the seeds. The same data give the same
bytes.
"""

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from svg import Drawing, Point

HERE = Path(__file__).resolve().parent
DATA = HERE.parent / "lab" / "experiments" / "results" / "front.json"
COLOURS = {"torch, bad guess": "c3", "torch, tuned": "pale", "hdet": "c0"}


class Panel(NamedTuple):
    """Steps to the right, a logarithmic axis upwards."""

    left: float
    right: float
    top: float
    bottom: float
    steps: int
    low: float
    high: float

    def at(self, step: float, value: float) -> Point:
        done = math.log(value / self.low) / math.log(self.high / self.low)
        height = min(max(done, 0.0), 1.0) * (self.bottom - self.top)
        return self.left + (self.right - self.left) * step / self.steps, self.bottom - height


def draw(data: dict[str, Any]) -> Drawing:
    """Two panels, and a line of words for each way of training."""
    drawing = Drawing(
        900, 436, "Validation loss and learning rate: torch with a bad guess, torch tuned, hdet", ground=True
    )
    losses = _panel(data, "losses", 62, 500)
    rates = _panel(data, "rates", 600, 880)
    _frame(drawing, losses, "validation loss")
    _frame(drawing, rates, "learning rate")
    for line in sorted(data["lines"], key=lambda line: list(COLOURS).index(line["name"])):
        for panel, what in ((losses, "losses"), (rates, "rates")):
            _curve(drawing, panel, line["steps"], line[what], COLOURS[line["name"]])
    for place, (words, colour) in enumerate(_legend(data)):
        y = 374 + 24 * place
        drawing.line([(62, y - 5), (92, y - 5)], colour, 3)
        drawing.text((102, y), words, "start", size=15)
    return drawing


def _legend(data: dict[str, Any]) -> list[tuple[str, str]]:
    said = {
        "torch, bad guess": f"torch.OneCycleLR, a rate {data['far']:g} times too low",
        "torch, tuned": f"torch.OneCycleLR, the best rate of a sweep over {len(data['sweep'])}",
        "hdet": f"hdet.auto, from the same rate {data['far']:g} times too low",
    }
    ends = {line["name"]: fmean(losses[-1] for losses in line["losses"]) for line in data["lines"]}
    return [(f"{words}: final loss {ends[name]:.2g}", COLOURS[name]) for name, words in said.items()]


def _panel(data: dict[str, Any], what: str, left: float, right: float) -> Panel:
    """As high as the values need, a little above and below."""
    values = [value for line in data["lines"] for run in line[what] for value in run if value > 0]
    low = min(values) if what == "losses" else min(line["given"] for line in data["lines"]) / 50
    return Panel(left, right, 48, 310, data["steps"], low / 1.25, max(values) * 1.25)


def _frame(drawing: Drawing, panel: Panel, title: str) -> None:
    drawing.text((panel.left - 44, panel.top - 18), title, "start", size=15)
    drawing.line([(panel.left, panel.top), (panel.left, panel.bottom), (panel.right, panel.bottom)], "pale", 1)
    for power in range(math.ceil(math.log10(panel.low)), math.floor(math.log10(panel.high)) + 1):
        x, y = panel.at(0, 10.0**power)
        drawing.line([(x - 4, y), (x, y)], "pale", 1)
        drawing.text((x - 8, y + 4), f"{10.0**power:g}", "end", size=13)
    for step in range(0, panel.steps + 1, 100):
        drawing.text((panel.at(step, panel.low)[0], panel.bottom + 19), str(step), size=13)
    drawing.text((panel.right, panel.bottom + 36), "step", "end", size=13)


def _curve(drawing: Drawing, panel: Panel, steps: Sequence[int], runs: Sequence[Sequence[float]], colour: str) -> None:
    columns = list(zip(*runs, strict=True))
    upper = [panel.at(step, max(column)) for step, column in zip(steps, columns, strict=True)]
    lower = [panel.at(step, min(column)) for step, column in zip(steps, columns, strict=True)]
    drawing.area([*upper, *reversed(lower)], colour)
    drawing.line([panel.at(step, fmean(column)) for step, column in zip(steps, columns, strict=True)], colour, 2.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path, nargs="?", default=HERE / "images" / "front.svg")
    parser.add_argument("--train", action="store_true", help="measure anew first")
    args = parser.parse_args()
    if args.train:
        subprocess.run([sys.executable, HERE.parent / "lab" / "experiments" / "bad_guess.py"], check=True)
    draw(json.loads(DATA.read_text(encoding="utf-8"))).write(args.picture)


if __name__ == "__main__":
    main()
