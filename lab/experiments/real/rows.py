"""The rows of a workload's table. Rows that can share a stack train in one pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import geometric_mean
from typing import Any, NamedTuple

import numpy as np
import torch
from auto_runs import AutoRuns, Run
from shapes import Factors, onecycle
from stacked import TrainStep
from stacked_replicas import Column, Method, StackedReplicas

from hdet.ensemble.controller import Corrected
from hdet.ensemble.design import default_length
from real.bench import Bench, Outcome
from real.calibrated import chosen, trained
from real.peers import PEERS, SCHEDULE_FREE, Greedy, missing, schedule_free_rates
from real.together import run_together

REPLICAS, ALPHA = 4, 1 / 9
"""Of HDET."""
STARTS = (1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0)
FEW = (1e-3, 1.0, 100.0)
"""Of methods that are asked for less: ours, its controls, GreedyLR and HDET."""
EXTENSIONS, ADDED = 9, 2
"""How often a grid whose best is on its edge is widened, and by how many rates."""


class Best(NamedTuple):
    """What the choosing seeds have chosen."""

    rate: float
    """Of OneCycle."""
    free: float | None
    """Of Schedule-Free; None without the package."""


Found = dict[str, Outcome | str]
"""Rows by name; a text says why there is none."""


class Pass(NamedTuple):
    """Rows that train together."""

    rows: list[str]
    """Their names in ``real.labels.LABELS``."""
    run: Callable[[Bench, Best, Sequence[float], Sequence[float], list[str]], Found]
    """Given the bench, the best rates, all starts, few starts and the rows that are wanted."""


# Choosing ------------------------------------------------------------------------------------------------------------


def choose(bench: Bench, points: int, extensions: int = EXTENSIONS) -> dict[str, Any]:
    """OneCycle on a grid of rates a factor 2 apart around the customary one, and Schedule-Free on five rates.

    The grid is widened until its best is not on its edge, on no seed and not in the mean, at most so often.
    """
    last = replace(bench, evaluations=1)
    half = points // 2
    places = list(range(-half, points - half))
    free = schedule_free_rates(bench.optimizer) if missing("schedulefree") is None else []
    together = run_together(last, [bench.customary * 2.0**i for i in places], onecycle(bench.steps), free=free)
    losses = dict(zip(places, _finals(together.own), strict=True))
    chosen = _widened(last, losses, extensions)
    if free and "schedulefree" not in together.broken:
        tried = _finals(together.others["schedulefree"])
        chosen["grid"]["schedulefree"] = {"rates": free, "losses": tried}
        chosen["best"]["schedulefree"] = free[_least(dict(enumerate(tried)))]
    return chosen


def widened(bench: Bench, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """What was chosen earlier, with its grid widened as far as it has to be."""
    grid, best = chosen["grid"], chosen["best"]
    places = [round(math.log2(rate / bench.customary)) for rate in grid["rates"]]
    found = _widened(replace(bench, evaluations=1), dict(zip(places, _numbers(grid), strict=True)), EXTENSIONS)
    return {"grid": {**grid, **found["grid"]}, "best": {**best, **found["best"]}}


def is_on_edge(grid: Mapping[str, Any]) -> bool:
    """Whether a grid's lowest loss is at its first or last rate, on a seed or in the mean.

    >>> is_on_edge({"losses": [[3.0, 3.0], [1.0, 2.0], [2.0, 1.9]]}), is_on_edge({"losses": [[3.0], [1.0], [None]]})
    (True, False)
    """
    losses = _numbers(grid)
    return bool({0, len(losses) - 1} & _lowest(dict(enumerate(losses))))


def _numbers(grid: Mapping[str, Any]) -> list[list[float]]:
    """[rate][seed]; a file has null for what is not finite."""
    return [[math.inf if one is None else one for one in row] for row in grid["losses"]]


def _widened(last: Bench, losses: dict[int, list[float]], extensions: int) -> dict[str, Any]:
    for _ in range(extensions):
        lowest = _lowest(losses)
        if min(losses) in lowest:
            more = range(min(losses) - ADDED, min(losses))
        elif max(losses) in lowest:
            more = range(max(losses) + 1, max(losses) + 1 + ADDED)
        else:
            break
        added = run_together(last, [last.customary * 2.0**i for i in more], onecycle(last.steps))
        losses = dict(sorted({**losses, **dict(zip(more, _finals(added.own), strict=True))}.items()))
    best = _least(losses)
    return {
        "grid": {"rates": [last.customary * 2.0**i for i in losses], "losses": list(losses.values())},
        "best": {"rate": last.customary * 2.0**best, "on_edge": best in (min(losses), max(losses))},
    }


def _lowest(losses: Mapping[int, Sequence[float]]) -> set[int]:
    """The places that are lowest on a seed or in the mean."""
    seeds = range(len(next(iter(losses.values()))))
    return {_least(losses), *(_least({place: [row[seed]] for place, row in losses.items()}) for seed in seeds)}


def _finals(curves: list[list[list[float]]]) -> list[list[float]]:
    return [[curve[-1] for curve in row] for row in curves]


def _least(losses: Mapping[int, Sequence[float]]) -> int:
    """Where the mean over seeds is lowest."""
    means = {place: sum(row) / len(row) for place, row in losses.items()}
    return min(means, key=lambda place: means[place] if math.isfinite(means[place]) else math.inf)


# The range test that people run before training -------------------------------------------------------------------

LOW, HIGH, STEPS = 1e-7, 10.0, 100
SMOOTHING, STOP = 0.98, 4.0


def range_test(bench: Bench) -> list[float]:
    """The rate that a range test suggests, for each seed; the customary rate if it suggests none.

    As Lightning's ``lr_find``: the rate grows from tiny to huge until smoothed losses are four times their best; the
    suggestion is the rate at which they fall most steeply. The steps of the test are not charged to the run.
    """
    steps = min(STEPS, max(bench.steps // 10, 8))
    rates = LOW * (HIGH / LOW) ** (np.arange(steps) / (steps - 1))
    stack = bench.stack(1)
    table = torch.from_numpy(rates).to(stack.theta)[:, None, None, None]
    table = table.repeat(1, len(bench.seeds), 1, len(stack.sizes))
    step = TrainStep(stack, bench.update(stack), bench.supply.batches, table, graph=bench.graph)
    losses = []
    for _ in range(steps):
        step()
        losses.append(step.losses[:, 0].clone())
    found = [suggestion(rates, row) for row in torch.stack(losses, 1).double().tolist()]
    return [bench.customary if rate is None else rate for rate in found]


def suggestion(rates: Factors, losses: Sequence[float]) -> float | None:
    """The rate where the smoothed loss falls most steeply; None where too little of it is finite.

    The first tenth of the test and its last point do not count.
    """
    curve = smoothed(losses)
    skipped = len(losses) // 10
    kept = [(rate, loss) for rate, loss in zip(rates, curve, strict=False)][skipped:-1]
    kept = [(rate, loss) for rate, loss in kept if math.isfinite(loss)]
    if len(kept) < 2:
        return None
    slopes = np.gradient(np.array([loss for _, loss in kept]))
    return float(kept[int(slopes.argmin())][0])


def smoothed(losses: Sequence[float]) -> list[float]:
    """The exponential mean without its bias, until it is four times its best.

    >>> [round(value, 6) for value in smoothed([2.0, 2.0, 1000.0, 2.0])]
    [2.0, 2.0]
    """
    mean, best, found = 0.0, math.inf, []
    for count, loss in enumerate(losses, 1):
        mean = SMOOTHING * mean + (1 - SMOOTHING) * loss
        value = mean / (1 - SMOOTHING**count)
        if not value <= STOP * best:
            break
        best = min(best, value)
        found.append(value)
    return found


# Passes --------------------------------------------------------------------------------------------------------------


def fixed(bench: Bench, best: Best, starts: Sequence[float], few: Sequence[float], wanted: list[str]) -> Found:
    """OneCycle at the best rate and away from it, at the customary one, and at what a range test suggests."""
    seeds = len(bench.seeds)
    peaks: dict[str, list[list[float]]] = {}
    if "onecycle" in wanted:
        peaks["onecycle"] = [[start * best.rate] * seeds for start in starts]
    if "customary" in wanted:
        peaks["customary"] = [[bench.customary] * seeds]
    if "finder" in wanted:
        peaks["finder"] = [range_test(bench)]
    columns = [column for rows in peaks.values() for column in rows]  # [column][seed]
    stack = bench.stack(len(columns))
    rates = bench.rates(stack, [list(row) for row in zip(*columns, strict=True)], onecycle(bench.steps))
    step = TrainStep(stack, bench.update(stack), bench.supply.batches, rates, graph=bench.graph)
    curves, seconds = bench.train(stack, step)
    found: Found = {}
    first = 0
    for name, rows in peaks.items():
        own = [*starts] if name == "onecycle" else [None]
        found[name] = Outcome(own, curves[first : first + len(rows)], rows, seconds)
        first += len(rows)
    return found


def peers(bench: Bench, best: Best, starts: Sequence[float], few: Sequence[float], wanted: list[str]) -> Found:
    """What other people propose: one stack for all of them."""
    packages = {name: method.package for name, method in PEERS.items()}
    packages |= {"greedy": "transformers", "schedulefree": "schedulefree", "schedulefree-tuned": "schedulefree"}
    found: Found = {name: why for name in wanted if (why := missing(packages[name])) is not None}
    there = [name for name in wanted if name not in found]
    default = SCHEDULE_FREE.get(bench.optimizer, 2.5e-3)
    free = {"schedulefree": default, "schedulefree-tuned": best.free or default}
    free = {name: rate for name, rate in free.items() if name in there}
    guesses = [start * best.rate for start in few] if "greedy" in there else []
    try:
        rule = Greedy(guesses, len(bench.seeds)) if guesses else None
    except AttributeError as error:  # a transformers of before 5.4
        found["greedy"], rule, guesses = f"transformers: {error}", None, []
    methods = [name for name in there if name in PEERS]
    if not (free or methods or rule):
        return found
    out = run_together(bench, guesses, onecycle(bench.steps) * 0 + 1, methods, list(dict.fromkeys(free.values())), rule)
    if rule is not None:
        last = [list(row) for row in zip(*rule.rates, strict=True)]
        found["greedy"] = Outcome([*few], out.own, last, out.seconds)
    columns = dict(zip(dict.fromkeys(free.values()), out.others.get("schedulefree", []), strict=True))
    for name, rate in free.items():
        note = out.broken.get("schedulefree", "")
        found[name] = Outcome([None], [columns[rate]], [[rate] * len(bench.seeds)], out.seconds, note)
    nothing = [[math.nan] * len(bench.seeds)]
    for name in methods:
        found[name] = Outcome([None], out.others[name], nothing, out.seconds, out.broken.get(name, ""))
    return found


def calibrated(bench: Bench, best: Best, starts: Sequence[float], few: Sequence[float], wanted: list[str]) -> Found:
    """AdamW and NadamW at the setting that was chosen on *dev*."""
    settings = chosen()
    found: Found = {name: "run real_calibrate.py first" for name in wanted if name not in settings}
    there = [name for name in wanted if name in settings]
    if there:
        curves, seconds = trained(bench, [settings[name] for name in there])
        nothing = [[math.nan] * len(bench.seeds)]  # the best rate is of another optimizer
        found |= {name: Outcome([None], [rows], nothing, seconds) for name, rows in zip(there, curves, strict=True)}
    return found


def auto(bench: Bench, best: Best, starts: Sequence[float], few: Sequence[float], wanted: list[str]) -> Found:
    """``hdet.auto`` from some guesses: as it is, without losses, and with coins for what it sees."""
    columns = [(name, start * best.rate) for name in wanted for start in few]

    def run(seed: int, name: str, guess: float) -> Run:
        placebo = f"{seed} {guess:g}" if name == "placebo" else None
        return Run(bench.steps, guess, losses=name != "auto-alone", placebo=placebo)

    stack = bench.stack(len(columns))
    runs = [[run(seed, *column) for column in columns] for seed in bench.seeds]
    auto_runs = AutoRuns(stack, bench.update(stack), runs)
    curves, seconds = bench.train(stack, auto_runs.train_step(bench.supply.batches, bench.graph), auto_runs.end_rounds)
    rates = [[row[k].found for row in runs] for k in range(len(columns))]
    found: Found = {}
    for number, name in enumerate(wanted):
        own = slice(number * len(few), (number + 1) * len(few))
        found[name] = Outcome([*few], curves[own], rates[own], seconds)
    return found


def published(bench: Bench, best: Best, starts: Sequence[float], few: Sequence[float], wanted: list[str]) -> Found:
    """HDET with the corrected controller: four replicas of a quarter of the batch each; their mean is evaluated."""
    method = Method("HDET, corrected", True, ALPHA, lambda seed: Corrected())
    columns = [Column("published", method, default_length(bench.steps), start * best.rate) for start in few]
    stack = bench.stack(len(columns), each=REPLICAS)
    optimizer = bench.update(stack)
    runs = StackedReplicas(stack, optimizer, columns, REPLICAS, bench.steps, bench.seeds)
    batches = bench.supply.dealt(REPLICAS)
    step = TrainStep(stack, optimizer, batches, runs.rates, runs.share, after=runs.observe, graph=bench.graph)
    runs.begin()
    curves, seconds = bench.train(stack, step, runs.after_step, runs.consensus)
    found = [[one.rate * geometric_mean(row[c].learned) for row in runs.runs] for c, one in enumerate(columns)]
    return {"published": Outcome([*few], curves, found, seconds)}


PASSES: tuple[Pass, ...] = (
    Pass(["onecycle", "customary", "finder"], fixed),
    Pass(["auto", "auto-alone", "placebo"], auto),
    Pass(["adamw-calibrated", "nadamw-calibrated"], calibrated),
    Pass(["schedulefree", "schedulefree-tuned", *PEERS, "greedy"], peers),
    Pass(["published"], published),  # under this key in the files
)
