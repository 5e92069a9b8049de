"""The rule with other constants on real data: final losses over OneCycle at its best rate, all in one stack.

    python lab/experiments/changed_rule.py --workloads dev,kin --change estimate_weight=0.3 prior_weight=0
    python lab/experiments/changed_rule.py --workloads dev,kin --change rise=0.2,hold=0.3

Beside the rule's constants, the shares of the run in which the schedule rises, and until which it is held, may change.
One JSON line for each workload: ``[ratio, rate found over the best]`` of the rule as it is and with each change, from
1/1000 of the best rate, geometric means over three seeds. ``--part 0/6``: every sixth workload, for processes side by
side.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence

import torch
from auto_runs import Run
from real.workloads import WORKLOADS
from shapes import HOLD, PEAK, falling, onecycle
from small import constants_of, middle
from stacked import Supply

from problems import losses_of, problem_of

START = 1e-3
WORST = 1e6


def compared(name: str, changes: Sequence[str], seeds: Sequence[int], device: torch.device) -> dict[str, list[float]]:
    """Ratios of losses and of rates, by change."""
    problem = problem_of(name)
    task = problem.build()
    supply = Supply(task, seeds, problem.steps, device)

    def columns() -> list[Run]:
        fixed = Run(problem.steps, problem.rate, searches=False, shape=onecycle)
        return [fixed, *(_run(problem.steps, problem.rate * START, change) for change in changes)]

    runs = [columns() for _ in seeds]
    _, finals = losses_of(problem, task, seeds, supply, runs, device, graph=device.type == "cuda")
    is_density = getattr(task, "density", False)

    def score(losses: Sequence[float]) -> float:
        scores = [math.exp(min(loss, 50.0)) if is_density else loss for loss in losses]
        return middle(min(one, WORST) if math.isfinite(one) else WORST for one in scores)

    return {
        change: [score(finals[k]) / score(finals[0]), middle(row[k].found for row in runs) / problem.rate]
        for k, change in enumerate(changes, 1)
    }


def _run(steps: int, guess: float, change: str) -> Run:
    pairs = dict(pair.split("=") for pair in change.split(",") if pair)
    rise, hold = (float(pairs.pop(name, usual)) for name, usual in (("rise", PEAK), ("hold", HOLD)))
    constants = constants_of(",".join(f"{name}={value}" for name, value in pairs.items()))
    return Run(steps, guess, rise=rise, shape=falling(hold), constants=constants)


def part_of(workloads: str, part: str, splits: Sequence[str] = ("dev", "kin", "seen")) -> list[str]:
    """The part ``i/k`` of some workloads, given by names or splits with commas between, of these splits.

    >>> part_of("dev,kjv-gpt", "0/3"), part_of("dev,kjv-gpt", "0/3", ["dev"])
    (['fashion-vit', 'shakespeare-gru', 'kjv-gpt'], ['fashion-vit', 'shakespeare-gru'])
    """
    asked, (first, parts) = workloads.split(","), map(int, part.split("/"))
    return [w.name for w in WORKLOADS.values() if w.split in splits and {w.name, w.split} & {*asked}][first::parts]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", default="dev,kin", help="names or splits; test is not run here")
    parser.add_argument("--change", nargs="*", default=[], help="constants of the rule, as name=value,name=value")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--part", default="0/1")
    parser.add_argument("--seconds", type=float, default=math.inf, help="no workload is begun after so many")
    given = parser.parse_args(arguments)
    began, device = time.monotonic(), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for name in part_of(given.workloads, given.part):
        if time.monotonic() - began > given.seconds:
            print(json.dumps({"workload": name, "left out": "no time"}), flush=True)
            continue
        found = compared(name, ["", *given.change], range(given.seeds), device)
        shown = {change or "as it is": [round(one, 3) for one in row] for change, row in found.items()}
        print(json.dumps({"workload": name, **shown}), flush=True)


if __name__ == "__main__":
    main()
