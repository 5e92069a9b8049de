"""What all rows of a workload share: its runs as one stack, their batches, and 20 looks at the validation set."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from shapes import Factors
from stacked import Batch, Optimizer, Stack, Supply, captured, tf32
from torch import Tensor

from lab.tasks import Task
from real.optimizers import update_of

EVALUATIONS = 20
_TOGETHER = 16
"""Runs validated in one call; bounds memory."""


def evaluated_at(steps: int, evaluations: int = EVALUATIONS) -> list[int]:
    """After which steps a run is evaluated, the last one included.

    >>> evaluated_at(10, 4)
    [2, 5, 8, 10]
    """
    return [round(i * steps / evaluations) for i in range(1, evaluations + 1)]


class Outcome(NamedTuple):
    """What came out of a row."""

    starts: list[float | None]
    """Factors on the best rate; None where a method has no rate to start from."""
    curves: list[list[list[float]]]
    """Validation losses [start][seed][evaluation]."""
    found: list[list[float]]
    """The peak rate that each run used, or had found at its end; NaN where there is none."""
    seconds: float
    """Of all runs that trained together with this row."""
    note: str = ""


@dataclass
class Bench:
    """Where runs of a workload are trained.

    Args:
        task: the problem.
        optimizer: by its name in ``real.optimizers.BUILDERS``.
        customary: the rate that people use with it.
        steps: L.
        seeds: a run of each.
        supply: their batches, at least L.
        device: where.
        graph: whether steps are captured on a GPU.
        evaluations: how often a run is evaluated.
    """

    task: Task
    optimizer: str
    customary: float
    steps: int
    seeds: Sequence[int]
    supply: Supply
    device: torch.device
    graph: bool = True
    evaluations: int = EVALUATIONS

    def stack(self, configurations: int, each: int = 1) -> Stack:
        """New runs; ``each``: rows per seed, one after the other."""
        return Stack(self.task, [seed for seed in self.seeds for _ in range(each)], configurations, self.device)

    def initial(self) -> float:
        """The validation loss of the first weights, mean over seeds."""
        stack = self.stack(1)
        return Validator(stack, stack.theta, graph=False)(stack.theta).mean().item()

    def update(self, stack: Stack, theta: Tensor | None = None) -> Optimizer:
        """A new optimizer of all runs, or of those in ``theta``."""
        return update_of(self.optimizer, stack, theta)

    def rates(self, stack: Stack, peaks: Sequence[float] | Sequence[Sequence[float]], shape: Factors) -> Tensor:
        """[step, seed, configuration, group]: peaks, by configuration or [seed][configuration], times a shape."""
        table = torch.from_numpy(np.broadcast_to(np.array(peaks, dtype=float), stack.theta.shape[:2]).copy())
        factors = torch.from_numpy(shape[: self.steps].copy())
        wide = factors[:, None, None, None] * table[None, :, :, None]
        return wide.to(stack.theta).repeat(1, 1, 1, len(stack.sizes))

    def train(
        self,
        stack: Stack,
        step: Callable[[], None],
        after: Callable[[int], None] | None = None,
        weights: Callable[[], Tensor] | None = None,
    ) -> tuple[list[list[list[float]]], float]:
        """Make all steps: validation losses [configuration][seed][evaluation], and the seconds.

        ``after(t)``: work between steps. ``weights()``: what is evaluated, if not the runs' weights themselves.
        """
        due = set(evaluated_at(self.steps, self.evaluations))
        first = weights() if weights is not None else stack.theta
        validator = Validator(stack, first, self.graph)
        seen = []
        with Clock(self.device) as clock:
            for t in range(1, self.steps + 1):
                step()
                if after is not None:
                    after(t)
                if t in due:
                    seen.append(validator(weights() if weights is not None else stack.theta))
        return torch.stack(seen, -1).transpose(0, 1).tolist(), clock.seconds


class Validator:
    """Validation losses [seed, configuration] of all runs, in full fp32; on a GPU as one graph."""

    def __init__(self, stack: Stack, theta: Tensor, graph: bool = True) -> None:
        self._stack = stack
        self._batches = [tuple(part.to(stack.device) for part in batch) for batch in stack.task.validation()]
        self._rows = theta.detach().clone()
        self._losses = torch.zeros(theta.shape[:2], device=theta.device, dtype=torch.float64)
        self._replay: Callable[[], None] = self._run
        if graph and stack.device.type == "cuda":
            self._replay = captured(self._run)

    def __call__(self, theta: Tensor) -> Tensor:
        self._rows.copy_(theta)
        self._replay()
        return self._losses.clone()

    def _run(self) -> None:
        self._losses.copy_(mean_losses(self._stack, self._rows, self._batches))


@torch.no_grad()
def mean_losses(stack: Stack, theta: Tensor, batches: Sequence[Batch]) -> Tensor:
    """Losses [seed, configuration] of some runs over batches that lie on the device, in full fp32."""
    loss = torch.func.vmap(stack.loss, (0, None))
    rows = theta.flatten(0, 1).split(_TOGETHER)
    with tf32(False):
        means = [torch.cat([loss(part, batch).double() for part in rows]) for batch in batches]
    return torch.stack(means).mean(0).view(theta.shape[:2])


class Blocks:
    """The first columns have an optimizer of the stack; the others' gradients are laid out for whoever steps them."""

    def __init__(self, theta: Tensor, own: int, build: Callable[[Tensor], Optimizer]) -> None:
        self._own, self._inner = own, build(theta[:, :own]) if own else None
        self.gradients = torch.zeros_like(theta[:, own:])
        """Of the last step, [seed, other column, parameter]."""

    @property
    def state(self) -> list[Tensor]:
        return self._inner.state if self._inner is not None else []

    def step_(self, theta: Tensor, gradient: Tensor, rate: Tensor) -> None:
        own = self._own
        if self._inner is not None:
            self._inner.step_(theta[:, :own], gradient[:, :own], rate[:, :own])
        self.gradients.copy_(gradient[:, own:])


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
