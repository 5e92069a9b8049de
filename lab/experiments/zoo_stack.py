"""The problems of the zoo as tasks of a stack, and their optimizers for all runs at once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from real.optimizers import AdamW, RMSprop
from stacked import Adam, Batch, Momentum, Optimizer
from torch import Tensor, nn
from zoo_problems import BATCH, PROBLEMS, model_of


class ZooTask:
    """What a stack asks of a task.

    Args:
        name: of one of ``zoo_problems.PROBLEMS``.
    """

    batch_size = BATCH

    def __init__(self, name: str) -> None:
        self.name, self._problem = name, PROBLEMS[name]

    def model(self, seed: int) -> nn.Module:
        return model_of(self._problem, seed)

    def groups(self, model: nn.Module) -> list[dict[str, Any]]:
        return [{"name": "all", "params": list(model.parameters())}]

    def batch(self, seed: int, step: int) -> Batch:
        return self._problem.batch(torch.Generator().manual_seed(10**6 * seed + step), BATCH)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        inputs, targets = batch
        return self._problem.loss(model, (inputs, targets))

    def validation(self) -> list[Batch]:
        return [self._problem.held_out()]


class Sign:
    """``zoo_problems.Sign`` for all runs."""

    def __init__(self, theta: Tensor) -> None:
        self.momentum = torch.zeros_like(theta)

    @property
    def state(self) -> list[Tensor]:
        return [self.momentum]

    def direction(self, gradient: Tensor) -> Tensor:
        return self.momentum.lerp_(gradient, 0.1).sign()

    def step_(self, theta: Tensor, gradient: Tensor, rate: Tensor) -> None:
        theta.sub_(self.direction(gradient).mul_(rate))


UPDATES: dict[str, Callable[[Tensor], Optimizer]] = {
    "adam": Adam,
    "adamw": partial(AdamW, decay=0.1),
    "sgd": partial(Momentum, momentum=0.0),
    "momentum": Momentum,
    "sign": Sign,
    "rmsprop": RMSprop,
}
"""By the names of ``zoo_problems.OPTIMIZERS``."""
