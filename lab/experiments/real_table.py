"""The tables of lab/experiments/real_lr.py as markdown, the profiles as a picture, and whether the targets are met.

    python lab/experiments/real_table.py        # test, seen, dev of lab/experiments/results/real; the README's table
    python lab/experiments/real_table.py --split kin

docs/make_results.py puts them into docs/real-data.md and README.md.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
from checkout import ROOT
from provenance import library
from real.score import (
    LONGEST,
    SLACK,
    Pair,
    Summary,
    Table,
    area,
    geometric_mean,
    pair,
    profile,
    ratios,
    slowdowns,
    summary,
    table_of,
)
from real.targets import APART, CONTROLS, OURS, TUNED_PEERS, Duel, check_table, checks, is_peer

SHOWN = ("test", "seen", "dev")
"""Splits of the page, and those on which the README compares methods. kin was for tuning only."""
SPLITS = (*SHOWN, "kin")
TUNED_ON = "dev"
COLUMNS = ("auto", "auto-alone", "customary", "finder", "schedulefree", "prodigy", "prodigyplus")
"""Of the page's table by workload."""
RESULTS = Path(__file__).parent / "results" / "real"
IMAGES = ROOT / "docs" / "images"

OWN_ROWS = {
    ("test",): "**`hdet.auto`** on {n} tasks that were not used to design it (*test*)",
    ("dev", "seen"): "**`hdet.auto`** on {n} that were (*dev*, *seen*)",
    SPLITS: "**`hdet.auto`** on all {n}, with variants of *dev* (*kin*)",
}
"""Rows of the README's table for ours, by the splits that each is about."""
FRONT = {
    "schedulefree-tuned": "Schedule-Free, at the best of five rates",
    "prodigyplus": "Prodigy with Schedule-Free",
    "nadamw-calibrated": "NadamW, one setting for all, tuned on *dev*",
    "schedulefree": "Schedule-Free, its default rate",
    "finder": "a range test, then OneCycle at its suggestion",
    "customary": "OneCycle, at the optimizer's usual rate, such as 1e-3 for Adam",
    "onecycle": "OneCycle, from the same three rates as hdet: 1/1000, 1, 100 times the best",
}
"""Its rows for other methods, and what they are called there. docs/real-data.md has all methods."""


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
    return [table_of(one) for one in contents if one.get("split") == split and "onecycle" in one["rows"]]


def summaries(tables: Sequence[Table]) -> dict[str, Summary]:
    """Of all methods that every workload has, the largest area first."""
    found = {name: summary(tables, name, slow) for name, slow in slowdowns(tables, CONTROLS).items()}
    return dict(sorted(found.items(), key=lambda item: -item[1].area))


def duels(tables: Sequence[Table]) -> dict[str, Duel]:
    """Our summary beside each peer's, over the workloads that both have run."""
    names = dict.fromkeys(name for table in tables for name in table.methods if is_peer(name))
    found = {name: summaries([table for table in tables if {name, OURS} <= table.methods.keys()]) for name in names}
    return {name: Duel(both[OURS], both[name]) for name, both in found.items()}


def duel_table(tables: Sequence[Table]) -> str:
    """Each method that is not ours beside ours, over the workloads that both have run; the lowest mean first."""
    labels = {name: label for table in tables for name, label in table.labels.items()}
    names = dict.fromkeys(name for table in tables for name in table.methods if is_peer(name) or name in TUNED_PEERS)
    found = {name: pair(tables, OURS, name) for name in names}
    lines = [
        "| | workloads | its mean | auto's mean there | auto ÷ it (95 %) | auto lower on |",
        "| --- |" + " ---: |" * 5,
    ]
    for name, one in sorted(found.items(), key=lambda item: item[1].theirs):
        cells = [f"{one.workloads}", f"{one.theirs:.2f}", f"{one.ours:.2f}", _with_interval(one), f"{one.ahead}"]
        lines.append(f"| {labels[name]} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def versus(tables: Sequence[Table], names: Sequence[str], extremes: int = 2) -> str:
    """Peers beside ours over the workloads that both have run, and the workloads on which each is furthest ahead."""
    labels = {name: label for table in tables for name, label in table.labels.items()}
    lines = ["| | workloads | its mean | its worst | hdet's mean there | hdet lower on |", "| --- |" + " ---: |" * 5]
    words = []
    for name in names:
        both = [table for table in tables if {name, OURS} <= table.methods.keys()]
        one = pair(both, OURS, name)
        cells = [f"{one.workloads}", f"{one.theirs:.2f}", f"{one.worst:.2f}", f"{one.ours:.2f}", f"{one.ahead}"]
        lines.append(f"| {labels[name]} | " + " | ".join(cells) + " |")
        means = {t.name: [geometric_mean(list(ratios(t, which).values())) for which in (name, OURS)] for t in both}
        order = sorted(means, key=lambda workload: means[workload][0] / means[workload][1])
        lower, higher = (
            ", ".join(f"{workload} ({means[workload][0]:.2f}, hdet {means[workload][1]:.2f})" for workload in part)
            for part in (order[:extremes], order[::-1][:extremes])
        )
        words.append(f"{labels[name]}: beats hdet most on {lower}; loses most on {higher}.")
    return "\n".join(lines) + "\n\n" + "\n".join(f"- {one}" for one in words)


def _with_interval(found: Pair) -> str:
    low, high = found.interval
    return f"{found.ratio:.2f} ({low:.2f} to {high:.2f})"


def summary_table(tables: Sequence[Table], *, compact: bool = False) -> str:
    """One line per method; ``compact`` leaves out what describes the runs and not the losses."""
    labels = tables[0].labels
    head = ["mean", "worst", "area", "near", "reached", "sensitivity", "spread", "failed"]
    shown = head[:4] if compact else head
    lines = ["| | " + " | ".join(shown) + " |", "| --- |" + " ---: |" * len(shown)]
    for name, one in summaries(tables).items():
        cells = [f"{one.ratio:.3f}", f"{one.worst:.2f}", f"{one.area:.3f}", f"{one.near:.0%}", f"{one.reached:.0%}"]
        cells.append("" if one.sensitivity is None else f"{one.sensitivity:.3f}")
        cells += ["" if math.isnan(one.spread) else f"{one.spread:.1%}", str(one.failed or "")]
        lines.append(f"| {labels[name]} | " + " | ".join(cells[: len(shown)]) + " |")
    return "\n".join(lines)


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


def compact_table(tables: Sequence[Table]) -> str:
    """The same with a line per workload, two digits, some methods, and all starts of a method in one cell."""
    labels = {name: label for table in tables for name, label in table.labels.items()}
    names = [name for name in COLUMNS if any(name in table.methods for table in tables)]
    lines = [f"| | {' | '.join(labels[name] for name in names)} |", "| --- |" + " ---: |" * len(names)]
    for table in tables:
        rows = [ratios(table, name) if name in table.methods else {} for name in names]
        cells = ["/".join("" if math.isnan(ratio) else f"{ratio:.2f}" for ratio in row.values()) for row in rows]
        lines.append(f"| {table.name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def found_table(tables: Sequence[Table]) -> str:
    """The rate that runs found over the best fixed one, lowest and highest of the seeds: a column per workload."""
    names = ("customary", "finder", "auto", "auto-alone", "placebo", "published", "greedy")
    labels = {name: label for table in tables for name, label in table.labels.items()}
    head = f"| | {' | '.join(table.name for table in tables)} |\n| --- |" + " ---: |" * len(tables)
    lines = []
    for name in names:
        for start in dict.fromkeys(start for table in tables for start in table.found.get(name, {})):
            cells = [_range(table.found.get(name, {}).get(start, [])) for table in tables]
            lines.append(f"| {labels[name]}{'' if start is None else f', from x{start:g}'} | {' | '.join(cells)} |")
    return "\n".join([head, *lines])


def front(every: Mapping[str, Sequence[Table]]) -> str:
    """The README's table: how methods end on the workloads of *test*, failures included, and pairs over all workloads.

    ``every``: the workloads of each split.
    """
    lines = [
        f"| final loss ÷ that of a tuned OneCycle | mean | median | within {100 * (SLACK - 1):.0f} % | worst "
        "| hdet's loss ÷ its loss, all tasks that both ran (95 %) | hdet lower on |",
        "| --- |" + " ---: |" * 6,
    ]
    for splits, label in OWN_ROWS.items():
        tables = [table for split in splits for table in every[split]]
        if tables:
            lines.append(f"| {label.format(n=len(tables))} | {_ends(tables, OURS)} | | |")
    shown = [table for split in SHOWN for table in every[split]]
    for name, label in FRONT.items():
        if any({name, OURS} <= table.methods.keys() for table in shown):
            one, tables = pair(shown, OURS, name), [table for table in every["test"] if name in table.methods]
            ends = _ends(tables, name) if tables else " | " * 3
            lines.append(f"| {label} | {ends} | {_with_interval(one)} | {one.ahead} of {one.workloads} |")
    return "\n".join(lines)


def _ends(tables: Sequence[Table], name: str) -> str:
    """Cells: each workload counts once, with the mean over its starts; the worst is that of a start."""
    found = [ratios(table, name).values() for table in tables]
    means = [geometric_mean([*row]) for row in found]
    near = f"{sum(mean <= SLACK for mean in means)} of {len(means)}"
    return f"{geometric_mean(means):.2f} | {median(means):.2f} | {near} | {max(map(max, found)):.2f}"


def of_another_rule(tables: Sequence[Table]) -> str:
    """A sentence, or nothing: which rows were measured with a rule that decides otherwise than that of now."""
    labels = {name: label for table in tables for name, label in table.labels.items()}
    older = dict.fromkeys(labels[name] for table in tables for name, rule in table.rules.items() if rule != library())
    return f"Measured with another rule than that of now: {'; '.join(older)}." if older else ""


def of_splits(folder: Path = RESULTS) -> dict[str, list[Table]]:
    """The workloads of every split, without those that are in no mean."""
    return {split: [table for table in read(folder, split) if table.name not in APART] for split in SPLITS}


def page(folder: Path = RESULTS, images: Path = IMAGES, splits: Sequence[str] = SHOWN, *, compact: bool = False) -> str:
    """The targets, and the splits that have been run, with their pictures.

    ``compact``: as in docs/real-data.md. It has the targets that are missed, no summary of the split that the rule was
    tuned on, and one table of all workloads.
    """
    every = {split: read(folder, split) for split in SPLITS}
    found = {split: summaries(tables) for split, tables in every.items() if split in splits and tables}
    apart = [table for tables in every.values() for table in tables if table.name in APART and OURS in table.methods]
    beside = {split: duels(every[split]) for split in found}
    met = checks(found, {table.name: ratios(table, OURS) for table in apart}, beside)
    missed = [check for check in met if not check.met]
    parts = ["## Targets", check_table(met)] if met else []
    if compact and met:
        words = "; ".join(f"{check.split}, {check.what}: {check.found} ({check.asked})" for check in missed)
        parts[1:] = [f"{len(met) - len(missed)} of {len(met)} are met. Missed: {words}."]
    for split in splits:
        tables = [table for table in every[split] if table.name not in APART]
        if not tables or (compact and split == TUNED_ON):
            continue
        picture = images / f"real_profile_{split}.svg"
        draw(lines_of(tables), picture, f"{len(tables)} workloads of {split}: time to the target")
        parts.append(f"## {split.capitalize()}: {len(tables)} workloads")
        parts.append(summary_table(tables, compact=compact))
        parts += filter(None, [of_another_rule(tables)])
        parts.append(f"![Share of runs at the target over the slowdown, {split}]({images.name}/{picture.name})")
        if not compact:
            parts += ["Final loss over that of the tuned OneCycle:", ratio_table(every[split])]
            parts += ["The rate found, over the best of the grid:", found_table(every[split])]
    shown = [table for split in splits for table in every[split] if table.name not in APART]
    if any(duels(shown)):
        parts += ["## On the same workloads", f"Over {', '.join(splits)}.", duel_table(shown)]
    if compact:
        parts += ["## Every workload", f"Final loss over the tuned OneCycle's, for {', '.join(splits)} in this order."]
        parts.append(compact_table([table for split in splits for table in every[split]]))
    return "\n\n".join(parts)


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
    matplotlib.rcParams["svg.hashsalt"] = "hdet"  # the same numbers give the same bytes
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
    figure.savefig(path, dpi=160, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--images", type=Path, default=IMAGES, help="where the profiles are drawn")
    parser.add_argument("--split", choices=SPLITS, help=f"only this one, default {', '.join(SHOWN)}")
    given = parser.parse_args()
    splits = [given.split] if given.split else SHOWN
    print(page(given.results, given.images, splits) or f"nothing of {', '.join(splits)} in {given.results}")
    print("\n" + front(of_splits(given.results)))


if __name__ == "__main__":
    main()
