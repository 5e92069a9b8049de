"""The tables of experiments/real_lr.py as markdown, and the profiles as a picture.

python experiments/real_table.py                       # both splits, experiments/results/real
python experiments/real_table.py --split dev --image docs/images/profile.svg
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from real.score import LONGEST, Summary, Table, area, profile, ratios, slowdowns, summary, table_of

RESULTS = Path(__file__).parent / "results" / "real"
IMAGES = Path(__file__).parents[1] / "docs" / "images"
OURS = "auto"
CONTROLS = ("placebo", "onecycle")
"""No methods that anyone would use: they are never the fastest, and are not drawn."""


class Line(NamedTuple):
    """The profile of a method, as drawn."""

    label: str
    tau: list[float]
    rho: list[float]
    area: float
    ours: bool


def read(folder: Path, split: str) -> list[Table]:
    """The workloads of a split that have been run."""
    contents = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    return [table_of(one) for one in contents if one["split"] == split and "onecycle" in one["rows"]]


def summaries(tables: Sequence[Table]) -> dict[str, Summary]:
    """Of all methods that every workload has, the largest area first."""
    found = {name: summary(tables, name, slow) for name, slow in slowdowns(tables, CONTROLS).items()}
    return dict(sorted(found.items(), key=lambda item: -item[1].area))


def summary_table(tables: Sequence[Table]) -> str:
    """One line per method."""
    labels = tables[0].labels
    head = "| | area | reached | ratio | worst | sensitivity | spread | failed |\n| --- |" + " ---: |" * 7
    lines = [
        f"| {labels[name]} | {one.area:.3f} | {one.reached:.0%} | {one.ratio:.3f} | {one.worst:.2f} | "
        f"{'' if one.sensitivity is None else f'{one.sensitivity:.3f}'} | "
        f"{'' if math.isnan(one.spread) else f'{one.spread:.1%}'} | "
        f"{one.failed or ''} |"
        for name, one in summaries(tables).items()
    ]
    return "\n".join([head, *lines])


def ratio_table(tables: Sequence[Table]) -> str:
    """Final loss over the tuned OneCycle's: a line per method and start, a column per workload."""
    names = list(dict.fromkeys(name for table in tables for name in table.methods))
    labels = {name: label for table in tables for name, label in table.labels.items()}
    head = f"| | {' | '.join(table.name for table in tables)} |\n| --- |" + " ---: |" * len(tables)
    lines = []
    for name in names:
        found = {table.name: ratios(table, name) for table in tables if name in table.methods}
        for start in dict.fromkeys(start for row in found.values() for start in row):
            cells = [found.get(table.name, {}).get(start, math.nan) for table in tables]
            label = labels[name] + ("" if start is None or name == "tuned" else f", from x{start:g}")
            lines.append(f"| {label} | {' | '.join('' if math.isnan(c) else f'{c:.3f}' for c in cells)} |")
    return "\n".join([head, *lines])


def found_table(tables: Sequence[Table]) -> str:
    """The rate that runs found over the best fixed one, lowest and highest of the seeds: a column per workload."""
    names = ("customary", "finder", "auto", "placebo", "published", "greedy")
    labels = {name: label for table in tables for name, label in table.labels.items()}
    head = f"| | {' | '.join(table.name for table in tables)} |\n| --- |" + " ---: |" * len(tables)
    lines = []
    for name in names:
        for start in dict.fromkeys(start for table in tables for start in table.found.get(name, {})):
            cells = [_range(table.found.get(name, {}).get(start, [])) for table in tables]
            lines.append(f"| {labels[name]}{'' if start is None else f', from x{start:g}'} | {' | '.join(cells)} |")
    return "\n".join([head, *lines])


def _range(values: Sequence[float]) -> str:
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return ""
    low, high = f"{min(known):.2g}", f"{max(known):.2g}"
    return low if low == high else f"{low} to {high}"


def lines_of(tables: Sequence[Table]) -> list[Line]:
    """The profiles of all methods but controls, the largest area first."""
    tau = np.linspace(1, LONGEST, 301).tolist()
    found = {name: slow for name, slow in slowdowns(tables, CONTROLS).items() if name not in CONTROLS}
    labels = tables[0].labels
    lines = [
        Line(labels[name], tau, [profile(slow, x) for x in tau], area(slow), name == OURS)
        for name, slow in found.items()
    ]
    return sorted(lines, key=lambda line: -line.area)


def draw(lines: Sequence[Line], path: Path, title: str) -> None:
    """The picture."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7.5, 4.2), layout="constrained")
    colours = plt.get_cmap("tab10")
    for number, line in enumerate(lines):
        style = {"color": colours(number % 10), "linestyle": "-" if number < 10 else "--"}
        style |= {"color": "black", "linewidth": 2.6, "zorder": 3} if line.ours else {}
        axes.step(line.tau, line.rho, where="post", label=f"{line.label} ({line.area:.2f})", **style)
    axes.set(xlim=(1, LONGEST), ylim=(0, 1.02), title=title)
    axes.set(xlabel="tau: times as slow as the fastest", ylabel="share of runs at the target")
    axes.grid(alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--split", choices=("dev", "test", "both"), default="both")
    parser.add_argument("--image", type=Path, help="default: docs/images/real_profile_SPLIT.svg; '-': none")
    given = parser.parse_args()
    for split in ("dev", "test") if given.split == "both" else (given.split,):
        tables = read(given.results, split)
        if not tables:
            print(f"\n{split}: nothing in {given.results}")
            continue
        parts = (summary_table(tables), ratio_table(tables), found_table(tables))
        print("\n\n".join([f"\n## {split}: {len(tables)} workloads", *parts]))
        if str(given.image) != "-":
            path = given.image or IMAGES / f"real_profile_{split}.svg"
            draw(lines_of(tables), path, f"{len(tables)} workloads of {split}: time to the target")
            print(f"\n{path}")


if __name__ == "__main__":
    main()
