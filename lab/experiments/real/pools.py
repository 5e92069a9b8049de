"""Where training samples come from: places of a data set, and what is random about them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from lab.tasks.streams import generator_of
from lab.tasks.task import Batch

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


class Noised(NamedTuple):
    """Samples, and beside each of them standard normal numbers.

    The noise that a model or a loss needs is a part of the batch: so a loss depends on weights and batch alone.
    """

    pool: Pool
    shapes: tuple[tuple[int, ...], ...]
    """Of the noise of one sample; several make as many parts of a batch. In half precision, as there is much of it."""

    @property
    def count(self) -> int:
        return self.pool.count

    def take(self, places: Tensor, generator: torch.Generator) -> Batch:
        noise = [torch.randn(len(places), *shape, generator=generator).half() for shape in self.shapes]
        return (*self.pool.take(places, generator), *noise)


class Masked(NamedTuple):
    """Samples, and which places of their first part are hidden from a model that is to guess them."""

    pool: Pool
    share: float = 0.15

    @property
    def count(self) -> int:
        return self.pool.count

    def take(self, places: Tensor, generator: torch.Generator) -> Batch:
        parts = self.pool.take(places, generator)
        return (*parts, torch.rand(parts[0].shape, generator=generator) < self.share)


class Sampled(NamedTuple):
    """Samples, and beside each of them some things drawn at random, all as likely."""

    pool: Pool
    things: int
    """They are numbered from 1 on; 0 is never drawn."""
    others: int

    @property
    def count(self) -> int:
        return self.pool.count

    def take(self, places: Tensor, generator: torch.Generator) -> Batch:
        others = torch.randint(1, self.things + 1, (len(places), self.others), generator=generator)
        return (*self.pool.take(places, generator), others.short())


class Stretches(NamedTuple):
    """Stretches of long rows, which begin anywhere in them; several tables are cut alike."""

    tables: Batch
    """Each [row, time]."""
    length: int

    @property
    def count(self) -> int:
        rows, time = self.tables[0].shape
        return rows * (time // self.length)

    def take(self, places: Tensor, generator: torch.Generator) -> Batch:
        rows, time = self.tables[0].shape
        starts = torch.randint(time - self.length + 1, places.shape, generator=generator)
        cut = starts[:, None] + torch.arange(self.length)
        return tuple(table[(places % rows)[:, None], cut] for table in self.tables)


class Crops(NamedTuple):
    """Squares of large images, away from their edges; several tables are cut alike."""

    tables: Batch
    """Each [image, row, column]."""
    side: int
    edge: int = 24

    @property
    def count(self) -> int:
        return 32 * len(self.tables[0])

    def take(self, places: Tensor, generator: torch.Generator) -> Batch:
        images, *sides = self.tables[0].shape
        rows, columns = (
            torch.randint(self.edge, size - self.edge - self.side + 1, places.shape, generator=generator)[:, None]
            + torch.arange(self.side)
            for size in sides
        )
        which = (places % images)[:, None, None]
        return tuple(table[which, rows[:, :, None], columns[:, None, :]] for table in self.tables)


class Skips(NamedTuple):
    """A word of a text; one nearby, and some drawn by how often they come, to the power 3/4 (as word2vec)."""

    words: Tensor
    drawn: Tensor
    """The probabilities of all words below each."""
    reach: int = 4
    others: int = 5

    @classmethod
    def of(cls, words: Tensor, vocabulary: int) -> Skips:
        often = torch.bincount(words.long(), minlength=vocabulary).double() ** 0.75
        return cls(words, (often / often.sum()).cumsum(0))

    @property
    def count(self) -> int:
        return len(self.words) - 2 * self.reach

    def take(self, places: Tensor, generator: torch.Generator) -> Batch:
        """[sample] and [sample, 1 + others], of which the first was nearby."""
        away = torch.randint(1, self.reach + 1, places.shape, generator=generator)
        side = 2 * torch.randint(2, places.shape, generator=generator) - 1
        middle = places + self.reach
        uniform = torch.rand(len(places), self.others, generator=generator, dtype=torch.float64)
        others = torch.searchsorted(self.drawn, uniform).clamp(max=len(self.drawn) - 1)
        nearby = torch.cat([self.words[middle + away * side][:, None], others.to(self.words.dtype)], 1)
        return self.words[middle], nearby


class Made(NamedTuple):
    """Samples that are made as they are asked for: none comes twice."""

    make: Callable[[int, torch.Generator], Batch]

    @property
    def count(self) -> int:
        return 2**15

    def take(self, places: Tensor, generator: torch.Generator) -> Batch:
        return self.make(len(places), generator)


def frozen(pool: Pool, name: str, count: int) -> Rows:
    """So many samples, spread evenly, with what is random about them, always the same."""
    count = min(count, pool.count)
    return Rows(pool.take(torch.arange(count) * pool.count // count, generator_of(name, "validation")))


def batches_of(pool: Pool, name: str, count: int, size: int) -> list[Batch]:
    """``count`` samples, spread evenly, in batches of ``size``; fewer of both if there are fewer rows."""
    rows = pool if isinstance(pool, Rows) else frozen(pool, name, count)
    size = min(size, rows.count)
    count = min(count, rows.count) // size * size
    places = torch.arange(count) * rows.count // count
    return [tuple(table[part] for table in rows.tables) for part in places.split(size)]
