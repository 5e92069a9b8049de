"""The losses of a round, kept without synchronising host and device, and cut into blocks for the judge."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from numbers import Real

import torch
from torch import Tensor

from hdet.checks import shown
from hdet.errors import ArgumentError
from hdet.rollback.judge import BLOCKS, Block

_FIRST_ROOM = 64
"""The number of losses for which there is room on a device at first. It doubles when it is full."""


class Losses:
    """The losses of a round: numbers and CPU tensors on the host, others on their own device.

    A value is copied at once, since the caller may use the tensor again: one launch per loss.
    """

    def __init__(self) -> None:
        self.ever = False
        """Whether a loss was added in any round."""
        self.reset()

    @property
    def count(self) -> int:
        """The number of losses in this round."""
        return len(self._on_host) + len(self._device_steps)

    def reset(self) -> None:
        """Forget the losses: a new round begins."""
        self._on_host: list[tuple[int, float]] = []
        """The step of the round that each loss belongs to, and the loss."""
        self._on_device: Tensor | None = None
        self._device_steps: list[int] = []
        """The steps of those on the device."""

    def add(self, loss: float | Tensor, step: int = 0) -> None:
        """Add the loss of a step of the round: a number or a tensor of one element."""
        value = scalar_of(loss)
        self.ever = True
        if isinstance(value, (float, int)):  # asked first: whether something is a tensor takes five times as long
            self._on_host.append((step, value))
        else:
            self._store(value)
            self._device_steps.append(step)

    def _store(self, loss: Tensor) -> None:
        """Keep a loss on its device, at least in fp32. Not in float64, which not every device has."""
        room = self._on_device
        if room is None or room.device != loss.device:
            self._pairs()
            room = torch.empty(_FIRST_ROOM, device=loss.device, dtype=torch.promote_types(loss.dtype, torch.float32))
        elif len(self._device_steps) == len(room):
            room = torch.cat([room, torch.empty_like(room)])
        self._on_device = room
        room[len(self._device_steps)].copy_(loss.detach().reshape(()))

    def _pairs(self) -> list[tuple[int, float]]:
        """Step and loss of each. Synchronises host and device if some are on a device."""
        self.take([loss for stored in self.on_device() for loss in stored.tolist()])
        return self._on_host

    def values(self) -> list[float]:
        """All losses of the round. Synchronises host and device if some are on a device."""
        return [loss for _, loss in self._pairs()]

    def mean(self) -> float:
        """The mean of the round's losses; NaN if there are none."""
        return _mean(self.values())

    def saved(self) -> list[list[float]]:
        """Pairs of step and loss, for a checkpoint inside a round. Synchronises if some are on a device."""
        return [[step, loss] for step, loss in self._pairs()]

    @classmethod
    def loaded(cls, rows: Iterable[Sequence[float]]) -> Losses:
        """New losses from pairs of step and loss. What does not fit raises."""
        found = cls()
        for step, loss in rows:
            found.add(_number(loss), int(step))
        return found

    def on_device(self) -> list[Tensor]:
        """The losses on a device as one tensor, so that they can be read together with other numbers."""
        return [] if self._on_device is None else [self._on_device[: len(self._device_steps)]]

    def take(self, values: Sequence[float]) -> None:
        """The values of :meth:`on_device`, which the caller has read."""
        self._on_host += zip(self._device_steps, values, strict=True)
        self._on_device, self._device_steps = None, []

    def table(self, length: int) -> list[float]:
        """:func:`table_of` the losses of a round of ``length`` steps. Synchronises if some are on a device."""
        return table_of(self._pairs(), length)


def table_of(losses: Iterable[tuple[int, float]], length: int) -> list[float]:
    """(step, loss) of a round of ``length`` steps, in eight blocks: as many numbers on every rank.

    For each block: whether it has a loss, and the mean of those that are finite.
    """
    count = _count(length)
    found: list[list[float]] = [[] for _ in range(BLOCKS)]
    for step, loss in losses:
        found[min(((step + 1) * count - 1) // max(length, 1), count - 1)].append(loss)
    return [number for own in found for number in (float(bool(own)), _mean([x for x in own if math.isfinite(x)]))]


def merged(tables: Sequence[Sequence[float]], length: int) -> tuple[Block, ...]:
    """The blocks of a round from the tables of all ranks: means over those that have a finite one.

    >>> merged([table_of([(0, 4.0), (1, 2.0), (2, math.nan)], 3), table_of([(0, 2.0), (2, math.inf)], 3)], length=3)
    (Block(mean=3.0, steps=1), Block(mean=2.0, steps=1), Block(mean=nan, steps=1))
    """
    count = _count(length)
    steps = [(k + 1) * length // count - k * length // count for k in range(count)]
    means = [[table[2 * k + 1] for table in tables] for k in range(count)]
    given = [any(table[2 * k] for table in tables) for k in range(count)]
    return tuple(
        Block(_mean([mean for mean in means[k] if math.isfinite(mean)]), steps[k]) for k in range(count) if given[k]
    )


def _count(length: int) -> int:
    return min(max(length, 1), BLOCKS)


def _mean(values: Sequence[float]) -> float:
    if not values:
        return math.nan
    try:
        return math.fsum(values) / len(values)
    except (OverflowError, ValueError):  # losses near the largest float; or infinite ones of both signs
        return sum(value / len(values) for value in values)


def scalar_of(loss: object) -> float | Tensor:
    """A loss as a number, or as it is if it is a tensor of one element on a device; anything else raises."""
    if not isinstance(loss, Tensor):
        return _number(loss)
    if loss.numel() != 1 or loss.dtype.is_complex:
        raise ArgumentError(
            f"a loss must be one real number, but got a tensor of shape {tuple(loss.shape)}, {loss.dtype}; "
            "reduce it first, for instance loss.mean()"
        )
    return loss.item() if loss.is_cpu or loss.is_meta else loss


def _number(loss: object) -> float:
    if not isinstance(loss, Real) or isinstance(loss, bool):
        raise ArgumentError(
            f"a loss must be a number or a tensor of one element, but got {shown(loss)}; "
            "pass the loss itself, or call step() without an argument"
        )
    try:
        return float(loss)
    except OverflowError:
        raise ArgumentError(
            "a loss must be a number that a float can hold, but got a far larger integer; pass the loss itself"
        ) from None
