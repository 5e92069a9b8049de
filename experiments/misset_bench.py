"""What all rows of a table share: the task, its seeds and batches, the length of the run; and what a row gives back."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from misset_data import Supply
from misset_shapes import Factors
from stacked import Adam, Momentum, Optimizer, Stack
from torch import Tensor

from hdet.tasks import Task

__all__ = ["OPTIMIZERS", "Bench", "Clock", "Outcome"]

OPTIMIZERS: dict[str, Callable[[Tensor], Optimizer]] = {"adam": Adam, "sgd": Momentum}


class Outcome(NamedTuple):
    """What came out of some runs, ``[start][seed]``."""

    losses: list[list[float]]
    """Validation losses at the end."""
    found: list[list[float]]
    """The rate that each run used at its peak, or had found at its end; NaN where there is none."""
    seconds: float
    """Of training, without set-up and validation."""
    run_steps: int
    """Runs times steps, a step being one whole batch."""


@dataclass
class Bench:
    """Where runs are trained.

    Args:
        task: the problem.
        optimizer: "adam" or "sgd".
        steps: S.
        seeds: a run of each.
        supply: their batches, at least S.
        device: where.
        graph: whether steps are captured on a GPU.
        compiled: stacks of so many runs are compiled: one shape, which most rows have. 0: none.
        choosing: the same with other seeds, for rows that choose something first.
    """

    task: Task
    optimizer: str
    steps: int
    seeds: Sequence[int]
    supply: Supply
    device: torch.device
    graph: bool = True
    compiled: int = 0
    choosing: Bench | None = None

    def stack(self, configurations: int, each: int = 1) -> Stack:
        """New runs; ``each``: rows per seed, one after the other."""
        seeds = [seed for seed in self.seeds for _ in range(each)]
        compiled = each == 1 and configurations * len(seeds) == self.compiled
        return Stack(self.task, seeds, configurations, self.device, compiled)

    def update(self, theta: Tensor) -> Optimizer:
        """A new optimizer of all runs."""
        return OPTIMIZERS[self.optimizer](theta)

    def rates(self, stack: Stack, peaks: Sequence[float], shape: Factors) -> Tensor:
        """[step, seed, configuration, group]: a peak rate per configuration times the schedule."""
        table = np.outer(shape[: self.steps], peaks)
        wide = torch.from_numpy(table).to(stack.theta)[:, None, :, None]
        return wide.repeat(1, stack.theta.shape[0], 1, len(stack.sizes))

    def outcome(self, stack: Stack, theta: Tensor, found: Sequence[Sequence[float]], clock: Clock) -> Outcome:
        """Validate at ``theta``; ``found[start][seed]``."""
        losses = stack.validation(theta).T.tolist()
        return Outcome(losses, [list(row) for row in found], clock.seconds, len(self.seeds) * len(losses) * self.steps)

    def same(self, rates: Sequence[float]) -> list[list[float]]:
        """``found`` where it is the start itself."""
        return [[rate] * len(self.seeds) for rate in rates]


class Clock:
    """Seconds inside ``with``, the device's work included."""

    def __init__(self, device: torch.device) -> None:
        self._device, self.seconds = device, 0.0

    def __enter__(self) -> Clock:
        self._wait()
        self._began = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self._wait()
        self.seconds += time.perf_counter() - self._began

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
