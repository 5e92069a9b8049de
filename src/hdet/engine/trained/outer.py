"""Outer steps: what converge makes of the replicas' parameters. The mean, unless the user says otherwise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from hdet.checks import is_finite, shown
from hdet.errors import ArgumentError

__all__ = ["Average", "Mean", "Outer", "OuterStep"]

Average = Callable[[Sequence[Tensor]], None]
"""Replaces tensors by their mean over the live replicas, in place."""


class OuterStep(Protocol):
    """Merges the parameters of the replicas at the end of a round."""

    def begin(self, parameters: Sequence[Tensor]) -> None:
        """Remember where the first round starts; called before training moves the parameters."""

    def merge(self, parameters: Sequence[Tensor], average: Average) -> None:
        """Must call ``average`` once, on every replica alike."""

    def state(self) -> list[list[Tensor]]:
        """Copies of the tensors to save, equal on all replicas."""

    def tensors(self) -> list[Tensor]:
        """The same tensors themselves, for :func:`average_` when the replicas first meet."""

    def load(self, state: Sequence[Sequence[Tensor]]) -> None:
        """Take back :meth:`state`."""


class Mean:
    """The published converge: every replica gets the mean."""

    def __repr__(self) -> str:
        return "Mean()"

    def begin(self, parameters: Sequence[Tensor]) -> None:
        pass

    def merge(self, parameters: Sequence[Tensor], average: Average) -> None:
        average(parameters)

    def state(self) -> list[list[Tensor]]:
        return []

    def tensors(self) -> list[Tensor]:
        return []

    def load(self, state: Sequence[Sequence[Tensor]]) -> None:
        pass


class Outer:
    r"""An outer optimizer on the round's mean displacement: SGD with (Nesterov) momentum, as DiLoCo does.

    With :math:`d` the last consensus minus the mean: :math:`v \leftarrow \mu v + d`, then
    :math:`\theta \leftarrow \theta_{last} - lr\,(d + \mu v)` (without ``nesterov``: :math:`- lr\, v`).

    Needs two copies of the parameters: the last consensus and v. lr=1 without momentum is the mean.

    Args:
        lr: outer learning rate, above 0.
        momentum: :math:`\mu` in [0, 1).
        nesterov: Nesterov momentum.
    """

    def __init__(self, lr: float = 0.7, momentum: float = 0.9, nesterov: bool = True) -> None:
        if not (is_finite(lr) and lr > 0):
            raise ArgumentError(f"outer lr must be a finite number above 0, but got lr={lr!r}; DiLoCo uses 0.7")
        if not (is_finite(momentum) and 0 <= momentum < 1):
            raise ArgumentError(
                f"outer momentum must be at least 0 and below 1, but got momentum={momentum!r}; DiLoCo uses 0.9"
            )
        if not isinstance(nesterov, bool):
            raise ArgumentError(f"nesterov must be True or False, but got nesterov={shown(nesterov)}; leave it out")
        self.lr, self.momentum, self.nesterov = lr, momentum, nesterov
        self._last: list[Tensor] = []
        self._velocity: list[Tensor] = []

    def __repr__(self) -> str:
        return f"Outer(lr={self.lr}, momentum={self.momentum}, nesterov={self.nesterov})"

    def begin(self, parameters: Sequence[Tensor]) -> None:
        self._last = [p.detach().clone() for p in parameters]
        self._velocity = [torch.zeros_like(p) for p in self._last]

    @torch.no_grad()
    def merge(self, parameters: Sequence[Tensor], average: Average) -> None:
        average(parameters)
        for p, last, v in zip(parameters, self._last, self._velocity, strict=True):
            d = last - p
            v.mul_(self.momentum).add_(d)
            step = d.add_(v, alpha=self.momentum) if self.nesterov else v
            p.copy_(last.sub_(step, alpha=self.lr))

    def state(self) -> list[list[Tensor]]:
        return [[t.clone() for t in part] for part in (self._last, self._velocity)]

    def tensors(self) -> list[Tensor]:
        return self._last + self._velocity

    def load(self, state: Sequence[Sequence[Tensor]]) -> None:
        self._last, self._velocity = (_copied(part, self._last) for part in state)


def _copied(saved: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
    """Saved tensors on the devices where this process needs them."""
    return [t.to(own.device, own.dtype, copy=True) for t, own in zip(saved, like, strict=True)]
