"""What lab/experiments/study.py has measured, as the tables of docs/study.md, and one of README.md.

python lab/experiments/study.py --table
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple, TypeVar

__all__ = [
    "CLOSE",
    "LABELS",
    "chosen_rate",
    "front",
    "mean_loss",
    "metric_table",
    "neighbours",
    "page",
    "rate_table",
    "table",
    "width",
]

Key = tuple[str, int | None]
"""A row and its T."""
T = TypeVar("T")

CLOSE = 0.02
"""Losses within this of a method's best count for its width."""
LABELS = {
    "plain": "plain data-parallel",
    "clipped": "plain, gradients clipped",
    "averaged": "plain, weights of the last tenth averaged",
    "shared": "HDET: shared gradients, spread, corrected",
    "placebo": "the same, losses shuffled",
    "arms": "gradients of their own (arms)",
    "arms-spread": "arms, spread",
    "arms-steered": "HDET with arms: spread, corrected",
    "arms-last": "arms in the last fifth only",
    "arms-first": "arms in the first fifth only",
    "auto": "`hdet.auto` on all ranks",
    "guard": "plain with `hdet.Guard`",
    "bytes": "plain, as many bytes as arms: fewer steps",
    "accumulated": "plain, as many bytes as arms: summed gradients",
}
HEADS = {"feed": "Feed", "text": "GPT", "movielens": "MovieLens"}
EACH, LOWEST = ("auto", "guard"), ("bytes", "accumulated")
"""Rows with a pass to themselves: a line for each rate, which is a guess or may be too high; for the best of all."""
CONTROL_OF = {"placebo": "shared"}
"""Whose rates a control has."""
RATE_OF = {**CONTROL_OF, "averaged": "plain"}
"""In whose runs of the grid a row's rate is chosen, if not in its own."""
T95 = {2: 12.706, 3: 4.303, 5: 2.776}
"""By how many standard errors a mean of so many may be off: Student's t, 95 %."""
TOO_HIGH = 8.0
"""Times the scan's best rate: the other half of the front page's table."""
SHARED = "HDET (`hdet.OneCycleLR`): shared gradients, each replica at its own rate"
OWN = "gradients of their own (`hdet.arms`), equal rates"
FRONT: Sequence[tuple[str, Key]] = (
    ("plain data-parallel", ("plain", None)),
    ("plain data-parallel, gradients clipped", ("clipped", None)),
    *((SHARED, ("shared", every)) for every in (20, 100, 1000)),
    ("control: HDET with the losses shuffled over the replicas", ("placebo", 20)),
    *((OWN, ("arms", every)) for every in (20, 100, 1000)),
    ("`hdet.auto` (a schedule of its own), from guesses of 1/10, 1 and 4 times the best rate", ("auto", None)),
)
"""The lines of the front page's table."""

CAPTION = (
    "Plain training's best rate of the scan is {best:.3g}. At multiples of it, the loss ÷ plain training's lowest, one "
    f"seed; within {100 * CLOSE:g} % of a line's own best in bold:"
)


class Line(NamedTuple):
    """A method and T at one rate, on fresh seeds."""

    key: Key
    run: Mapping[str, Any]
    beside: Sequence[Mapping[str, Any] | None] = ()
    """The same at the next lower and the next higher rate of its grid; None: has not been run."""


def page(folder: Path) -> str:
    """The tables of all tasks that have been run as far as their grid."""
    parts = []
    for one in _known(folder):
        made = [f"### {HEADS[one['task']]}", table(one), CAPTION.format(best=one["best"]), rate_table(one)]
        metrics = metric_table(one)
        parts += [*made, *(["By label, in the order of the first table:", metrics] if metrics else [])]
    return "\n\n".join(parts)


def front(folder: Path) -> str:
    """All tasks side by side, each line at its own best rate and at one that is too high; a dash: not run."""
    known = _known(folder)
    if not known:
        return "Nothing has been run as far as its grid."
    heads = [HEADS[one["task"]] for one in known]
    high = [f"{head}, {TOO_HIGH:g} times the rate" for head in heads]
    made = [
        f"| loss ÷ plain training's at its best rate | averaged every | {' | '.join(heads + high)} |",
        "| --- |" + " ---: |" * (1 + 2 * len(known)),
    ]
    for label, key in FRONT:
        cells = [_at_best(one, key) for one in known] + [_too_high(one, key) for one in known]
        made.append(f"| {label} | {f'{key[1]} steps' if key[1] else ''} | {' | '.join(cells)} |")
    return "\n".join(made)


def _known(folder: Path) -> list[dict[str, Any]]:
    files = [folder / f"{name}.json" for name in HEADS]
    known = [json.loads(file.read_text()) for file in files if file.exists()]
    return [one for one in known if any(run["pass"] == "grid" for run in one["runs"])]


def _at_best(content: Mapping[str, Any], key: Key) -> str:
    """The mean ratio to plain training's loss, seed by seed; of several guesses the lowest and the highest."""
    rows = lines(content["runs"])
    plain = _plain(rows)
    if plain is None:
        return "-"
    found = sorted({_ratio(line.run, plain) for line in rows if line.key == key})
    return " to ".join(found[:: max(1, len(found) - 1)]) or "-"


def _too_high(content: Mapping[str, Any], key: Key) -> str:
    """Of fresh seeds, in italics, where they have been run; of the grid's ÷ plain training's lowest, where not."""
    rate, plain = TOO_HIGH * content["best"], _plain(lines(content["runs"]))
    fresh = [run for run in content["runs"] if run["pass"] == "fresh" and (run["row"], run["T"]) == key]
    for run in fresh:
        if plain is not None and math.isclose(run["rate"], rate, rel_tol=1e-3):
            return f"*{_ratio(run, plain, digits=2)}*"
    lowest = min(_by_rate(content["runs"], "plain", None).values())
    near = [loss for tried, loss in _by_rate(content["runs"], *key).items() if math.isclose(tried, rate, rel_tol=1e-3)]
    return f"{near[0] / lowest:.2f}" if near else "-"


def table(content: Mapping[str, Any]) -> str:
    """A line for every method and T, at the rate that the grid chose."""
    runs, rows = content["runs"], lines(content["runs"])
    plain = _plain(rows)
    made = [
        "| method | T | rate ÷ the scan's best | loss | ÷ plain's, seed by seed (95 %) | at the rates beside it | "
        "its own width | crashed |",
        "| --- |" + " ---: |" * 7,
    ]
    for line in rows:
        (row, every), run = line.key, line.run
        cells = [LABELS[row], every or "", f"{run['rate'] / content['best']:.3g}", _spread(run["loss"])]
        cells += ["" if plain is None or run is plain else against(run, plain)]
        cells += [", ".join(_ratio(one, plain) if one else "-" for one in line.beside) if plain else ""]
        cells += [width(runs, row, every), f"{sum(run['crashed'])} of {len(run['crashed'])}"]
        made.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(made)


def rate_table(content: Mapping[str, Any]) -> str:
    """The losses of the grid: a line for every method and T, a column for each rate."""
    keys = dict.fromkeys((run["row"], run["T"]) for run in content["runs"] if run["pass"] == "grid")
    groups = {
        key: {float(f"{rate / content['best']:.3g}"): loss for rate, loss in _by_rate(content["runs"], *key).items()}
        for key in keys
    }
    factors = sorted({factor for key, row in groups.items() if key[0] != "plain" for factor in row})
    lowest = min(groups["plain", None].values())
    made = [
        f"| method | T | {' | '.join(f'× {factor:g}' for factor in factors)} |",
        "| --- |" + " ---: |" * (1 + len(factors)),
    ]
    for (key, every), row in _in_order(groups):
        close = (1 + CLOSE) * min(row.values())
        cells = [_cell(row[factor] / lowest, row[factor] <= close) if factor in row else "" for factor in factors]
        made.append(f"| {LABELS[key]} | {every or ''} | {' | '.join(cells)} |")
    return "\n".join(made)


def _cell(ratio: float, is_good: bool) -> str:
    return f"**{ratio:.3f}**" if is_good else f"{ratio:.3f}"


def metric_table(content: Mapping[str, Any]) -> str:
    """AUC and normalised entropy of each of its tasks, for the same lines; empty if it has none."""
    rows = lines(content["runs"])
    names = [name for name in (rows[0].run if rows else ()) if name.startswith(("auc_", "ne_", "rmse_"))]
    if not names:
        return ""
    heads = [name.replace("auc_", "AUC ").replace("ne_", "NE ").replace("rmse_", "RMSE ") for name in names]
    made = [f"| method | T | {' | '.join(head.replace('_', ' ') for head in heads)} |"]
    made.append("| --- |" + " ---: |" * (1 + len(names)))
    for line in rows:
        values = " | ".join(f"{mean_loss(line.run[name]):.4f}" for name in names)
        made.append(f"| {LABELS[line.key[0]]} | {line.key[1] or ''} | {values} |")
    return "\n".join(made)


def lines(runs: Sequence[Mapping[str, Any]]) -> list[Line]:
    """Of the fresh seeds, in the order of the labels."""
    groups: dict[Key, list[Mapping[str, Any]]] = {}
    for run in runs:
        if run["pass"] == (run["row"] if run["row"] in EACH + LOWEST else "fresh"):
            groups.setdefault((run["row"], run["T"]), []).append(run)
    found = []
    for key, rows in _in_order(groups):
        rows.sort(key=lambda run: run["rate"])
        if key[0] in EACH:
            found += [Line(key, run) for run in rows]
        else:
            by_rate, rate = {run["rate"]: run for run in rows}, chosen_rate(runs, key)
            beside = [by_rate.get(one) for one in neighbours(runs, key)]
            if rate in by_rate:  # if not, a grid that has grown has a new best, whose fresh seeds are to come
                found.append(Line(key, by_rate[rate], beside if any(beside) else ()))
    return found


def _plain(rows: Sequence[Line]) -> Mapping[str, Any] | None:
    """What all others are measured by, if it has been run."""
    return next((line.run for line in rows if line.key == ("plain", None)), None)


def chosen_rate(runs: Sequence[Mapping[str, Any]], key: Key) -> float:
    """The best of its grid."""
    return float(min(grid_of(runs, key), key=lambda run: mean_loss(run["loss"]))["rate"])


def neighbours(runs: Sequence[Mapping[str, Any]], key: Key) -> list[float]:
    """The next lower and the next higher rate of its grid to the best, as far as there are."""
    rates, best = sorted(run["rate"] for run in grid_of(runs, key)), chosen_rate(runs, key)
    place = rates.index(best)
    return [*rates[max(0, place - 1) : place], *rates[place + 1 : place + 2]]


def grid_of(runs: Sequence[Mapping[str, Any]], key: Key) -> list[Mapping[str, Any]]:
    """Runs among which a row's rate is chosen: of the grid, its own or those of what it controls; or its pass."""
    row = RATE_OF.get(key[0], key[0])
    stage = row if row in LOWEST else "grid"
    return [run for run in runs if (run["pass"], run["row"], run["T"]) == (stage, row, key[1])]


def against(run: Mapping[str, Any], plain: Mapping[str, Any]) -> str:
    """The mean ratio of its losses to plain training's on the same seeds, and an interval for it.

    >>> seeds = {"seeds": [0, 1, 2], "loss": [1.0, 2.0, 4.0]}
    >>> against({"seeds": [2, 0, 1], "loss": [8.0, 2.0, 4.0]}, seeds)
    '2.000 (2.000 to 2.000)'
    >>> against({"seeds": [0, 1], "loss": [1.0, None]}, seeds)
    'crashed'
    """
    logs, ratio = _logs(run, plain), _ratio(run, plain)
    if logs is None:
        return ratio
    middle, off = fmean(logs), T95[len(logs)] * stdev(logs) / math.sqrt(len(logs))
    return f"{ratio} ({math.exp(middle - off):.3f} to {math.exp(middle + off):.3f})"


def _ratio(run: Mapping[str, Any], plain: Mapping[str, Any], digits: int = 3) -> str:
    """The mean alone."""
    logs = _logs(run, plain)
    return "crashed" if logs is None else f"{math.exp(fmean(logs)):.{digits}f}"


def _logs(run: Mapping[str, Any], plain: Mapping[str, Any]) -> list[float] | None:
    """Of the ratios of its losses to plain training's on the same seeds; None if one of them is no number."""
    base = dict(zip(plain["seeds"], plain["loss"], strict=True))
    pairs = [(loss, base[seed]) for seed, loss in zip(run["seeds"], run["loss"], strict=True) if seed in base]
    if not all(loss and other and math.isfinite(loss + other) for loss, other in pairs):
        return None
    return [math.log(loss / other) for loss, other in pairs]


def width(runs: Sequence[Mapping[str, Any]], key: str, every: int | None) -> str:
    """The rates between which a method is close to its own best; "or more" if that is all of them on a side.

    >>> about = {"pass": "grid", "row": "arms", "T": 20}
    >>> grid = [{**about, "rate": rate, "loss": [loss]} for rate, loss in ((1, 3.0), (2, 1.99), (4, 2.0), (8, 3.0))]
    >>> width(grid, "arms", 20), width(grid[:3], "arms", 20), width(grid, "auto", None)
    ('factor 2', 'factor 2 or more', '')
    """
    rows = sorted(_by_rate(runs, key, every).items())
    if not rows:
        return ""
    best = min(loss for _, loss in rows)
    close = [rate for rate, loss in rows if loss <= (1 + CLOSE) * best]
    ends = close[0] == rows[0][0] or close[-1] == rows[-1][0]
    return f"factor {close[-1] / close[0]:.3g}{' or more' if ends else ''}"


def _by_rate(runs: Sequence[Mapping[str, Any]], row: str, every: int | None) -> dict[float, float]:
    """Losses of the grid; of the scan at rates that the grid does not have."""
    own = [run for run in runs if (run["row"], run["T"]) == (row, every)]
    return {run["rate"]: mean_loss(run["loss"]) for stage in ("scan", "grid") for run in own if run["pass"] == stage}


def mean_loss(values: Sequence[float | None]) -> float:
    """What is no number, which a file has as null, is worse than any loss."""
    return fmean(math.inf if value is None or value != value else value for value in values)


def _in_order(groups: Mapping[Key, T]) -> list[tuple[Key, T]]:
    """By label, then by T."""
    order = [*LABELS]
    return sorted(groups.items(), key=lambda item: (order.index(item[0][0]), item[0][1] or 0))


def _spread(losses: Sequence[float | None]) -> str:
    mean = mean_loss(losses)
    if not math.isfinite(mean):
        return "none"
    return f"{mean:.4f} ± {stdev(loss for loss in losses if loss is not None):.4f}"
