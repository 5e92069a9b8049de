"""A task over data that lie in memory: what `hdet.tasks.Task` asks for."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from hdet.tasks.streams import check_place, epoch_places, generator_of
from hdet.tasks.task import Batch, device_of, evaluating, moved
from real.models import groups

__all__ = ["Chords", "Pool", "RealTask", "Rows", "Windows", "held_out"]

TRANSPOSED = (-5, 6)
"""Half tones by which a piece of music may be moved; 0 is silence and stays."""


class Pool(Protocol):
    """Where training samples come from."""

    @property
    def count(self) -> int:
        """Places that an epoch deals out."""
        ...

    def take(self, places: Tensor, generator: torch.Generator) -> Batch:
        """The samples at some places; what else is random about them comes from the generator."""
        ...


class Rows(NamedTuple):
    """Rows of tables."""

    tables: Batch

    @property
    def count(self) -> int:
        return len(self.tables[0])

    def take(self, places: Tensor, generator: torch.Generator) -> Batch:
        return tuple(table[places] for table in self.tables)


class Windows(NamedTuple):
    """Windows of a sequence that begin anywhere: a place and a random way on from it. The last number is the target."""

    sequence: Tensor
    length: int

    @property
    def count(self) -> int:
        return (len(self.sequence) - 1) // self.length - 1

    def take(self, places: Tensor, generator: torch.Generator) -> Batch:
        shift = torch.randint(self.length, places.shape, generator=generator)
        return (self.at(places * self.length + shift),)

    def at(self, starts: Tensor) -> Tensor:
        return self.sequence[starts[:, None] + torch.arange(self.length + 1)]

    def all(self) -> Rows:
        """The windows side by side, as they stand."""
        return Rows((self.at(torch.arange(self.count) * self.length),))


class Chords(NamedTuple):
    """Windows of music, each transposed at random."""

    windows: Windows

    @property
    def count(self) -> int:
        return self.windows.count

    def take(self, places: Tensor, generator: torch.Generator) -> Batch:
        (notes,) = self.windows.take(places, generator)
        low, high = TRANSPOSED
        shift = torch.randint(low, high + 1, (len(notes), 1, 1), generator=generator)
        return (torch.where(notes == 0, 0, notes + shift).to(torch.uint8),)


def held_out(rows: Rows, count: int, size: int) -> list[Batch]:
    """``count`` rows, spread evenly, in batches of ``size``; fewer of both where there are fewer rows."""
    size = min(size, rows.count)
    count = min(count, rows.count) // size * size
    places = torch.arange(count) * rows.count // count
    return [tuple(table[part] for table in rows.tables) for part in places.split(size)]


class RealTask:
    """A model, a pool of training samples, held-out batches and a loss.

    Batches are as raw as the data (``uint8``, ``int16``): the loss makes them what the model takes. A probe batch is as
    large as a training batch.

    Args:
        name: of the task, and of its random numbers.
        pool: training samples.
        validation: held-out batches of one size.
        build: a new model, its weights drawn from the generator; it may use torch's global generator before that.
        loss: mean loss of a batch.
        batch_size: samples per replica and step.
    """

    def __init__(
        self,
        name: str,
        pool: Pool,
        validation: Sequence[Batch],
        build: Callable[[torch.Generator], nn.Module],
        loss: Callable[[nn.Module, Batch], Tensor],
        batch_size: int,
    ) -> None:
        self.name, self.batch_size = name, batch_size
        self._pool, self._validation = pool, list(validation)
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

    def probe(self, seed: int, round: int) -> Batch:
        generator = generator_of(self.name, "probe", seed, round)
        places = torch.randint(self._pool.count, (self.batch_size,), generator=generator)
        return self._pool.take(places, generator)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return self._loss(model, batch)

    def validation(self) -> list[Batch]:
        return list(self._validation)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        with evaluating(model):
            device = device_of(model)
            losses = [float(self.loss(model, moved(batch, device))) for batch in self._validation]
        return {"loss": math.fsum(losses) / len(losses)}
