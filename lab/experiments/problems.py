"""A problem that searches are tried on: what trains, how long, and at which fixed rate it trains best."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from auto_runs import AutoRuns, Run
from real.bench import Validator
from real.ledger import best_rate as fixed_rate
from real.optimizers import update_of
from real.workloads import WORKLOADS
from real_lr import RESULTS as REAL
from stacked import Optimizer, Stack, Supply
from zoo import best_rate
from zoo_stack import UPDATES, ZooTask

ZOO = Path(__file__).parent / "results" / "zoo.json"


@dataclass
class Problem:
    """What trains."""

    name: str
    steps: int
    rate: float
    """The best fixed one."""
    build: Callable[[], Any]
    """The task."""
    update: Callable[[Stack], Optimizer]


def problem_of(name: str, real: Path = REAL, zoo: Path = ZOO) -> Problem:
    """A workload, or ``zoo/PROBLEM/OPTIMIZER/STEPS``, and its best rate."""
    if name.startswith("zoo/"):
        _, problem, optimizer, steps = name.split("/")
        rate = best_rate(json.loads(zoo.read_text()), problem, optimizer, int(steps))
        build, update = lambda: ZooTask(problem), lambda stack: UPDATES[optimizer](stack.theta)
        return Problem(name, int(steps), rate, build, update)
    workload = WORKLOADS[name]
    update = lambda stack: update_of(workload.optimizer, stack)  # noqa: E731
    return Problem(name, workload.steps, fixed_rate(real, name), workload.task, update)


def losses_of(
    problem: Problem,
    task: Any,
    seeds: Sequence[int],
    supply: Supply,
    runs: Sequence[Sequence[Run]],
    device: torch.device,
    graph: bool = True,
    after: Callable[[int], None] | None = None,
) -> tuple[float, list[list[float]]]:
    """Train ``runs[seed][column]`` to their end: the first weights' loss, and the final ones [column][seed].

    ``after(t)``: work between steps.
    """
    stack = Stack(task, seeds, len(runs[0]), device)
    auto_runs = AutoRuns(stack, problem.update(stack), runs)
    first = stack.theta[:, :1]
    initial = Validator(stack, first, graph=False)(first).mean().item()
    step = auto_runs.train_step(supply.batches, graph)
    for t in range(1, runs[0][0].steps + 1):
        step()
        auto_runs.end_rounds(t)
        if after is not None:
            after(t)
    return initial, Validator(stack, stack.theta, graph=False)(stack.theta).T.tolist()
