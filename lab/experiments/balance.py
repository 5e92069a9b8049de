"""What does the balance of the path tell of a fixed rate? The study behind ``balance`` of the rule's constants.

    python lab/experiments/balance.py --processes 16                # 2002 runs: a quarter of an hour on two cores
    python lab/experiments/balance.py --tasks tiny,flow

Small tasks and the zoo at 3^-3 to 3^3 times OneCycle's best rate, on the trapezoid of ``hdet.auto``, two seeds. A line
for each of four times of a run: the mean balance at the best rate of the seven, and the root mean square error of
log(best / rate) by a linear fit that has not seen the problem: of nothing, the balance, the prior (the length of a step
over the usual one), and both.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import checkout  # noqa: F401 - so that lab is found
import numpy as np
import torch
from shapes import trapezoid
from small import BROKEN, RESULTS, bests, middle, task_of
from small_problems import SMALL, model_of
from torch import Tensor
from zoo_problems import OPTIMIZERS, PROBLEMS

from hdet.rule.constants import DEFAULT

TIMES = (0.15, 0.3, 0.45, 0.6)
FACTORS = tuple(3.0**k for k in range(-3, 4))
SEEDS = (0, 1)
FURTHEST = 2.6
"""Runs whose rate is further from the best, in the logarithm, are not fitted."""


class Job(NamedTuple):
    """One run at a fixed peak rate."""

    task: str
    seed: int
    rate: float


class Outcome(NamedTuple):
    score: float
    seen: dict[int, tuple[float, float]]
    """By the number of the time: the balance, and the logarithm of the length of a step over the usual one."""


def run(job: Job) -> Outcome:
    """Every gradient is sampled, and all count the same."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    task, build = task_of(job.task)
    model, stream = model_of(task, job.seed), torch.Generator().manual_seed(100 + job.seed)
    optimizer, factors = build(model.parameters(), lr=job.rate), trapezoid(task.steps)
    weights = [p for p in model.parameters() if p.requires_grad]
    ends = {max(2, round(part * task.steps)): k for k, part in enumerate(TIMES)}
    start, total, absolute, rates, reach = _flat(weights), 0.0, 0.0, 0.0, math.nan
    seen: dict[int, tuple[float, float]] = {}
    for t in range(task.steps):
        for group in optimizer.param_groups:
            group["lr"] = job.rate * float(factors[t])
        loss = task.loss(model, task.draw(stream, task.batch))
        if not math.isfinite(float(loss.detach())):
            return Outcome(BROKEN, seen)
        optimizer.zero_grad()
        loss.backward()
        if len(seen) < len(TIMES):
            gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in weights]
            product = float(_flat(gradients) @ (start - _flat(weights)))
            total, absolute = total + product, absolute + abs(product)
        optimizer.step()
        rates += job.rate * float(factors[t])
        if t < DEFAULT.min_steps:
            reach = float((_flat(weights) - start).norm()) / rates
        if t + 1 in ends:
            usual = DEFAULT.prior_distance * task.steps**-DEFAULT.length_exponent
            length = max(reach * job.rate, 1e-30)
            seen[ends[t + 1]] = total / absolute if absolute > 0 else 0.0, math.log(length / usual)
    score = task.score(model)
    return Outcome(min(score, BROKEN) if math.isfinite(score) else BROKEN, seen)


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([one.detach().to_dense().flatten() for one in tensors]).double()


def best_of(rates: Sequence[float], losses: Sequence[float]) -> float:
    """log of the rate with the least loss, by the parabola through the three around it.

    >>> round(math.exp(best_of([1.0, 3.0, 9.0], [2.0, 1.0, 2.0])), 6)
    3.0
    """
    logs, k = np.log(losses), min(max(int(np.argmin(losses)), 1), len(losses) - 2)
    bend = logs[k - 1] - 2 * logs[k] + logs[k + 1]
    shift = 0.5 * (logs[k - 1] - logs[k + 1]) / bend if bend > 1e-9 else 0.0
    return math.log(rates[k]) + min(max(float(shift), -1.0), 1.0) * math.log(rates[k + 1] / rates[k])


def error(columns: Sequence[np.ndarray], target: np.ndarray, groups: np.ndarray) -> float:
    """Root mean square error of a linear fit, of each group by the others.

    >>> x = np.arange(6.0)
    >>> round(error([x], 2 * x + 1, np.array([0, 0, 1, 1, 2, 2])), 6)
    0.0
    """
    known, missed = np.stack([*columns, np.ones_like(target)], 1), np.zeros_like(target)
    for group in set(groups.tolist()):
        own = groups == group
        fit, *_ = np.linalg.lstsq(known[~own], target[~own], rcond=None)
        missed[own] = target[own] - known[own] @ fit
    return float(np.sqrt(np.mean(missed**2)))


def table(jobs: Sequence[Job], outcomes: Sequence[Outcome]) -> list[str]:
    """A line for each time."""
    scores: dict[str, dict[float, list[float]]] = {}
    for job, one in zip(jobs, outcomes, strict=True):
        scores.setdefault(job.task, {}).setdefault(job.rate, []).append(one.score)
    best = {name: best_of(sorted(rows), [middle(rows[rate]) for rate in sorted(rows)]) for name, rows in scores.items()}
    lines = ["time  balance at the best rate  error of log(best / rate) by nothing, balance, prior, both"]
    for k, part in enumerate(TIMES):
        rows: list[Any] = [
            (*one.seen[k], best[job.task] - math.log(job.rate), _problem(job.task))
            for job, one in zip(jobs, outcomes, strict=True)
            if k in one.seen and abs(best[job.task] - math.log(job.rate)) <= FURTHEST
        ]
        beta, length, off = (np.array([row[i] for row in rows]) for i in range(3))
        groups, near = np.array([row[3] for row in rows]), np.abs(off) < math.log(3) / 2
        fits = [error(columns, off, groups) for columns in ([], [beta], [length], [beta, length])]
        lines.append(
            f"{part:<4}  {beta[near].mean():5.2f} ± {beta[near].std():.2f}  " + " ".join(f"{x:.2f}" for x in fits)
        )
    return lines


def _problem(task: str) -> str:
    return task.split("/")[1] if "/" in task else task


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", help="some of them, with commas between; all by default, with the zoo")
    parser.add_argument("--processes", type=int, default=2)
    given = parser.parse_args(arguments)
    zoo = [f"zoo/{p}/{o}/{steps}" for steps in (100, 400) for p in PROBLEMS for o in OPTIMIZERS]
    names = given.tasks.split(",") if given.tasks else [*SMALL, *zoo]
    with multiprocessing.get_context("spawn").Pool(given.processes) as pool:
        found = bests(names, json.loads(RESULTS.read_text()), pool)
        jobs = [Job(name, seed, found[name][0] * factor) for name in names for seed in SEEDS for factor in FACTORS]
        outcomes = pool.map(run, jobs, chunksize=1)
    print("\n".join(table(jobs, outcomes)))


if __name__ == "__main__":
    main()
