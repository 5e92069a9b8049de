"""Outer steps: what converge makes of the replicas' parameters. The mean, unless the user says otherwise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor

from hdet.checks import is_finite, is_one_of, shown
from hdet.distributed.weights import to_host
from hdet.ensemble.outer_rate import OuterRate, next_rate
from hdet.errors import ArgumentError

__all__ = ["Average", "Mean", "Outer", "OuterStep"]

Average = Callable[[Sequence[Tensor], Sequence[Tensor]], None]
"""Replaces parameters, and further numbers, by their mean over the live replicas, in place."""


class OuterStep(Protocol):
    """Merges the parameters of the replicas at the end of a round."""

    def begin(self, parameters: Sequence[Tensor]) -> None:
        """Remember where the first round starts; called before training moves the parameters."""

    def merge(self, parameters: Sequence[Tensor], average: Average, losses: Sequence[float] = ()) -> None:
        """Must call ``average`` once, on every replica alike. ``losses``: of the live replicas, lower is better."""

    def state(self) -> list[list[Tensor]]:
        """Copies of the tensors to save, equal on all replicas."""

    def tensors(self) -> list[Tensor]:
        """Those that are to be averaged when the replicas first meet: nothing, once they were loaded."""

    def load(self, state: Sequence[Sequence[Tensor]]) -> None:
        """Take back :meth:`state`."""


class Mean:
    """The published converge: every replica gets the mean."""

    def __repr__(self) -> str:
        return "Mean()"

    def begin(self, parameters: Sequence[Tensor]) -> None:
        pass

    def merge(self, parameters: Sequence[Tensor], average: Average, losses: Sequence[float] = ()) -> None:
        average(parameters, ())

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

    With "auto" the rate begins at 1 and is found from round to round: raised where the replicas go on along the last
    outer step, lowered where they come back, or where losses have risen
    (:func:`hdet.ensemble.outer_rate.next_rate`). :attr:`rate` is the present one. It costs three
    numbers in the all-reduce and one synchronisation of host and device per round.

    Args:
        lr: outer learning rate, above 0, or "auto".
        momentum: :math:`\mu` in [0, 1). None: 0.9, and 0 with "auto", which is for outer steps without momentum.
        nesterov: Nesterov momentum.
    """

    def __init__(self, lr: float | Literal["auto"] = 0.7, momentum: float | None = None, nesterov: bool = True) -> None:
        self._is_found = is_one_of(lr, ("auto",))
        if not self._is_found and not (is_finite(lr) and lr > 0):  # type: ignore[operator]  # a number
            raise ArgumentError(
                f'outer lr must be a finite number above 0 or "auto", but got lr={shown(lr)}; DiLoCo uses 0.7'
            )
        if momentum is None:
            momentum = 0.0 if self._is_found else 0.9
        if self._is_found and momentum != 0:
            raise ArgumentError(
                f'outer lr="auto" finds the rate of steps without momentum, but got momentum={shown(momentum)}; leave '
                "it out, or give a number as lr"
            )
        if not (is_finite(momentum) and 0 <= momentum < 1):
            raise ArgumentError(
                f"outer momentum must be at least 0 and below 1, but got momentum={momentum!r}; DiLoCo uses 0.9"
            )
        if not isinstance(nesterov, bool):
            raise ArgumentError(f"nesterov must be True or False, but got nesterov={shown(nesterov)}; leave it out")
        self.lr, self.momentum, self.nesterov = lr, momentum, nesterov
        self._found = OuterRate() if lr == "auto" else OuterRate(float(lr))
        self._is_common = False
        self._last: dict[Tensor, Tensor] = {}
        self._velocity: dict[Tensor, Tensor] = {}

    def __repr__(self) -> str:
        return f"Outer(lr={self.lr!r}, momentum={self.momentum}, nesterov={self.nesterov})"

    @property
    def rate(self) -> float:
        """The present outer rate."""
        return self._found.rate

    def begin(self, parameters: Sequence[Tensor]) -> None:
        self._is_common = False
        self._last = {p: p.detach().clone() for p in parameters}
        self._velocity = {p: torch.zeros_like(last) for p, last in self._last.items()}

    @torch.no_grad()
    def merge(self, parameters: Sequence[Tensor], average: Average, losses: Sequence[float] = ()) -> None:
        known = [p for p in parameters if p in self._last]
        seen = [self._seen(known)] if self._is_found and known else []
        average(parameters, seen)
        if seen:
            asked, moved, stepped = to_host(seen)
            self._found = next_rate(self._found, asked, moved, stepped, losses)
        for p in known:
            last, v = self._last[p], self._velocity[p]
            d = last - p
            v.mul_(self.momentum).add_(d)
            step = d.add_(v, alpha=self.momentum) if self.nesterov else v
            p.copy_(last.sub_(step, alpha=self.rate))
        if len(known) != len(parameters) or len(known) != len(self._last):
            self._follow(parameters)

    def _seen(self, parameters: Sequence[Tensor]) -> Tensor:
        """Of this replica: <d, s>, |d|^2 and |s|^2, d being its displacement and s the last one's mean. No momentum:
        v is that."""
        rows = []
        for p in parameters:
            d, v = self._last[p] - p, self._velocity[p]
            rows.append(torch.stack([_product(d, v), _product(d, d), _product(v, v)]).to(self._device))
        return torch.stack(rows).sum(0)

    @property
    def _device(self) -> torch.device:
        return next(iter(self._last.values())).device

    def _follow(self, parameters: Sequence[Tensor]) -> None:
        """Layers were thawed, which join in the optimizer's order, or frozen, which are forgotten."""
        last, velocity = self._last, self._velocity
        self.begin(parameters)
        self._last |= {p: last[p] for p in parameters if p in last}
        self._velocity |= {p: velocity[p] for p in parameters if p in velocity}

    def state(self) -> list[list[Tensor]]:
        found = [[torch.tensor(self._found, dtype=torch.float64)]] if self._is_found else []
        return [*([t.clone() for t in part.values()] for part in (self._last, self._velocity)), *found]

    def tensors(self) -> list[Tensor]:
        return [] if self._is_common else [*self._last.values(), *self._velocity.values()]

    def load(self, state: Sequence[Sequence[Tensor]]) -> None:
        for part, saved in zip((self._last, self._velocity), state, strict=False):
            for own, value in zip(part.values(), saved, strict=True):
                own.copy_(value)
        if self._is_found:
            self._found = OuterRate(*state[-1][0].tolist())
        self._is_common = True


def _product(a: Tensor, b: Tensor) -> Tensor:
    return torch.sum(a * b, dtype=torch.float32)
