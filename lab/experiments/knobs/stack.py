"""Runs of a task with a knob as rows of one stack: each row has a value of its own, which may change as it trains."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from real.bench import Bench
from real.optimizers import AdamW
from stacked import Batch, Momentum, Optimizer, Stack
from torch import Tensor
from torch.func import grad_and_value, vmap

from knobs.task import KnobTask

__all__ = ["KnobAdamW", "KnobBench", "KnobMomentum", "KnobStack"]


class KnobStack(Stack):
    """As a stack, and ``values[seed, configuration]``: write to it to change what follows."""

    task: KnobTask

    def __init__(self, task: KnobTask, seeds: Sequence[int], configurations: int, device: torch.device) -> None:
        super().__init__(task, seeds, configurations, device)
        self.values = torch.full_like(self.theta[:, :, 0], task.knob.centre)

    def gradients(self, theta: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Of the loss with the regulariser."""
        each = vmap(vmap(grad_and_value(self._trained), (0, None, 0)), (0, 0, 0))
        return each(theta, batch, self.values)  # type: ignore[no-any-return]

    def _trained(self, row: Tensor, batch: Batch, value: Tensor) -> Tensor:
        return self.task.trained(self.model_of(row), batch, value)


class KnobAdamW(AdamW):
    """torch's AdamW; each run has its own decay and its own 1 - beta2, [seed, configuration, 1], which may change.

    The correction of the second moment is one minus the product of all beta2 so far.
    """

    def __init__(self, theta: Tensor, decay: Tensor, rest: Tensor) -> None:
        super().__init__(theta, decay)  # type: ignore[arg-type]
        self.rest, self.used = rest, torch.zeros_like(self.count)

    @property
    def state(self) -> list[Tensor]:
        return [*super().state, self.used]

    def direction(self, gradient: Tensor) -> Tensor:
        self.count += 1
        self.used.add_((1 - self.used) * self.rest)
        self.first.lerp_(gradient, 0.1)
        self.second.lerp_(gradient * gradient, self.rest)
        denominator = (self.second / self.used).sqrt_().add_(1e-8)
        return (self.first / (1 - 0.9**self.count)).div_(denominator)


class KnobMomentum(Momentum):
    """torch's SGD with momentum 0.9; each run has its own decay, which is a part of the gradient."""

    def __init__(self, theta: Tensor, decay: Tensor) -> None:
        super().__init__(theta)
        self.decay = decay

    def step_(self, theta: Tensor, gradient: Tensor, rate: Tensor) -> None:
        super().step_(theta, gradient + self.decay * theta, rate)


class KnobBench(Bench):
    """Where runs of a workload are trained; its stacks have values."""

    task: KnobTask

    def stack(self, configurations: int, each: int = 1) -> KnobStack:
        seeds = [seed for seed in self.seeds for _ in range(each)]
        return KnobStack(self.task, seeds, configurations, self.device)

    def update(self, stack: Stack, theta: Tensor | None = None) -> Optimizer:
        """An optimizer that reads the stack's values, if the knob is one of its own."""
        assert isinstance(stack, KnobStack)
        values, where = stack.values[..., None], self.task.knob.where
        decay = values if where == "decay" else torch.zeros_like(values)
        if self.optimizer == "momentum":
            return KnobMomentum(stack.theta, decay)
        return KnobAdamW(stack.theta, decay, values if where == "rest" else torch.full_like(values, 1e-3))
