"""From curves to scores, as AlgoPerf scores: pure functions, numbers in, numbers out.

A workload's *target* is 1.05 times the mean over seeds of what OneCycle at the best fixed rate (chosen on other seeds)
reaches at its end. A run's *time* is the first evaluation at the target, infinite if there is none. The *profile* of a
method, rho(tau), is the share of its runs whose time is at most tau times the fastest method's on the same workload and
seed; its *area* over tau from 1 to 4 is between 0 and 1.

A loss that is minus a logarithm of densities may be negative: exp(loss) takes its place, as perplexity does for texts.

Beside it, final losses over those of the tuned OneCycle. Losses count at most as much as the loss of the initial
weights: so a run that has failed is as bad as one that has learned nothing, and no mean is infinite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any, NamedTuple

import numpy as np

from real.labels import LABELS

SLACK, LONGEST = 1.05, 4.0
NEAR_RATE, NEAR_LOSS = 2.0, 1.01
"""Factors to the best rate, and to the loss that it reaches, within which a run is near the best."""
DRAWS = 10_000
"""Of workloads, for an interval."""
TUNED = "tuned"
"""The method that others are measured by."""

Curves = dict[float | None, list[list[float]]]
"""By start: losses [seed][evaluation]; a failed one is infinite."""


class Table(NamedTuple):
    """One workload."""

    name: str
    split: str
    evaluated: list[int]
    initial: float
    methods: dict[str, Curves]
    labels: dict[str, str]
    found: dict[str, dict[float | None, list[float]]]
    """The rate that runs found over the best one, by method and start: [seed]; NaN where there is none."""
    rules: Mapping[str, str] = {}
    """What the rule decided when a row of ours was measured, by method: provenance.library()."""


class Summary(NamedTuple):
    """One method over several workloads."""

    area: float
    """Of its profile."""
    ratio: float
    """Of final losses to the tuned OneCycle's: geometric mean over workloads and starts."""
    worst: float
    sensitivity: float | None
    """Mean excess of the final loss over the tuned one's, from all starts, as a part of it; None without starts."""
    spread: float
    """Standard deviation over seeds of the final loss as a part of it, mean over workloads and starts."""
    reached: float
    """Share of runs that come to the target."""
    near: float
    """Share of runs whose rate, or whose final loss, is near the best."""
    failed: int
    """Runs whose final loss is not finite."""
    runs: int


# Times ---------------------------------------------------------------------------------------------------------------


def target(finals: Sequence[float]) -> float:
    """What a run must reach, from the final losses of the tuned OneCycle.

    >>> target([1.0, 3.0])
    2.1
    """
    return SLACK * fmean(finals)


def steps_to_target(curve: Sequence[float], evaluated: Sequence[int], wanted: float) -> float:
    """The first evaluation at the target.

    >>> steps_to_target([3.0, 2.0, 1.0], [10, 20, 30], 2.0), steps_to_target([3.0, 2.0, 1.0], [10, 20, 30], 0.5)
    (20, inf)
    """
    return next((step for loss, step in zip(curve, evaluated, strict=True) if loss <= wanted), math.inf)


def slowdowns(tables: Sequence[Table], aside: Sequence[str] = ()) -> dict[str, list[float]]:
    """Per method, for each workload, seed and start: its time over the fastest method's; infinite where it has none.

    Only methods that every workload has. Those ``aside`` are measured too, but are never the fastest. Where none is
    ever at the target, all are infinite.
    """
    found: dict[str, list[float]] = {name: [] for name in _common(tables)}
    for table in tables:
        wanted = target([curve[-1] for curve in table.methods[TUNED][1.0]])
        times = {
            name: [[steps_to_target(curve, table.evaluated, wanted) for curve in rows] for rows in curves.values()]
            for name, curves in table.methods.items()
            if name in found
        }
        seeds = len(next(iter(times.values()))[0])
        judges = [row for name, rows in times.items() for row in rows if name not in aside]
        fastest = [min(row[u] for row in judges) for u in range(seeds)]
        for name, rows in times.items():
            found[name] += [_over(row[u], fastest[u]) for row in rows for u in range(seeds)]
    return found


def _over(time: float, fastest: float) -> float:
    return max(1.0, time / fastest) if math.isfinite(time) else math.inf


def profile(slow: Sequence[float], tau: float) -> float:
    """The share of runs at most ``tau`` times as slow as the fastest.

    >>> profile([1.0, 1.5, math.inf, 4.0], 2.0)
    0.5
    """
    return sum(value <= tau for value in slow) / len(slow)


def area(slow: Sequence[float], longest: float = LONGEST) -> float:
    """Under the profile from 1 to ``longest``, as a part of the whole.

    >>> area([1.0, 2.5, math.inf])
    0.5
    """
    return sum(max(0.0, longest - value) / (longest - 1) for value in slow) / len(slow)


# Final losses --------------------------------------------------------------------------------------------------------


def ratios(table: Table, method: str) -> dict[float | None, float]:
    """By start: the mean over seeds of the final loss over the tuned OneCycle's of the same seed."""
    tuned = _finals(table, table.methods[TUNED][1.0])
    return {
        start: fmean(loss / other for loss, other in zip(_finals(table, rows), tuned, strict=True))
        for start, rows in table.methods[method].items()
    }


def _finals(table: Table, rows: list[list[float]]) -> list[float]:
    return [min(curve[-1], table.initial) for curve in rows]


def near(table: Table, method: str) -> list[bool]:
    """For each start and seed: whether a rate within a factor 2 of the best was found, or a loss within 1 % of its."""
    tuned, found = _finals(table, table.methods[TUNED][1.0]), table.found.get(method, {})
    return [
        1 / NEAR_RATE <= rate <= NEAR_RATE or loss <= NEAR_LOSS * other
        for start, rows in table.methods[method].items()
        for rate, loss, other in zip(found.get(start, [math.nan] * len(rows)), _finals(table, rows), tuned, strict=True)
    ]


def geometric_mean(values: Sequence[float]) -> float:
    """
    >>> geometric_mean([1.0, 4.0])
    2.0
    """
    return math.exp(fmean(map(math.log, values)))


def summary(tables: Sequence[Table], method: str, slow: Sequence[float]) -> Summary:
    """All of a method, ``slow`` being its slowdowns."""
    found = [ratio for table in tables for ratio in ratios(table, method).values()]
    finals = [_finals(table, rows) for table in tables for rows in table.methods[method].values()]
    last = [curve[-1] for table in tables for rows in table.methods[method].values() for curve in rows]
    has_starts = any(len(table.methods[method]) > 1 for table in tables)
    return Summary(
        area=area(slow),
        ratio=geometric_mean(found),
        worst=max(found),
        sensitivity=fmean(found) - 1 if has_starts else None,
        spread=fmean(stdev(row) / fmean(row) if len(row) > 1 else math.nan for row in finals),
        reached=profile(slow, 1e300),
        near=fmean(one for table in tables for one in near(table, method)),
        failed=sum(not math.isfinite(loss) for loss in last),
        runs=len(last),
    )


# Files ---------------------------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    """Our final losses beside another method's, on the workloads that both have run."""

    workloads: int
    ours: float
    """Geometric mean over workloads and starts, over the tuned OneCycle's."""
    theirs: float
    worst: float
    """Theirs."""
    ratio: float
    """Ours over theirs."""
    interval: tuple[float, float]
    """Of the ratio: 95 % of the draws of as many workloads, with replacement."""
    ahead: int
    """On how many workloads ours is lower."""


def pair(tables: Sequence[Table], ours: str, theirs: str) -> Pair:
    """Two methods on the workloads that both have run. Each workload counts once, with the mean over its starts."""
    both = [table for table in tables if {ours, theirs} <= table.methods.keys()]
    own, other = ([geometric_mean([*ratios(table, name).values()]) for table in both] for name in (ours, theirs))
    logs = np.log(own) - np.log(other)
    drawn = np.random.default_rng(0).choice(logs, (DRAWS, len(logs))).mean(axis=1)
    low, high = np.exp(np.quantile(drawn, (0.025, 0.975)))
    return Pair(
        len(both),
        geometric_mean(own),
        geometric_mean(other),
        max(max(ratios(table, theirs).values()) for table in both),
        float(np.exp(logs.mean())),
        (float(low), float(high)),
        int((logs < 0).sum()),
    )


def table_of(content: Mapping[str, Any], starts: Sequence[float] = (1e-3, 1.0, 100.0)) -> Table:
    """A workload's file. OneCycle from its best rate is ``tuned``; from the given starts it is ``onecycle``."""
    methods: dict[str, Curves] = {}
    best, scored = content["best"]["rate"], scored_by(content)
    for name, row in content["rows"].items():
        curves = {cell["start"]: [[*map(scored, curve)] for curve in cell["curves"]] for cell in row["starts"]}
        if name == "onecycle":
            methods[TUNED] = {1.0: curves[1.0]}
            curves = {start: rows for start, rows in curves.items() if start in starts}
        methods[name] = curves
    labels = {name: LABELS[name] for name in content["rows"]}
    labels[TUNED], labels["onecycle"] = "OneCycle, tuned", "OneCycle, rate off"
    found = {
        name: {cell["start"]: [_or_nan(rate) / best for rate in cell["found"]] for cell in row["starts"]}
        for name, row in content["rows"].items()
    }
    head = (content["workload"], content["split"], content["evaluated"], scored(content["initial"]))
    rules = {name: row["library"] for name, row in content["rows"].items() if "library" in row}
    return Table(*head, methods, labels, found, rules)


def scored_by(content: Mapping[str, Any]) -> Callable[[float | None], float]:
    """What a loss of a workload's file counts: itself, or exp of it; one that is missing was not finite.

    >>> [scored_by({"density": True})(loss) for loss in (0.0, None)], scored_by({})(2.0)
    ([1.0, inf], 2.0)
    """

    def scored(loss: float | None) -> float:
        if loss is None:
            return math.inf
        return math.exp(min(loss, 700.0)) if content.get("density", False) else loss

    return scored


def _or_nan(rate: float | None) -> float:
    return math.nan if rate is None else rate


def _common(tables: Sequence[Table]) -> list[str]:
    """Methods that all workloads have, in the first one's order."""
    return [name for name in tables[0].methods if all(name in table.methods for table in tables)]
