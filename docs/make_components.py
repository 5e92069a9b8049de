"""The picture of hdet's parts in README.md and on the site's home page, docs/index.md.

    python docs/make_components.py     # draws docs/images/components.svg

Loops above, what a user constructs in the middle, what these share below: a part stands under what uses it. The same
script gives the same bytes.
"""

import argparse
from pathlib import Path

from svg import Drawing

HERE = Path(__file__).resolve().parent
WIDTH, HEIGHT = 900, 474
LEFT, COLUMN, GAP = 14, 209, 12
"""The four columns: jax, guard, search, replicas. No part needs a gap in this order."""
PRODUCTS = (
    ("hdet.jax", ("the same search, and", "replica ensembles,", "for optax"), "mark"),
    ("hdet.Guard", ("keeps your rate, leaves", "bad steps out, rolls", "back what diverged"), "c3"),
    ("hdet.auto", ("finds the learning rate", "of one model", "while it trains"), "c0"),
    ("hdet.OneCycleLR", ("and hdet.Ensemble: HDET,", "replicas that train at", "different values"), "c2"),
)
SHARED = (
    (3, 4, "knobs, controllers, arms"),
    (1, 3, "snapshots and rollbacks"),
    (0, 3, "the rule: pure arithmetic, without torch and jax"),
    (2, 4, "journal, read by hdet report"),
    (1, 4, "ranks: gather, agree, average (DDP, FSDP2, torchft)"),
    (1, 4, "hdet.save and hdet.load: checkpoints that survive a kill"),
)
"""From which column, up to which, what. The first two are side by side."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, nargs="?", default=HERE / "images" / "components.svg")
    components().write(parser.parse_args().path)


def components() -> Drawing:
    """Loops, products and what they share, from the top down."""
    title = "hdet's parts: training loops, what they construct, and what these have in common"
    drawing = Drawing(WIDTH, HEIGHT, title, ground=True)
    _box(drawing, 1, 4, 14, 62, "ink")
    drawing.text((_middle(1, 4), 34), "your loop in torch")
    words = "plain, Lightning, Hugging Face Trainer, Accelerate, DeepSpeed, torchtitan"
    drawing.text((_middle(1, 4), 53), words, size=13, colour="pale")
    _box(drawing, 0, 1, 14, 62, "ink")
    drawing.text((_middle(0, 1), 34), "your loop in jax")
    drawing.text((_middle(0, 1), 53), "optax, flax, equinox", size=13, colour="pale")
    for column, (name, lines, colour) in enumerate(PRODUCTS):
        drawing.arrow((_middle(column, column + 1), 64), (_middle(column, column + 1), 102))
        _box(drawing, column, column + 1, 104, 204, colour, filled=True)
        drawing.text((_middle(column, column + 1), 128), name, colour=colour, size=15)
        for row, line in enumerate(lines):
            drawing.text((_middle(column, column + 1), 151 + 19 * row), line, size=13)
    for column in range(4):
        words = "value=loss" if column == 0 else "step(loss)"
        drawing.text((_middle(column, column + 1) + 8, 87), words, "start", size=13)
    y = 218.0
    for place, (first, last, words) in enumerate(SHARED):
        _box(drawing, first, last, y, y + 40, "pale")
        drawing.text((_middle(first, last), y + 25), words)
        y += 0 if place == 0 else 50
    return drawing


def _left(column: int) -> float:
    return LEFT + column * (COLUMN + GAP)


def _middle(first: int, last: int) -> float:
    return (_left(first) + _left(last) - GAP) / 2


def _box(drawing: Drawing, first: int, last: int, top: float, bottom: float, colour: str, filled: bool = False) -> None:
    """Around columns, from the first up to the last."""
    left, right = _left(first), _left(last) - GAP
    corners = [(left, top), (right, top), (right, bottom), (left, bottom), (left, top)]
    if filled:
        drawing.area(corners, colour, 0.1)
    drawing.line(corners, colour, 1.5)


if __name__ == "__main__":
    main()
