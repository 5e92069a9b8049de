"""The drawing of docs/how-it-works.md, from the formulas: one cycle of fan-out and converge.

python docs/make_cycle.py              # writes docs/images/cycle.svg
"""

import argparse
import math
from pathlib import Path

from svg import Drawing, Point

HERE = Path(__file__).resolve().parent
ALPHA = 0.45
"""Much wider than 1/9, to be seen."""
DEALT = ([0, 1, 2, 3], [2, 0, 3, 1])
"""Per round: the place of each replica."""
N = len(DEALT[0])
LEFT, ROUND = 70, 350
"""Where the first round begins, and how wide a round is."""


def multiplier(place: int) -> float:
    """rho of a place: 1 + alpha (r - (N-1)/2) / delta."""
    return 1 + ALPHA * (place - (N - 1) / 2) / ((N - 1) / 2)


def cycle() -> Drawing:
    """Rates above, weights below, over two rounds and the beginning of a third."""
    drawing = Drawing(900, 560, "Two rounds: replicas fan out at their own rates and converge to their mean")
    edges = [LEFT, LEFT + ROUND, LEFT + 2 * ROUND]
    for edge in edges[1:]:
        drawing.line([(edge, 48), (edge, 478)], "pale", 1, "4 4")
    _rates(drawing)
    _weights(drawing)
    for k, edge in enumerate(edges[:2]):
        drawing.line([(edge + 8, 492), (edge + 8, 498), (edge + ROUND - 8, 498), (edge + ROUND - 8, 492)], "pale", 1)
        drawing.text((edge + ROUND / 2, 516), f"round {k}: T steps, each with one shared gradient")
    drawing.text((edges[1], 544), "converge: weights are averaged, losses move the base, multipliers are dealt anew")
    return drawing


def _base(k: int, done: float) -> float:
    """Height of the base rate: the schedule rises a little, and after round 0 the controller has moved it up."""
    return (0.62 + 0.16 * (k + done)) * (1.0, 1.18, 1.18)[k]


def _rates(drawing: Drawing) -> None:
    bottom, height = 240, 108

    def at(k: int, done: float, rho: float) -> Point:
        return LEFT + (k + done) * ROUND, bottom - height * _base(k, done) * rho

    drawing.text((LEFT - 50, 30), "learning rate", "start")
    drawing.line([(LEFT, 48), (LEFT, bottom), (LEFT + 2.25 * ROUND, bottom)], "pale", 1)
    for k in (0, 1):
        for r in range(N):
            rho = multiplier(DEALT[k][r])
            drawing.line([at(k, 0, rho), at(k, 1, rho)], f"c{r}")
            if k == 0:
                drawing.line([at(0, 1, rho), at(1, 0, multiplier(DEALT[1][r]))], f"c{r}", 1, "2 3")
        drawing.line([at(k, 0, 1), at(k, 1, 1)], "ink", 1.5, "6 4")
    drawing.text((LEFT + 10, at(0, 0.05, multiplier(3))[1] - 8), "ρ_3 · base", "start", "c3")
    drawing.text((LEFT + 10, at(0, 0.05, multiplier(0))[1] + 18), "ρ_0 · base", "start", "c0")
    drawing.text((LEFT + 1.02 * ROUND, at(1, 0, multiplier(0))[1] + 24), "base (dashed), moved by the losses", "start")


def _weights(drawing: Drawing) -> None:
    bottom, height = 450, 72

    def path(begin: float, k: int, rho: float) -> list[Point]:
        """anchor + rho D(t): one D for all."""
        steps = [i / 24 for i in range(25)]
        return [
            (LEFT + (k + s) * ROUND, bottom - height * (begin + rho * (s + 0.06 * math.sin(9 * s) * s))) for s in steps
        ]

    drawing.text((LEFT - 50, 290), "weights", "start")
    drawing.line([(LEFT, 300), (LEFT, bottom + 28), (LEFT + 2.25 * ROUND, bottom + 28)], "pale", 1)
    begin = 0.0
    for k in (0, 1):
        paths = [path(begin, k, multiplier(DEALT[k][r]) * 0.85) for r in range(N)]
        mean = sum(points[-1][1] for points in paths) / N
        for r, points in enumerate(paths):
            drawing.line(points, f"c{r}")
            drawing.line([points[-1], (points[-1][0], mean)], f"c{r}", 1, "2 3")
        drawing.dot(paths[0][0], "ink", 5)
        drawing.dot((paths[0][-1][0], mean), "ink", 5)
        begin = (bottom - mean) / height
        if k == 0:
            drawing.text((LEFT + 12, paths[0][0][1] + 18), "anchor", "start")
            drawing.text((LEFT + ROUND + 12, mean + 22), "their mean", "start")
    drawing.text((LEFT + 2 * ROUND + 12, bottom - height * begin + 5), "consensus", "start")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=HERE / "images")
    folder = parser.parse_args().folder
    cycle().write(folder / "cycle.svg")


if __name__ == "__main__":
    main()
