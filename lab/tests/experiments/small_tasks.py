"""Tasks so small that a run takes a second, in double precision: then threshold decisions cannot flip by rounding."""

from __future__ import annotations

from typing import Any

import torch
from real import optimizers
from real.bench import Bench
from stacked import Supply

from lab.tasks import Task, task_named

CUSTOMARY = {**optimizers.CUSTOMARY, "adamw": 1e-2, "lion": 1e-3}
CPU = torch.device("cpu")
SMALL: dict[str, dict[str, Any]] = {
    "text": {"width": 16, "depth": 1, "heads": 2, "context": 16, "batch_size": 16},
    "feed": {"users": 64, "items": 64, "history": 4, "width": 8, "depth": 1, "batch_size": 64},
    "digits": {"width": 4, "batch_size": 16},
}


class Doubled:
    """A task whose batches and models are in double precision."""

    def __init__(self, task: Task) -> None:
        self._task = task

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)

    def model(self, seed: int) -> torch.nn.Module:
        return self._task.model(seed).double()

    def batch(self, *place: int) -> tuple[torch.Tensor, ...]:
        return _doubled(self._task.batch(*place))

    def validation(self) -> list[tuple[torch.Tensor, ...]]:
        return [_doubled(batch) for batch in self._task.validation()]


def _doubled(batch: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(part.double() if part.is_floating_point() else part for part in batch)


def small(name: str) -> Any:
    """The task of that name."""
    return Doubled(task_named(name, **SMALL[name]))


def bench(optimizer: str = "adamw", name: str = "digits", steps: int = 20, seeds: tuple[int, ...] = (0, 1)) -> Bench:
    """Where rows are run."""
    task = small(name)
    supply = Supply(task, seeds, steps, CPU)
    return Bench(task, optimizer, CUSTOMARY[optimizer], steps, seeds, supply, CPU, evaluations=2)
