"""The losses of a round, kept without synchronising host and device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Real

import torch
from torch import Tensor

from hdet.checks import shown
from hdet.errors import ArgumentError
from hdet.ranks.weights import to_host
from hdet.rule.judge import mean_of

__all__ = ["Losses", "copied_scalar", "scalar_of"]


class Losses:
    """The losses of a round: numbers and CPU tensors on the host, others on their own device until the round ends."""

    def __init__(self) -> None:
        self.ever = False
        """Whether a loss was added in any round."""
        self._losses: list[tuple[int, float | Tensor]] = []
        """The step of the round that each loss belongs to, and the loss."""

    @property
    def count(self) -> int:
        """The number of losses in this round."""
        return len(self._losses)

    def reset(self) -> None:
        """Forget the losses: a new round begins."""
        self._losses = []

    def add(self, loss: float | Tensor, step: int = 0) -> None:
        """Add the loss of a step of the round: a number or a tensor of one element."""
        value = scalar_of(loss)
        self.ever = True
        held = value if isinstance(value, (float, int)) else copied_scalar(value)  # isinstance of a Tensor is slower
        self._losses.append((step, held))

    def on_device(self) -> list[Tensor]:
        """The losses that are on a device, so that they can be read together with other numbers."""
        return [loss for _, loss in self._losses if isinstance(loss, Tensor)]

    def read(self, values: Iterable[float] | None = None) -> list[tuple[int, float]]:
        """Step and loss of each. ``values``: those of :meth:`on_device`; None: host and device are synchronised."""
        held = iter(to_host(self.on_device()) if values is None else values)
        found = [(step, next(held) if isinstance(loss, Tensor) else loss) for step, loss in self._losses]
        self._losses = list(found)
        return found

    def mean(self) -> float:
        """The mean of the round's losses; NaN if there are none. Synchronises if some are on a device."""
        return mean_of([loss for _, loss in self.read()])

    def saved(self) -> list[list[float]]:
        """Pairs of step and loss, for a checkpoint inside a round. Synchronises if some are on a device."""
        return [[step, loss] for step, loss in self.read()]

    @classmethod
    def loaded(cls, rows: Iterable[Sequence[float]]) -> Losses:
        """New losses from pairs of step and loss. Raises if they are anything else."""
        found = cls()
        for step, loss in rows:
            found.add(_number(loss), int(step))
        return found


def copied_scalar(value: Tensor) -> Tensor:
    """A copy on its device, since the caller may use the tensor again; at least fp32, for sums. One launch."""
    return value.detach().reshape(()).to(torch.promote_types(value.dtype, torch.float32), copy=True)


def scalar_of(loss: object) -> float | Tensor:
    """A loss as a number, or as it is if it is a tensor of one element on a device. Raises for anything else."""
    if not isinstance(loss, Tensor):
        return _number(loss)
    if loss.numel() != 1 or loss.dtype.is_complex:
        raise ArgumentError(
            f"a loss must be one real number, but got a tensor of shape {tuple(loss.shape)}, {loss.dtype}; "
            "reduce it first, for instance loss.mean()"
        )
    return loss.item() if loss.is_cpu or loss.is_meta else loss


def _number(loss: object) -> float:
    try:
        if isinstance(loss, Real) and not isinstance(loss, bool):
            return float(loss)
    except OverflowError:  # an integer that no float can hold
        pass
    raise ArgumentError(
        f"a loss must be a number or a tensor of one element, but got {shown(loss)}; "
        "pass the loss itself, or call step() without an argument"
    )
