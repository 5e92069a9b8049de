"""What a task is: a model, an endless stream of batches for any number of replicas, a loss and a held-out set."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

__all__ = ["Batch", "Task", "batches", "device_of", "evaluating", "moved"]

Batch = tuple[Tensor, ...]


class Task(Protocol):
    """Everything that a training run needs to know about its problem.

    Nothing here reads or seeds a global generator: the same arguments give the same numbers, in any order of calls.
    """

    name: str
    batch_size: int
    """Samples per replica and step."""

    def model(self, seed: int) -> nn.Module:
        """A new model on the CPU, its weights drawn from ``seed``."""
        ...

    def groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """Parameter groups for an optimizer: ``{"name": ..., "params": [...]}``, each parameter in one of them."""
        ...

    def batch(self, seed: int, step: int, replica: int = 0, replicas: int = 1) -> Batch:
        """One replica's training batch of a step, on the CPU; the replicas of a step share no sample."""
        ...

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean loss of a batch, a scalar."""
        ...

    def validation(self) -> list[Batch]:
        """The held-out batches: always the same, all of one size."""
        ...

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """``loss`` and the task's metrics on the held-out batches, in eval mode."""
        ...


def batches(
    task: Task,
    seed: int,
    first_step: int = 0,
    replica: int = 0,
    replicas: int = 1,
    device: torch.device | str = "cpu",
) -> Iterator[Batch]:
    """The batches of one replica from ``first_step`` on, without end."""
    step = first_step
    while True:
        yield moved(task.batch(seed, step, replica, replicas), device)
        step += 1


def moved(batch: Batch, device: torch.device | str) -> Batch:
    return tuple(tensor.to(device) for tensor in batch)


def device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode without gradients; afterwards every module is back in the mode it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode
