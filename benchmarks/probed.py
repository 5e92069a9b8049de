"""What finding the rate adds to plain training on one device, and on two ranks or more.

A byte-level GPT trains with torch's OneCycleLR and with hdet's, in blocks that take turns. Two things are timed: a
look, which is what each step adds until the schedule falls (the gradients along the way gone), and the end of a round,
with two losses of a probe batch of a quarter of the step's. A run of S steps has R rounds:

    overhead = (looks * a look + R * an end) / (S * a training step)

On two ranks or more each loss is evaluated by one of them. Steps that are repeated after going back are not in it.
"""

from __future__ import annotations

import time
from statistics import median

import torch
from harness import parser, show

import hdet
from hdet.algorithm.auto.rounds import Growing
from hdet.engine.probed.gradients import Gradients
from hdet.tasks import task_named

BLOCKS, BLOCK = 4, 6
LOOKS = 0.44
"""The part of a OneCycle run at whose end its schedule has fallen to 0.9 of the peak."""
TARGETS = {"percent_S_2000": "<= 2 on one device"}


class Run:
    """One model in training, with a scheduler of torch or a probed one."""

    def __init__(self, probed: bool) -> None:
        self.task = task_named("text", batch_size=16)
        self.model = self.task.model(0)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self.scheduler: torch.optim.lr_scheduler.OneCycleLR
        if probed:
            probe = hdet.ProbeBatch(self.model, self.task.loss, lambda k: self.task.probe(0, k))
            self.scheduler = hdet.OneCycleLR(self.optimizer, "auto", total_steps=10_000, probe=probe)
        else:
            self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 1e-3, total_steps=10_000)
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
    """Median seconds of what a step adds that ends no round."""
    parameters = list(run.model.parameters())
    start, gradients = [p.detach().clone() for p in parameters], Gradients()
    took = []
    for _ in range(BLOCK):
        run.train()
        began = time.perf_counter()
        gradients.add(start, parameters, parameters, 1e-3)
        took.append(time.perf_counter() - began)
    return median(took)


def probe_seconds(run: Run) -> float:
    """Median seconds of one loss."""
    probe = hdet.ProbeBatch(run.model, run.task.loss, lambda k: run.task.probe(0, k))
    took = []
    for _ in range(BLOCK):
        began = time.perf_counter()
        probe()
        took.append(time.perf_counter() - began)
    return median(took)


def measured() -> dict[str, float]:
    """Seconds of the parts."""
    plain, probed, ends = Run(False), Run(True), Growing(10_000)
    step: list[float] = []
    took: list[float] = []
    for block in range(BLOCKS):
        step += [plain.train() + plain.schedule() for _ in range(BLOCK)]
        for t in range(block * BLOCK, (block + 1) * BLOCK):
            probed.train()
            seconds = probed.schedule()
            took += [seconds] if ends.ends_at(t + 1) and t > 2 else []  # earlier there are no weights of a round ago
    end = median(took)
    return {
        "step": median(step),
        "look": look_seconds(plain),
        "end": end,
        "end_2_ranks": end - probe_seconds(plain),
    }


def overhead(seconds: dict[str, float], end: str, steps: int) -> float:
    """Percent of a run of that many steps."""
    added = LOOKS * steps * seconds["look"] + len(Growing(steps).ends) * seconds[end]
    return 100 * added / (steps * seconds["step"])


def main() -> None:
    arguments = parser(__doc__).parse_args()
    torch.set_num_threads(2)
    seconds = measured()
    result: dict[str, float] = {f"{name}_ms": 1000 * value for name, value in seconds.items()}
    for steps in (200, 600, 2000, 10_000):
        result[f"percent_S_{steps}"] = overhead(seconds, "end", steps)
        result[f"percent_2_ranks_S_{steps}"] = overhead(seconds, "end_2_ranks", steps)
    show(result, TARGETS, arguments.json)


if __name__ == "__main__":
    main()
