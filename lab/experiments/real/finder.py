"""The range test that people run before training: the rate grows from tiny to huge, and the loss says where to stop.

As Lightning's ``lr_find``: losses are smoothed, the test stops where they are four times their best, and the suggestion
is the rate at which they fall most steeply. The steps of the test are not charged to the run that follows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from shapes import Factors
from stacked import TrainStep

from real.bench import Bench

LOW, HIGH, STEPS = 1e-7, 10.0, 100
SMOOTHING, STOP = 0.98, 4.0


def range_test(bench: Bench) -> list[float]:
    """The suggestion for each seed; the customary rate where there is none."""
    steps = min(STEPS, max(bench.steps // 10, 8))
    rates = LOW * (HIGH / LOW) ** (np.arange(steps) / (steps - 1))
    stack = bench.stack(1)
    table = torch.from_numpy(rates).to(stack.theta)[:, None, None, None]
    table = table.repeat(1, len(bench.seeds), 1, len(stack.sizes))
    step = TrainStep(stack, bench.update(stack), bench.supply.batches, table, graph=bench.graph)
    losses = []
    for _ in range(steps):
        step()
        losses.append(step.losses[:, 0].clone())
    found = [suggestion(rates, row) for row in torch.stack(losses, 1).double().tolist()]
    return [bench.customary if rate is None else rate for rate in found]


def suggestion(rates: Factors, losses: Sequence[float]) -> float | None:
    """The rate where the smoothed loss falls most steeply; None where too little of it is finite.

    The first tenth of the test and its last point do not count.
    """
    curve = smoothed(losses)
    skipped = len(losses) // 10
    kept = [(rate, loss) for rate, loss in zip(rates, curve, strict=False)][skipped:-1]
    kept = [(rate, loss) for rate, loss in kept if math.isfinite(loss)]
    if len(kept) < 2:
        return None
    slopes = np.gradient(np.array([loss for _, loss in kept]))
    return float(kept[int(slopes.argmin())][0])


def smoothed(losses: Sequence[float]) -> list[float]:
    """The exponential mean without its bias, until it is four times its best.

    >>> [round(value, 6) for value in smoothed([2.0, 2.0, 1000.0, 2.0])]
    [2.0, 2.0]
    """
    mean, best, found = 0.0, math.inf, []
    for count, loss in enumerate(losses, 1):
        mean = SMOOTHING * mean + (1 - SMOOTHING) * loss
        value = mean / (1 - SMOOTHING**count)
        if not value <= STOP * best:
            break
        best = min(best, value)
        found.append(value)
    return found
