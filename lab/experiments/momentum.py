"""Should ``max_lr="auto"`` cycle the momentum, as torch's OneCycleLR does? The same searches with and without.

    python lab/experiments/momentum.py            # minutes on one H200; writes results/momentum.json
    python lab/experiments/momentum.py --table
    python lab/experiments/momentum.py --workloads zoo/function/adam/100 --results momentum.json    # seconds on a core

The workloads of *dev* and *kin* whose optimizer has a momentum that torch cycles (Adam, AdamW, SGD with momentum),
three seeds, guesses of 1/1000 and 100 times the best rate. *constant*: 0.9, as the optimizers have it. *cycled*: as
``cycle_momentum=True`` does in a search, 0.85 while the rate climbs, then from the peak on along a cosine to 0.95.
*onecycle*: torch's OneCycle at the best rate, momentum constant and cycled. Score: final validation loss over that of
OneCycle at the best rate with a constant momentum.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, geometric_mean, stdev
from typing import Any

import torch
from ablation import Problem, losses_of, named, problem_of
from auto_runs import Run
from provenance import commit, library, versions
from real.ledger import save
from real.optimizers import AdamW, Nesterov
from real_lr import tidy
from stacked import Adam, Momentum, Stack
from supply import Supply
from torch import Tensor

RESULTS = Path(__file__).parent / "results" / "momentum.json"
LOW, HIGH, PEAK = 0.85, 0.95, 0.3
"""torch's defaults: the momentum at the peak and at the end, and where the peak is."""
STARTS = (1e-3, 100.0)
SEEDS = (0, 1, 2)


def momentum_at(step: Tensor, steps: int) -> Tensor:
    """The momentum of a search at a step, counted from 1.

    >>> [round(float(momentum_at(torch.tensor(t), 100)), 3) for t in (1, 30, 65, 100)]
    [0.85, 0.85, 0.9, 0.95]
    """
    part = ((step - PEAK * steps) / ((1 - PEAK) * steps)).clamp(0.0, 1.0)
    return HIGH + (LOW - HIGH) * 0.5 * (1 + torch.cos(math.pi * part))


class CycledAdam(AdamW):
    """AdamW, or Adam where the decay is 0, whose first beta is cycled."""

    def __init__(self, theta: Tensor, steps: int, decay: float) -> None:
        super().__init__(theta, decay)
        self._steps = steps

    def direction(self, gradient: Tensor) -> Tensor:
        self.count += 1
        beta = momentum_at(self.count, self._steps)
        self.first.mul_(beta).add_(gradient * (1 - beta))
        self.second.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
        denominator = (self.second / (1 - 0.999**self.count)).sqrt_().add_(1e-8)
        return (self.first / (1 - beta**self.count)).div_(denominator)


class CycledMomentum(Momentum):
    """SGD whose momentum is cycled; also Nesterov's, with its decay."""

    def __init__(self, theta: Tensor, steps: int, nesterov: bool, decay: float) -> None:
        super().__init__(theta)
        self.count = torch.zeros(*theta.shape[:2], 1, device=theta.device, dtype=theta.dtype)
        self._steps, self._nesterov, self._decay = steps, nesterov, decay

    @property
    def state(self) -> list[Tensor]:
        return [self.velocity, self.count]

    def direction(self, gradient: Tensor) -> Tensor:
        self.count += 1
        beta = momentum_at(self.count, self._steps)
        self.velocity.mul_(beta).add_(gradient)
        return gradient + beta * self.velocity if self._nesterov else self.velocity

    def step_(self, theta: Tensor, gradient: Tensor, rate: Tensor) -> None:
        super().step_(theta, gradient.add(theta, alpha=self._decay), rate)


def cycled(problem: Problem) -> Callable[[Stack], Any] | None:
    """The problem's optimizer with a cycled momentum; None if torch would not cycle it."""

    def make(stack: Stack) -> Any:
        plain = problem.update(stack)
        if isinstance(plain, Momentum) and plain.momentum > 0:
            decay = plain.decay if isinstance(plain, Nesterov) else 0.0
            return CycledMomentum(stack.theta, problem.steps, isinstance(plain, Nesterov), decay)
        if type(plain) in (Adam, AdamW):
            return CycledAdam(stack.theta, problem.steps, getattr(plain, "decay", 0.0))
        return None

    return make if make(Stack(problem.build(), [0], 1, torch.device("cpu"))) is not None else None


def run_problem(problem: Problem, device: torch.device) -> dict[str, Any] | None:
    """Losses by way, start and seed."""
    make = cycled(problem)
    if make is None:
        return None
    began, task = time.perf_counter(), problem.build()
    supply = Supply(task, SEEDS, problem.steps, device)
    found: dict[str, Any] = {}
    for way, update in (("constant", problem.update), ("cycled", make)):
        columns = [lambda: Run(problem.steps, problem.rate, searches=False)]
        columns += [lambda start=start: Run(problem.steps, start * problem.rate) for start in STARTS]
        runs = [[column() for column in columns] for _ in SEEDS]
        _, losses = losses_of(dataclasses.replace(problem, update=update), task, SEEDS, supply, runs, device)
        found[way] = {"onecycle": losses[0], **{f"{s:g}": row for s, row in zip(STARTS, losses[1:], strict=True)}}
        tidy()
    print(f"{problem.name}: {time.perf_counter() - began:.1f} s", flush=True)
    return {"steps": problem.steps, **found}


def scores(row: dict[str, Any]) -> dict[str, float]:
    """Geometric means over seeds and starts, over OneCycle with a constant momentum."""
    best = row["constant"]["onecycle"]
    found = {"onecycle, cycled": geometric_mean(a / b for a, b in zip(row["cycled"]["onecycle"], best, strict=True))}
    for way in ("constant", "cycled"):
        ratios = [a / b for start in STARTS for a, b in zip(row[way][f"{start:g}"], best, strict=True)]
        found[way] = geometric_mean(ratios)
    return found


def table(content: dict[str, Any]) -> str:
    """In Markdown, and the mean difference with its standard error."""
    lines = ["| workload | constant | cycled | OneCycle, cycled |", "| --- | ---: | ---: | ---: |"]
    rows = {name: scores(row) for name, row in content["workloads"].items()}
    for name, row in rows.items():
        lines.append(f"| {name} | {row['constant']:.3f} | {row['cycled']:.3f} | {row['onecycle, cycled']:.3f} |")
    means = [geometric_mean(row[way] for row in rows.values()) for way in ("constant", "cycled", "onecycle, cycled")]
    lines.append("| **mean** | " + " | ".join(f"{mean:.3f}" for mean in means) + " |")
    ratios = [math.log(row["cycled"] / row["constant"]) for row in rows.values()]
    error = stdev(ratios) / math.sqrt(len(ratios)) if len(ratios) > 1 else math.nan
    return "\n".join([*lines, "", f"log(cycled / constant): {fmean(ratios):+.4f} ± {error:.4f}"])


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", default="dev,kin")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no workload after so many")
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args(words)
    content: dict[str, Any] = {"workloads": {}}
    if given.results.exists():
        content = json.loads(given.results.read_text())
    if not given.table:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        until = time.monotonic() + given.seconds
        for name in reversed(named(given.workloads)):
            if name in content["workloads"] or time.monotonic() > until:
                continue
            row = run_problem(problem_of(name), device)
            if row is not None:
                content["workloads"][name] = row
                save(given.results, {**content, "commit": commit(), "library": library(), **versions(device)})
    print(table(content))


if __name__ == "__main__":
    main()
