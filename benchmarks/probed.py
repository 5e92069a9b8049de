"""What a probed fan-out adds to plain training on one device, and on eight ranks that share its points.

A byte-level GPT trains with torch's OneCycleLR and with hdet's, in blocks that take turns. hdet's rounds are one step
long here, so that the ends of rounds are timed, with 8 and with 3 points and a probe batch of a quarter of the step's;
one point costs the difference over five. A run of S steps has R rounds with a few snapshots each, and some forty steps
of take-off whose gradients are looked at. Once the loss has moved, a round of take-off has one point:

    overhead = (snapshots * a snapshot + looks * a look + the ends of rounds) / (S * a training step)

On eight ranks each evaluates one point. The 15 to 40 steps that are repeated after take-off are not in it.
"""

from __future__ import annotations

import time
from itertools import pairwise
from statistics import median

import torch
from harness import parser, show

import hdet
from hdet.algorithm.auto.constants import SNAPSHOTS
from hdet.algorithm.auto.rounds import Growing
from hdet.engine.probed.gradients import Gradients
from hdet.engine.probed.line import Line
from hdet.tasks import task_named

BLOCKS, BLOCK = 4, 6
LANDED, SEEN = 45, 21
"""Where take-off usually ends, and where the loss has moved in it."""
TARGETS = {
    "percent_8_points_S_2000": "<= 2 on one device",
    "percent_8_ranks_S_2000": "<= 0.5",
}


class Run:
    """One model in training, with a scheduler of torch or a probed one."""

    def __init__(self, points: int | None) -> None:
        self.task = task_named("text", batch_size=16)
        self.model = self.task.model(0)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        if points is None:
            self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 1e-3, total_steps=10_000)
        else:
            probe = hdet.ProbeBatch(self.model, self.task.loss, lambda k: self.task.probe(0, k))
            self.scheduler = hdet.OneCycleLR(
                self.optimizer, "auto", total_steps=10_000, probe=probe, points=points, sync_every=1, auto_lr_start=1
            )  # no take-off: every step ends a round
        self.batch = self.task.batch(0, 0)

    def train(self) -> float:
        """Seconds of forward, backward and update."""
        began = time.perf_counter()
        self.optimizer.zero_grad()
        self.task.loss(self.model, self.batch).backward()
        self.optimizer.step()
        return time.perf_counter() - began

    def schedule(self) -> float:
        """Seconds of the scheduler."""
        began = time.perf_counter()
        self.scheduler.step()
        return time.perf_counter() - began


def snapshot_seconds(run: Run) -> float:
    """Median seconds of what a step adds that ends no round: the snapshot."""
    line, took = Line(), []
    for _ in range(BLOCK):
        run.train()
        start = time.perf_counter()
        line.anchor_at(run.optimizer)
        line.add(run.optimizer, 1, 1)
        took.append(time.perf_counter() - start)
    return median(took)


def look_seconds(run: Run) -> float:
    """Median seconds of what a step of take-off adds that ends no round: the gradients along the way gone."""
    parameters = list(run.model.parameters())
    start, gradients = [p.detach().clone() for p in parameters], Gradients()
    took = []
    for _ in range(BLOCK):
        run.train()
        began = time.perf_counter()
        gradients.add(start, parameters, parameters, 1e-3)
        took.append(time.perf_counter() - began)
    return median(took)


def measured() -> dict[str, float]:
    """Seconds of the parts."""
    plain, probed = Run(None), {8: Run(8), 3: Run(3)}
    step: list[float] = []
    ends: dict[int, list[float]] = {points: [] for points in probed}
    for _ in range(BLOCKS):
        step += [plain.train() + plain.schedule() for _ in range(BLOCK)]
        for points, run in probed.items():
            for _ in range(3):
                run.train()
                ends[points].append(run.schedule())
    snapshot = snapshot_seconds(probed[8])
    slope = (median(ends[8]) - median(ends[3])) / 5
    return {
        "step": median(step),
        "snapshot": snapshot,
        "look": look_seconds(probed[8]),
        "end_8_points": median(ends[8]),
        "end_3_points": median(ends[3]),
        "end_1_point": median(ends[8]) - 7 * slope,
    }


def overhead(seconds: dict[str, float], end: str, steps: int) -> float:
    """Percent of a run of that many steps."""
    ends = Growing(steps, LANDED).ends
    alone = sum(SEEN < t <= LANDED for t in ends)
    snapshots = sum(min(b - a, SNAPSHOTS) for a, b in pairwise(ends) if a >= LANDED)
    between = snapshots * seconds["snapshot"] + LANDED * seconds["look"]
    at_ends = (len(ends) - alone) * seconds[end] + alone * seconds["end_1_point"]
    return 100 * (at_ends + between) / (steps * seconds["step"])


def main() -> None:
    arguments = parser(__doc__).parse_args()
    torch.set_num_threads(2)
    seconds = measured()
    result: dict[str, float] = {f"{name}_ms": 1000 * value for name, value in seconds.items()}
    for steps in (200, 600, 2000, 10_000):
        result[f"percent_8_points_S_{steps}"] = overhead(seconds, "end_8_points", steps)
        result[f"percent_3_points_S_{steps}"] = overhead(seconds, "end_3_points", steps)
        result[f"percent_8_ranks_S_{steps}"] = overhead(seconds, "end_1_point", steps)
    show(result, TARGETS, arguments.json)


if __name__ == "__main__":
    main()
