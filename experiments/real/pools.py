"""Where training samples come from: places of a data set, and what is random about them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from hdet.tasks.task import Batch

__all__ = ["Chords", "Pool", "Rows", "Windows", "held_out"]

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

    @classmethod
    def of(cls, found: Mapping[str, Tensor], *keys: str) -> tuple[Rows, Rows]:
        """Training and held-out rows of some columns."""
        return cls(tuple(found[f"train_{key}"] for key in keys)), cls(tuple(found[f"test_{key}"] for key in keys))

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
