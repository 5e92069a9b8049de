"""Courses of training losses of real runs in which nothing explodes, for the tests of the judge of losses.

    python lab/experiments/record_losses.py                            # dev, kin and the zoo, on a GPU if there is one
    python lab/experiments/record_losses.py --workloads zoo100 --count 20 --out /tmp/few.npz

Each problem trains at the best fixed rate, at half of it, and by ``max_lr="auto"`` from a thousandth of it. Of the last
two the losses are recorded, unless weights were rolled back or the run ended at three times the loss of the best rate:
at the best rate itself losses may leap, and a leap is no false alarm. Two thirds of the courses are of workloads, the
rest of the zoo, evenly spread; of long runs the first 400 steps.

Those in tests/rollback/recorded.npz were recorded in this way with the prototype of the rule, on an H200.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from ablation import START, Problem, named, problem_of
from auto_runs import AutoRuns, Run
from checkout import ROOT
from real.bench import Validator
from real.score import scored_by
from real_lr import tidy
from stacked import Stack, Supply

OUT = ROOT / "tests" / "rollback" / "recorded.npz"
COUNT, LONGEST = 100, 400
REAL = 2 / 3
"""The part of the courses that are of workloads."""
WORST = 3.0
"""What the final loss may be over that of the best rate."""
SEED = 0


class Recorded(NamedTuple):
    """The losses of one run."""

    name: str
    steps: int
    """Of the whole run."""
    losses: np.ndarray
    """Of its first steps."""


def record(problem: Problem, device: torch.device) -> list[Recorded]:
    """The runs of a problem that ended well."""
    task, steps, rate = problem.build(), problem.steps, problem.rate
    stack = Stack(task, [SEED], 3, device)
    runs = [Run(steps, rate, searches=False), Run(steps, rate / 2, searches=False), Run(steps, START * rate)]
    auto_runs = AutoRuns(stack, problem.update(stack), [runs])
    step = auto_runs.train_step(Supply(task, [SEED], steps, device).batches)
    for t in range(1, steps + 1):
        step()
        auto_runs.end_rounds(t)
    scored = scored_by({"density": getattr(task, "density", False)})
    best, *others = map(scored, Validator(stack, stack.theta, graph=False)(stack.theta)[0].tolist())
    losses = auto_runs.losses[:LONGEST, 0].float().cpu().numpy()
    return [
        Recorded(f"{problem.name}, {how}", steps, losses[:, k])
        for k, (how, final) in enumerate(zip(("half the best rate", "auto"), others, strict=True), 1)
        if final < WORST * best and runs[k].rolled_back == 0
    ]


def chosen(found: Sequence[Recorded], count: int) -> list[Recorded]:
    """So many, evenly spread over the workloads and over the zoo."""
    zoo = [one for one in found if one.name.startswith("zoo/")]
    real = [one for one in found if not one.name.startswith("zoo/")]
    some = spread(real, min(len(real), round(REAL * count)))
    return [*some, *spread(zoo, min(len(zoo), count - len(some)))]


def spread(values: Sequence[Recorded], count: int) -> list[Recorded]:
    return [values[number * len(values) // count] for number in range(count)]


def write(path: Path, courses: Sequence[Recorded]) -> None:
    """One array of all losses, and where each course ends in it."""
    np.savez_compressed(
        path,
        names=np.array([one.name for one in courses]),
        steps=np.array([one.steps for one in courses]),
        ends=np.cumsum([len(one.losses) for one in courses]),
        losses=np.concatenate([one.losses for one in courses]).astype(np.float32),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", default="dev,kin,zoo", help="as those of ablation.py")
    parser.add_argument("--count", type=int, default=COUNT)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()
    torch.set_num_threads(1)  # a second thread on a busy core slows small tensors down by far
    found = []
    for problem in [problem_of(name) for name in named(given.workloads)]:
        found += record(problem, torch.device(given.device))
        print(f"{problem.name}: {len(found)} courses so far", flush=True)
        tidy()
    courses = chosen(found, given.count)
    write(given.out, courses)
    print(f"{given.out}: {len(courses)} courses, {given.out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
