"""A task over data that lie in memory: what `lab.tasks.Task` asks for, but without probes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lab.tasks.streams import check_place, epoch_places, generator_of
from lab.tasks.task import Batch, device_of, evaluating, moved
from real.models.weights import groups
from real.pools import Pool, batches_of


class RealTask:
    """A model, a pool of training samples, held-out batches and a loss.

    Batches are as raw as the data (``uint8``, ``int16``): the loss makes them what the model takes.

    Args:
        name: of the task, and of its random numbers.
        pool: training samples.
        test: where held-out samples come from.
        held_out: how many of them, and how many in a batch.
        build: a new model, its weights drawn from the generator; it may use torch's global generator before that.
        loss: mean loss of a batch.
        batch_size: samples per replica and step.
        clip: the largest norm of a gradient, if it is clipped.
        density: whether the loss is minus a logarithm of densities, and may be negative: then exp(loss) is scored.
    """

    def __init__(
        self,
        name: str,
        pool: Pool,
        test: Pool,
        held_out: tuple[int, int],
        build: Callable[[torch.Generator], nn.Module],
        loss: Callable[[nn.Module, Batch], Tensor],
        batch_size: int,
        clip: float | None = None,
        density: bool = False,
    ) -> None:
        self.name, self.batch_size, self.clip = name, batch_size, clip
        self.density = density
        self._pool, self._validation = pool, batches_of(test, name, *held_out)
        self._build, self._loss = build, loss

    def model(self, seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            return self._build(generator_of(self.name, "model", seed))

    def groups(self, model: nn.Module) -> list[dict[str, Any]]:
        return groups(model)

    def batch(self, seed: int, step: int, replica: int = 0, replicas: int = 1) -> Batch:
        check_place(step, replica, replicas)
        words = f"{self.name} {seed}"
        _, places = epoch_places(words, self._pool.count, self.batch_size, step, replica, replicas)
        return self._pool.take(places, generator_of(self.name, "batch", seed, step, replica, replicas))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return self._loss(model, batch)

    def validation(self) -> list[Batch]:
        return list(self._validation)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        with evaluating(model):
            device = device_of(model)
            losses = [float(self.loss(model, moved(batch, device))) for batch in self._validation]
        return {"loss": math.fsum(losses) / len(losses)}
