"""The batch size changes in mid-run: what does ``hdet.auto`` do?

    python lab/benchmarks/batch_size.py --write      # three minutes on one core; writes results/batch_size.json
    python docs/make_results.py                      # the table of docs/questions/batch-size.md

Three networks on scikit-learn's handwritten digits, 400 steps. After half of them the batch of 64 becomes one of 16, 64
(nothing changes) or 256. Five ways:

    kept      the scheduler of hdet.auto goes on, and is told nothing
    anew      hdet.auto is built again at the change, for the steps that are left
    root      at the change the search ends: the rate found, times the square root of the change, on the same schedule
    linear    the same, times the change
    tuned     the schedule of hdet.auto at a fixed rate until the change, and at a multiple of it from then on: 1, the
              square root of the change, or the change. The best pair of a grid by the mean over the same seeds, which
              favours it. It is the measure

Figures are held-out losses over that of "tuned", geometric means over the seeds.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

import hdet
from lab.tasks import Batch, DigitsTask

RESULT = Path(__file__).parent / "results" / "batch_size.json"
STEPS, CHANGE, BATCH = 400, 200, 64
CHANGES = {"1": 1.0, "1/4": 0.25, "4": 4.0}
WAYS = ("kept", "anew", "root", "linear")
RATES = (1e-3, 3e-3, 0.01, 0.03, 0.1)
POWERS = (0.0, 0.5, 1.0)
"""The rate after the change: times the change of the batch to this power. 1/2 and 1 are the usual rules."""


class Problem(NamedTuple):
    layers: Callable[[], nn.Module]
    optimizer: Callable[..., Optimizer]
    rates: tuple[float, ...]


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def with_norms() -> nn.Module:
    hidden = [nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU()]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(64, 10))


def momentum(parameters: Iterator[nn.Parameter], lr: float) -> Optimizer:
    return SGD(parameters, lr, momentum=0.9)


PROBLEMS = {
    "two layers, Adam": Problem(two_layers, Adam, RATES),
    "two layers, SGD with momentum": Problem(two_layers, momentum, tuple(10 * rate for rate in RATES)),
    "three layers with LayerNorm, AdamW": Problem(with_norms, AdamW, RATES),
}


task = cache(DigitsTask)


@cache
def stream(seed: int, size: int) -> list[Batch]:
    """The batches of a run."""
    return [task(batch_size=size).batch(seed, step) for step in range(STEPS)]


class Ran(NamedTuple):
    loss: float
    before: float
    """The rate at the change, without the schedule."""
    after: float
    """The rate at the end, without the schedule."""


def shape(step: int) -> float:
    """The trapezoid of ``hdet.auto``."""
    up, fall = 0.3 * STEPS, 0.6 * STEPS
    if step < fall:
        return min((step + 1) / up, 1.0)
    return max(1 - math.sqrt((step - fall + 1) / (STEPS - fall)), 1e-6)


def train(problem: Problem, seed: int, change: float, way: str, rate: float = 1e-3, factor: float = 1.0) -> Ran:
    """One run. rate and factor are those of "tuned"; for the others rate is a guess."""
    batches = stream(seed, BATCH)[:CHANGE] + stream(seed, round(BATCH * change))[CHANGE:]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = problem.layers()
    optimizer = problem.optimizer(model.parameters(), lr=rate)
    scheduler = None if way == "tuned" else hdet.auto(optimizer, total_steps=STEPS)
    before = rate
    for step in range(STEPS):
        if scheduler is None:
            optimizer.param_groups[0]["lr"] = rate * shape(step) * (factor if step >= CHANGE else 1)
        elif step == CHANGE:
            before = scheduler.found.rate
            if way == "anew":
                scheduler = hdet.auto(optimizer, total_steps=STEPS - CHANGE)
            elif way in ("root", "linear"):
                rate, factor, scheduler = before, change ** (0.5 if way == "root" else 1), None
                optimizer.param_groups[0]["lr"] = rate * shape(step) * factor
        loss = task().loss(model, batches[step])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step(loss)
    loss_after = task().evaluate(model)["loss"]
    after = rate * factor if scheduler is None else scheduler.found.rate
    return Ran(loss_after if math.isfinite(loss_after) else math.inf, before, after)


def tuned(name: str, change: str, rates: Sequence[float], seeds: range) -> tuple[float, float, list[float]]:
    """The best rate and factor of a grid, and their losses."""
    times, grid = CHANGES[change], {}
    for rate, power in product(rates, POWERS if times != 1 else POWERS[:1]):
        factor = times**power
        grid[rate, factor] = [train(PROBLEMS[name], seed, times, "tuned", rate, factor).loss for seed in seeds]
    (rate, factor), losses = min(grid.items(), key=lambda item: fmean(item[1]))
    return rate, factor, losses


def row_of(name: str, change: str, rates: Sequence[float], seeds: range) -> dict[str, Any]:
    """What a change costs on a problem."""
    rate, factor, best = tuned(name, change, rates, seeds)
    row: dict[str, Any] = {"problem": name, "change": change, "best_rate": rate, "best_factor": factor, "tuned": best}
    for way in WAYS:
        runs = [train(PROBLEMS[name], seed, CHANGES[change], way) for seed in seeds]
        row[way] = {
            "losses": [run.loss for run in runs],
            "ratios": [run.loss / own for run, own in zip(runs, best, strict=True)],
            "factor": geometric_mean(run.after / run.before for run in runs),
            "rate": geometric_mean(run.after for run in runs),
        }
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--problems", nargs="+", choices=PROBLEMS, default=list(PROBLEMS))
    parser.add_argument("--write", type=Path, nargs="?", const=RESULT, help="a file for the figures")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", hdet.SearchWarning)  # a part of the result
    rows = []
    for name in args.problems:
        rates: Sequence[float] = PROBLEMS[name].rates
        for change in CHANGES:  # nothing changes first: after that only the best rate and its neighbours are tried
            row = row_of(name, change, rates, range(args.seeds))
            rows.append(row)
            found = [f"{way} {geometric_mean(row[way]['ratios']):.2f}, rate x{row[way]['factor']:.2g}" for way in WAYS]
            best = f"best {row['best_rate']:g}, then x{row['best_factor']:g}"
            print(f"{name}, batch x{change}: {'; '.join([*found, best])}", flush=True)
            if change == "1":
                place = rates.index(row["best_rate"])
                rates = rates[max(place - 1, 0) : place + 2]
    if args.write:
        command = "python lab/benchmarks/batch_size.py --write"
        known = {
            "command": command,
            "torch": torch.__version__,
            "steps": STEPS,
            "change": CHANGE,
            "batch": BATCH,
            "seeds": args.seeds,
            "rows": rows,
        }
        args.write.parent.mkdir(parents=True, exist_ok=True)
        args.write.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
