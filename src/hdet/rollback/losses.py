"""The losses of a round, kept without synchronising host and device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from hdet.checks import is_real, shown
from hdet.errors import ArgumentError
from hdet.ranks.weights import to_host
from hdet.rule.judge import mean_of


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
        self._losses.append((step, held_scalar(loss)))
        self.ever = True

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
            found.add(loss, int(step))
        return found


def held_scalar(loss: object) -> float | Tensor:
    """A loss as a number. If it is a tensor on a device, it is a copy there, since the caller may use it again; at
    least in fp32, for sums. Raises for anything else."""
    if not (loss.numel() == 1 and not loss.dtype.is_complex if isinstance(loss, Tensor) else is_real(loss)):
        got = f"a tensor of shape {tuple(loss.shape)}, {loss.dtype}" if isinstance(loss, Tensor) else shown(loss)
        raise ArgumentError(
            f"a loss must be one real number, or a tensor of one, but got {got}; reduce it first, for instance "
            "loss.mean(), or call step() without an argument"
        )
    if not isinstance(loss, Tensor):
        return float(loss)  # type: ignore[arg-type]  # a number
    if loss.is_cpu or loss.is_meta:
        return loss.item()
    return loss.detach().reshape(()).to(torch.promote_types(loss.dtype, torch.float32), copy=True)
