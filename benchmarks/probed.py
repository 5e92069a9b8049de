"""What finding the rate adds to plain training: ``max_lr="auto"`` beside torch's OneCycleLR, on one device.

A byte-level GPT trains with both, in blocks that take turns. hdet's rounds are one step long here, so that their ends
are timed: two losses of a probe batch of a quarter of the step's, the way gone, a copy of weights and optimizer state
in host memory. Until the schedule falls every step has its gradient looked at. In a run of S steps with R rounds:

    overhead = (R * the end of a round + looks * a look) / (S * a training step)

Where there are two ranks or more, each evaluates one loss at most. Steps that are repeated where training went back are
not in it.
"""

from __future__ import annotations

import math
import time
from statistics import median

import torch
from harness import parser, show

import hdet
from hdet.algorithm.auto import constants as c
from hdet.algorithm.auto.rounds import Growing, _growing_ends
from hdet.engine.probed.gradients import Gradients
from hdet.tasks import task_named

BLOCKS, BLOCK = 4, 6
TOTAL, PCT_START = 10_000, 0.3
TARGETS = {"percent_S_2000": "<= 2"}


class Run:
    """One model in training, with a scheduler of torch or with one that finds the rate."""

    def __init__(self, auto: bool) -> None:
        self.task = task_named("text", batch_size=16)
        self.model = self.task.model(0)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self.probe = hdet.ProbeBatch(self.model, self.task.loss, lambda k: self.task.probe(0, k))
        if auto:
            self.scheduler = hdet.OneCycleLR(self.optimizer, "auto", TOTAL, probe=self.probe)
        else:
            self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 1e-3, TOTAL)
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


def look_seconds(run: Run) -> float:
    """Median seconds of what a step adds that ends no round: the gradients along the way gone."""
    parameters = list(run.model.parameters())
    start, gradients = [p.detach().clone() for p in parameters], Gradients()
    took = []
    for _ in range(BLOCK):
        run.train()
        began = time.perf_counter()
        gradients.add(start, parameters, parameters, 1e-3)
        took.append(time.perf_counter() - began)
    return median(took)


def loss_seconds(run: Run) -> float:
    """Median seconds of one loss of the probe batch."""
    took = []
    for _ in range(BLOCK):
        began = time.perf_counter()
        run.probe()
        took.append(time.perf_counter() - began)
    return median(took)


def measured() -> dict[str, float]:
    """Seconds of the parts."""
    was = c.SHORT, c.GROWING
    c.SHORT, c.GROWING = 1, 0.0  # every step ends a round
    plain, auto = Run(auto=False), Run(auto=True)
    step: list[float] = []
    ends: list[float] = []
    try:
        for _ in range(BLOCKS):
            step += [plain.train() + plain.schedule() for _ in range(BLOCK)]
            for _ in range(BLOCK):
                auto.train()
                ends.append(auto.schedule())
    finally:
        c.SHORT, c.GROWING = was
        _growing_ends.cache_clear()
    end, loss = median(ends), loss_seconds(auto)
    return {"step": median(step), "look": look_seconds(plain), "end": end, "loss": loss, "end_two_ranks": end - loss}


def falls_at(steps: int) -> float:
    """The step at which the schedule has fallen so far that nothing is raised any more."""
    top = PCT_START * steps - 1
    return top + (steps - 1 - top) * math.acos(2 * c.FALLING - 1) / math.pi


def overhead(seconds: dict[str, float], end: str, steps: int) -> float:
    """Percent of a run of that many steps."""
    ends = Growing(steps).ends
    looks = next(t for t in ends if t >= falls_at(steps))
    return 100 * (len(ends) * seconds[end] + looks * seconds["look"]) / (steps * seconds["step"])


def main() -> None:
    arguments = parser(__doc__).parse_args()
    torch.set_num_threads(2)
    seconds = measured()
    result: dict[str, float] = {f"{name}_ms": 1000 * value for name, value in seconds.items()}
    for steps in (200, 600, 2000, 10_000):
        result[f"percent_S_{steps}"] = overhead(seconds, "end", steps)
        result[f"percent_two_ranks_S_{steps}"] = overhead(seconds, "end_two_ranks", steps)
    show(result, TARGETS, arguments.json)


if __name__ == "__main__":
    main()
