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

    Needs two copies of the parameters: the last consensus and v. lr=1 without momentum is the mean. A parameter that
    was frozen when the round began gets the mean at its end, and outer steps from then on.

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
        self._last: dict[Tensor, Tensor] = {}
        self._velocity: dict[Tensor, Tensor] = {}

    def __repr__(self) -> str:
        return f"Outer(lr={self.lr}, momentum={self.momentum}, nesterov={self.nesterov})"

    def begin(self, parameters: Sequence[Tensor]) -> None:
        self._last = {p: p.detach().clone() for p in parameters}
        self._velocity = {p: torch.zeros_like(last) for p, last in self._last.items()}

    @torch.no_grad()
    def merge(self, parameters: Sequence[Tensor], average: Average) -> None:
        average(parameters)
        known = [p for p in parameters if p in self._last]
        for p in known:
            last, v = self._last[p], self._velocity[p]
            d = last - p
            v.mul_(self.momentum).add_(d)
            step = d.add_(v, alpha=self.momentum) if self.nesterov else v
            p.copy_(last.sub_(step, alpha=self.lr))
        if len(known) != len(parameters) or len(known) != len(self._last):
            self._follow(parameters)

    def _follow(self, parameters: Sequence[Tensor]) -> None:
        """Layers were thawed, which join in the optimizer's order, or frozen, which are forgotten."""
        last, velocity = self._last, self._velocity
        self.begin(parameters)
        self._last |= {p: last[p] for p in parameters if p in last}
        self._velocity |= {p: velocity[p] for p in parameters if p in velocity}

    def state(self) -> list[list[Tensor]]:
        return [[t.clone() for t in part.values()] for part in (self._last, self._velocity)]

    def tensors(self) -> list[Tensor]:
        return [*self._last.values(), *self._velocity.values()]

    def load(self, state: Sequence[Sequence[Tensor]]) -> None:
        for part, saved in zip((self._last, self._velocity), state, strict=True):
            for own, value in zip(part.values(), saved, strict=True):
                own.copy_(value)
