"""Every row of the table: how a workload is trained, what comes out of it.

All rows see as many samples: plain training has the whole batch in every step, K arms a K-th of it each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from shapes import onecycle
from stacked import Batch, Supply, TrainStep

from hdet.ensemble.controller import Corrected
from hdet.ensemble.normalised import Normalised
from knobs.arms import Arms
from knobs.groups import Method
from knobs.stack import KnobBench

__all__ = ["METHODS", "PLAIN", "STARTS", "Row", "bench_of", "choose", "explored", "plain"]

STARTS = (0.1, 1.0, 10.0)
"""Guesses over the best value, on the knob's own scale."""
PLAIN = "plain"
SPREAD, PUBLISHED_SPREAD = math.log(2), 1 / 9
GRID = math.sqrt(10)
"""From one value of the grid to the next."""

_PROBED = Method("normalised, probe at mean weights", Normalised(), "mean", SPREAD)
METHODS = {
    "local": Method("K arms, averaged, no divergence"),
    "spread": _PROBED._replace(label="K arms, factor 2, the value stays", controller=None),
    "published": Method("corrected controller", Corrected(), "train", PUBLISHED_SPREAD),
    "normalised": _PROBED,
    "normalised-wide": _PROBED._replace(label="the same, factor 3", spread=math.log(3)),
    "normalised-long": _PROBED._replace(label="the same, 15 rounds", rounds=15),
    "placebo": _PROBED._replace(label="the same, signals shuffled", shuffled=True),
    "population": Method("population-based training", None, "last", SPREAD, rounds=25, population=True),
}


class Row(NamedTuple):
    """What came out of a row, for each start."""

    curves: list[list[list[float]]]
    """Validation losses [start][seed][evaluation]."""
    found: list[list[float]]
    """Values at the end [start][seed]."""
    paths: list[list[list[float]]]
    """Values [start][seed][round], the starts first; empty where they are fixed."""
    samples: int
    """That a run was trained on, those that came again included."""
    seconds: float
    """Of all runs that trained together with this row."""


def plain(bench: KnobBench, values: Sequence[float]) -> Row:
    """Data-parallel training with fixed values."""
    stack = bench.stack(len(values))
    stack.values.copy_(stack.values.new_tensor(values).expand_as(stack.values))
    rates = bench.rates(stack, [bench.customary] * len(values), onecycle(bench.steps))
    step = TrainStep(stack, bench.update(stack), bench.supply.batches, rates, graph=bench.graph)
    curves, seconds = bench.train(stack, step)
    found = [[value] * len(bench.seeds) for value in values]
    return Row(curves, found, [], _samples(bench, bench.supply.batches, 1), seconds)


def explored(bench: KnobBench, values: Sequence[float], names: Sequence[str], arms: int) -> dict[str, Row]:
    """Rows of K arms, from each of some guesses."""
    methods = {name: METHODS[name] for name in names}
    columns = [(method, value) for method in methods.values() for value in values]
    stack = bench.stack(len(columns), each=arms)
    optimizer = bench.update(stack)
    group = Arms(bench, stack, optimizer, columns, arms)
    batches = bench.supply.dealt(arms)
    rates = bench.rates(stack, [bench.customary] * len(columns), onecycle(bench.steps))
    step = TrainStep(stack, optimizer, batches, rates, after=group.observe, graph=bench.graph)
    group.begin()
    curves, seconds = bench.train(stack, step, group.after_step, group.weights)
    samples, found = _samples(bench, batches, arms), {}
    paths = [[row[c] for row in group.paths] for c in range(len(columns))]
    for number, name in enumerate(methods):
        own = slice(number * len(values), (number + 1) * len(values))
        last = [[path[-1] for path in row] for row in paths[own]]
        found[name] = Row(curves[own], last, paths[own], samples, seconds)
    return found


def _samples(bench: KnobBench, batches: Batch, arms: int) -> int:
    """Samples that one run of ``arms`` arms has seen at its end."""
    return bench.steps * arms * batches[0].shape[2]


def choose(bench: KnobBench, points: int, extensions: int = 2) -> dict[str, Any]:
    """The grid of fixed values, widened where its best lies on an edge; the best by the mean over these seeds."""
    knob, half = bench.task.knob, points // 2
    losses: dict[float, list[float]] = {}
    wanted = [knob.times(knob.centre, GRID**i) for i in range(-half, half + 1)]
    for _ in range(extensions + 1):
        new = [value for value in dict.fromkeys(wanted) if value not in losses]
        if not new:
            break
        losses |= {v: [curve[-1] for curve in row] for v, row in zip(new, plain(bench, new).curves, strict=True)}
        losses = dict(sorted(losses.items()))
        best = min(losses, key=lambda value: _mean(losses[value]))
        if min(losses) < best < max(losses):
            break
        way = 1 / GRID if best == min(losses) else GRID
        wanted = [knob.times(best, way**i) for i in range(1, half + 1)]
    return {
        "grid": {"values": list(losses), "losses": list(losses.values())},
        "best": {"value": best, "on_edge": best in (min(losses), max(losses))},
    }


def _mean(losses: list[float]) -> float:
    mean = sum(losses) / len(losses)
    return mean if math.isfinite(mean) else math.inf


def bench_of(workload: Any, seeds: Sequence[int], steps: int, synthetic: bool, how: dict[str, Any]) -> KnobBench:
    """Where a workload is trained; ``how``: device, graph and evaluations."""
    task = workload.task(synthetic)
    supply = Supply(task, seeds, steps, how["device"])
    return KnobBench(task, workload.optimizer, workload.rate, steps, seeds, supply, **how)
