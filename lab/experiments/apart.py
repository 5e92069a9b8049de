"""Arms that train apart and meet every H steps: what do they lose against DDP, and what do they save?

    python lab/experiments/real_lr.py --workloads kin --rows onecycle                 # first: the best inner rates
    python lab/experiments/apart.py --workloads shakespeare-gpt-1000 --seconds 500    # all rows that the file lacks
    python lab/experiments/apart.py --settings 4x20 --rows local,grid --inner 0.333,3
    python lab/experiments/apart.py --table

K arms deal out the batch of plain training, so all rows see the same samples, and train as rows of one stack. They keep
their optimizers' moments, as in DiLoCo, and meet every H steps and at the end. The library had outer steps until they
were measured here, and a rule that finds the outer rate: decision 022 has its figures. One JSON file per workload in
results/apart; what it has is not run again, unless ``--again``. Bytes and seconds are computed, not measured: weights
in fp32 by a ring all-reduce, which moves 2 (K - 1) / K of them per arm.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import real_lr
import torch
from provenance import commit
from real.bench import Bench
from real.ledger import best_rate, save
from real.score import scored_by
from real.workloads import WORKLOADS
from real_lr import RESULTS as REAL
from real_lr import Workbench, tidy
from shapes import onecycle
from stacked import Stack, TrainStep
from torch import Tensor

RESULTS = Path(__file__).parent / "results" / "apart"
DEFAULT = ("shakespeare-gpt-1000", "fashion-vit-momentum", "mnist-resnet-1500")
GRID = (0.1, 0.2, 0.35, 0.5, 0.7, 0.85, 1.0, 1.2, 1.5)
SEEDS = 5
LINKS = {"10 Gb/s": 1.25e9, "100 Mb/s": 1.25e7}
"""Bytes a second."""


class Method(NamedTuple):
    """A column of the stack."""

    label: str
    rate: float = 1.0
    momentum: float = 0.0
    shares: bool = False
    """Whether the arms share gradients at every step."""


METHODS = {
    "ddp": Method("DDP", shares=True),
    "local": Method("local SGD (mean)"),
    "diloco": Method("DiLoCo, Nesterov 0.7 / 0.9", 0.7, 0.9),
    **{f"grid{rate:g}": Method(f"outer rate {rate:g}", rate) for rate in GRID},
}
ROWS = ("ddp", "local", "diloco", "grid")


class Setting(NamedTuple):
    """K arms that meet every H steps. A single arm with outer steps is 1xH."""

    arms: int
    every: int

    @classmethod
    def named(cls, word: str) -> Setting:
        """
        >>> Setting.named("4x20")
        Setting(arms=4, every=20)
        """
        arms, every = word.split("x")
        return cls(int(arms), int(every))

    def meets(self, t: int, steps: int) -> bool:
        return t % self.every == 0 or t == steps


SETTINGS = {"4x20": ROWS, "1x20": ROWS[:3], "8x20": ROWS[:3], "4x100": ROWS[:3]}
"""And the rows that each has."""


class Apart:
    """The arms of a stack [seed and arm, column, parameter], and the outer steps of every column.

    Args:
        stack: its rows are the arms of each seed, one after the other.
        methods: of the columns.
        setting: how many arms, and when they meet.
        steps: of the run.
    """

    def __init__(self, stack: Stack, methods: Sequence[Method], setting: Setting, steps: int) -> None:
        self._stack, self._setting, self._steps = stack, setting, steps
        theta = stack.theta
        self._shares = torch.tensor([method.shares for method in methods], device=theta.device)[:, None]
        self._momentum = torch.tensor([method.momentum for method in methods]).to(theta)[:, None]
        self._rate = torch.tensor([method.rate for method in methods]).to(theta)[:, None]
        self.last = self.mean()
        self._velocity = torch.zeros_like(self.last)

    def _arms(self, rows: Tensor) -> Tensor:
        return rows.unflatten(0, (-1, self._setting.arms))

    def mean(self) -> Tensor:
        """The mean of the arms [seed, column, parameter]."""
        return self._arms(self._stack.theta).mean(1)

    def share(self, gradient: Tensor) -> Tensor:
        """One gradient for all arms, in the columns that share it."""
        arms = self._arms(gradient)
        return torch.where(self._shares, arms.mean(1, keepdim=True), arms).flatten(0, 1)

    @torch.no_grad()
    def after_step(self, t: int) -> None:
        """Make the outer steps, if the arms meet now."""
        if not self._setting.meets(t, self._steps):
            return
        v, d = self._velocity, self.last - self.mean()
        v.mul_(self._momentum).add_(d)
        step = torch.where(self._momentum > 0, d + self._momentum * v, d)
        self.last -= self._rate * step
        self._arms(self._stack.theta).copy_(self.last[:, None])


def run_setting(
    bench: Bench, setting: Setting, methods: Mapping[str, Method], peak: float, inner: Sequence[float]
) -> tuple[int, dict[str, dict[str, Any]]]:
    """Parameters; and by method and inner rate the final losses [seed]."""
    columns = [(name, factor) for factor in inner for name in methods]
    stack = bench.stack(len(columns), each=setting.arms)
    apart = Apart(stack, [methods[name] for name, _ in columns], setting, bench.steps)
    rates = bench.rates(stack, [peak * factor for _, factor in columns], onecycle(bench.steps))
    batches = bench.supply.dealt(setting.arms)
    step = TrainStep(stack, bench.update(stack), batches, rates, apart.share, graph=bench.graph)
    curves, seconds = bench.train(stack, step, apart.after_step, apart.mean)
    found: dict[str, dict[str, Any]] = {}
    for place, (name, factor) in enumerate(columns):
        row = {"losses": [curve[-1] for curve in curves[place]], "seconds": seconds}
        found.setdefault(name, {})[f"{factor:g}"] = row
    return stack.theta.shape[-1], found


# What is sent --------------------------------------------------------------------------------------------------------


def sent(method: Method, setting: Setting, steps: int, parameters: int) -> float:
    """Bytes that an arm puts on its link in the whole run.

    >>> setting = Setting(4, 20)
    >>> sent(METHODS["ddp"], setting, 100, 1000), sent(METHODS["local"], setting, 100, 1000)
    (600000.0, 30000.0)
    """
    meetings = steps if method.shares else sum(setting.meets(t, steps) for t in range(1, steps + 1))
    return meetings * 2 * (setting.arms - 1) / setting.arms * 4.0 * parameters


# Running -------------------------------------------------------------------------------------------------------------


@dataclass
class Plan(real_lr.Plan):
    """What to run."""

    settings: list[str] = field(default_factory=list)
    inner: list[float] = field(default_factory=list)
    """Factors on the best inner rate."""


def run_workload(plan: Plan, workload: Any, real: Path = REAL) -> dict[str, Any]:
    """The settings of which the file lacks something, a stack for each. Written after every one."""
    path = plan.folder / f"{workload.name}.json"
    workbench = Workbench(plan, workload)
    peak = workload.customary if plan.synthetic else best_rate(real, workload.name)
    head = {
        "workload": workload.name,
        "optimizer": workload.optimizer,
        "steps": workbench.steps,
        "seeds": len(plan.seeds),
        "peak": float(f"{peak:.6g}"),
        "samples": plan.samples,
        "synthetic": plan.synthetic,
        "density": getattr(workbench.task, "density", False),
    }
    there = json.loads(path.read_text()) if path.exists() else {}
    content = there if {name: there.get(name) for name in head} == head else {**head, "settings": {}}
    for word in plan.settings:
        has = content["settings"].get(word, {})
        for factors, methods in _wanted(plan, word, has):
            if time.time() > plan.until:
                print(f"{workload.name} {word}: no time left", flush=True)
                return content
            bench, began = workbench.scoring, time.perf_counter()
            content["initial"] = bench.initial()
            content["parameters"], found = run_setting(bench, Setting.named(word), methods, peak, factors)
            own = content["settings"].setdefault(word, {})
            for name, rows in found.items():
                own.setdefault(name, {}).update(rows)
            save(path, {**content, "commit": commit()})
            tidy()
            print(f"{workload.name} {word} {len(methods)} rows: {time.perf_counter() - began:.1f} s", flush=True)
    return content


def _wanted(plan: Plan, word: str, has: Mapping[str, Any]) -> Iterable[tuple[list[float], dict[str, Method]]]:
    """Inner rates and the methods that the file lacks at them; what lacks the same is run together."""
    stacks: dict[tuple[str, ...], list[float]] = {}
    rows = [row for row in plan.rows if row in SETTINGS.get(word, ROWS)]
    asked = [name for name in METHODS if name in rows or ("grid" in rows and name.startswith("grid"))]
    for factor in plan.inner:
        names = tuple(name for name in asked if plan.again or f"{factor:g}" not in has.get(name, {}))
        stacks.setdefault(names, []).append(factor)
    return [(factors, {name: METHODS[name] for name in names}) for names, factors in stacks.items() if names]


# The table -----------------------------------------------------------------------------------------------------------


class Line(NamedTuple):
    """A method at one setting and one inner rate."""

    label: str
    loss: float
    """Over DDP's at the same inner rate, mean over seeds."""
    error: float
    """Its standard error, seed by seed."""
    best: float
    """Over the best of the grid, the same way; NaN without a grid."""
    best_error: float
    bytes: float
    """Over DDP's."""
    seconds: dict[str, float]


def lines_of(content: Mapping[str, Any], word: str, factor: str) -> list[Line]:
    """What a file has of one setting at one inner rate; DDP must be there."""
    has = {name: rows[factor] for name, rows in content["settings"][word].items() if factor in rows}
    if "ddp" not in has:
        return []
    scored, setting = scored_by(content), Setting.named(word)
    most = scored(content["initial"])  # one that has failed is as bad as one that has learned nothing
    losses = {name: [min(scored(loss), most) for loss in row["losses"]] for name, row in has.items()}
    grid = [name for name in losses if name.startswith("grid")]
    best = min(grid, key=lambda name: fmean(losses[name])) if grid else None
    lines = []
    for name in METHODS:
        if name not in has:
            continue
        to_ddp, to_best = _ratio(losses[name], losses["ddp"]), _ratio(losses[name], losses[best or name])
        own = sent(METHODS[name], setting, content["steps"], content["parameters"])
        whole = sent(METHODS["ddp"], setting, content["steps"], content["parameters"])
        lines.append(
            Line(
                METHODS[name].label,
                *to_ddp,
                *(to_best if best else (math.nan, math.nan)),
                own / whole if whole else math.nan,
                {link: own / speed for link, speed in LINKS.items()},
            )
        )
    return lines


def _ratio(losses: Sequence[float], others: Sequence[float]) -> tuple[float, float]:
    """
    >>> _ratio([2.0, 4.0], [1.0, 2.0])
    (2.0, 0.0)
    """
    ratios = [a / b for a, b in zip(losses, others, strict=True)]
    return fmean(ratios), stdev(ratios) / math.sqrt(len(ratios)) if len(ratios) > 1 else math.nan


def show(folder: Path) -> str:
    """The tables of all files."""
    text = []
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text())
        for word, rows in content["settings"].items():
            for factor in sorted({factor for row in rows.values() for factor in row}, key=float):
                lines = lines_of(content, word, factor)
                text += [f"\n{content['workload']}, K x H = {word}, inner rate {factor} of the best\n"] if lines else []
                text += [markdown(lines)] if lines else []
    return "\n".join(text)


def markdown(lines: Sequence[Line]) -> str:
    links = [f"seconds on {link}" for link in LINKS]
    heads = ["method", "loss / DDP's", "loss / best of grid", "bytes / DDP's", *links]
    text = [f"| {' | '.join(heads)} |", "| --- |" + " ---: |" * (len(heads) - 1)]
    for line in lines:
        cells = [f"{line.loss:.4f} ± {line.error:.4f}", f"{line.best:.4f} ± {line.best_error:.4f}", f"{line.bytes:.3f}"]
        cells += [f"{line.seconds[link]:.3g}" for link in LINKS]
        text.append(f"| {' | '.join([line.label, *cells])} |")
    return "\n".join(text)


# The command line ----------------------------------------------------------------------------------------------------


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", default=",".join(DEFAULT), help="names of workloads")
    parser.add_argument("--rows", default=",".join(ROWS), help=f"some of {','.join(ROWS)}")
    parser.add_argument("--settings", default=",".join(SETTINGS), help="K x H, for instance 4x20")
    parser.add_argument("--inner", default="1", help="factors on the best inner rate, for instance 0.333,1,3")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--steps", type=int, help="cut runs to so many steps")
    parser.add_argument("--samples", type=int, help="cut batches to so many samples")
    parser.add_argument("--synthetic", action="store_true", help="stand-ins of the same shapes; customary inner rates")
    parser.add_argument("--again", action="store_true", help="run rows again that the files have")
    parser.add_argument("--table", action="store_true", help="print what the files say, and run nothing")
    parser.add_argument("--seconds", type=float, help="begin no stack after so many seconds")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no-graph", action="store_true", help="no CUDA graphs")
    given = parser.parse_args(words)
    if given.table:
        print(show(given.results))
        return
    names, rows = given.workloads.split(","), given.rows.split(",")
    if not {*names} <= {*WORKLOADS}:
        parser.error(f"--workloads must be some of {','.join(WORKLOADS)}, but got {given.workloads}")
    if not {*rows} <= {*ROWS}:
        parser.error(f"--rows must be some of {','.join(ROWS)}, but got {given.rows}")
    torch.set_num_threads(1)  # a second thread on a busy core slows small tensors down by far
    plan = Plan(
        names,
        rows,
        given.results,
        torch.device(given.device),
        settings=given.settings.split(","),
        inner=[float(word) for word in given.inner.split(",")],
        seeds=list(range(given.seeds)),
        evaluations=2,
        longest=given.steps,
        samples=given.samples,
        synthetic=given.synthetic,
        again=given.again,
        graph=not given.no_graph,
        until=time.time() + given.seconds if given.seconds else math.inf,
    )
    for name in names:
        run_workload(plan, WORKLOADS[name])


if __name__ == "__main__":
    main()
