"""The reach of real training: inner products of each step's gradient with the way gone since the start."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hdet.algorithm.reach import Tally, estimate, forgetting
from hdet.engine.snapshots import wide

__all__ = ["Reach"]


class Reach:
    """Two sums over steps, on the device: one number, and one fp32 copy of the gradients. See the algorithm's module.

    The start is the caller's, who has it anyway.
    """

    def __init__(self) -> None:
        self._pull: list[Tensor] = []
        self._asked: Tensor | None = None
        self._rates = self._rate = 0.0

    def reset(self) -> None:
        """Begin anew."""
        self._pull, self._asked, self._rates, self._rate = [], None, 0.0, 0.0

    @torch.no_grad()
    def before_step(self, start: Sequence[Tensor], parameters: Sequence[Tensor], rate: float) -> None:
        """The optimizer is about to step at ``rate``; gradients are in place. Does not synchronise."""
        if not self._pull:
            self._pull = [wide(p) for p in parameters]
        kept = forgetting(self._rate, rate) if self._rate else 1.0
        gradients = [_gradient(p) for p in parameters]
        asked = _inner(gradients, start, parameters)
        self._asked = asked if self._asked is None else self._asked * kept + asked
        for pull, gradient in zip(self._pull, gradients, strict=True):
            if gradient is not None:
                pull.mul_(kept).add_(gradient)
        self._rates, self._rate = self._rates + rate, rate

    @torch.no_grad()
    def rate(self, start: Sequence[Tensor], parameters: Sequence[Tensor]) -> float:
        """The estimate after the last step; 0 where there is none. Synchronises host and device."""
        if self._asked is None:
            return 0.0
        gained = float(_inner(self._pull, start, parameters))
        asked = float(self._asked)
        if not (math.isfinite(asked) and math.isfinite(gained)):  # some gradient was not finite
            self.reset()
            return 0.0
        return estimate(Tally(asked, gained, self._rates))


def _inner(gradients: Sequence[Tensor | None], start: Sequence[Tensor], parameters: Sequence[Tensor]) -> Tensor:
    """<gradients, start - parameters>, a float64 scalar on the first parameter's device."""
    parts = [
        torch.sum(g * (a - p)).double().to(parameters[0].device)
        for g, a, p in zip(gradients, start, parameters, strict=True)
        if g is not None
    ]
    return torch.stack(parts).sum() if parts else torch.zeros((), dtype=torch.float64)


def _gradient(p: Tensor) -> Tensor | None:
    return p.grad.to_dense() if p.grad is not None and p.grad.is_sparse else p.grad
