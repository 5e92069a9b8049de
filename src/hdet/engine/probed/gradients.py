"""The reach of real training: inner products of each step's gradient with the way gone since the start."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hdet.algorithm.auto.reach import Tally, forgetting
from hdet.comm.host import to_host
from hdet.engine.copies import wide
from hdet.engine.rates import Rate

__all__ = ["Gradients"]


class Gradients:
    """Two sums over steps, on the device: one number, and one fp32 copy of the gradients.

    The formula is :mod:`hdet.algorithm.auto.reach`'s. The caller passes the start.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin anew."""
        self._pull: list[Tensor] = []
        self._asked: Tensor | None = None
        self._rates: Rate = 0.0
        self._ahead: Rate = 0.0
        self._weight: Rate = 0.0
        self._rate: Rate | None = None

    @torch.no_grad()
    def add(self, start: Sequence[Tensor], weights: Sequence[Tensor], parameters: Sequence[Tensor], rate: Rate) -> None:
        """One step at ``rate``. Does not synchronise, also where the rate is a tensor on a device.

        Args:
            start: the weights from which the way is measured.
            weights: those at which the gradients were taken.
            parameters: they hold the gradients.
            rate: of the step that follows.
        """
        if not self._pull:
            self._pull = [wide(p) for p in parameters]
        discount = _discount(self._rate, rate)
        gradients = [_gradient(p) for p in parameters]
        self._ahead, self._weight = self._ahead * discount + self._rates, self._weight * discount + 1.0
        asked = _inner(gradients, start, weights)
        self._asked = asked if self._asked is None else self._asked * discount + asked
        for pull, gradient in zip(self._pull, gradients, strict=True):
            pull.mul_(discount)  # also where a layer was not used: its gradient is zero
            if gradient is not None:
                pull.add_(gradient)
        self._rates, self._rate = self._rates + rate, rate

    @torch.no_grad()
    def tally(self, start: Sequence[Tensor], parameters: Sequence[Tensor]) -> Tally:
        """The sums over all steps. Synchronises host and device."""
        if self._asked is None:
            return Tally(0.0, 0.0, 0.0)
        asked, gained = to_host([self._asked, _inner(self._pull, start, parameters)])
        if not (math.isfinite(asked) and math.isfinite(gained)):  # some gradient was not finite
            self.reset()
            return Tally(0.0, 0.0, 0.0)
        return Tally(asked, gained, float(self._rates), float(self._ahead / self._weight))


def _discount(before: Rate | None, now: Rate) -> Rate:
    """What earlier sums count for: the ratio of the squared rates, at most 1. Tensors stay on their device."""
    if before is None:
        return 1.0
    if isinstance(now, Tensor) or isinstance(before, Tensor):
        ratio = torch.as_tensor(before / now).square().clamp(max=1.0)
        return torch.where(torch.as_tensor(now) > 0, ratio, torch.ones_like(ratio))
    return forgetting(before, now)


def _inner(gradients: Sequence[Tensor | None], start: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """<gradients, start - weights>, the real part; a scalar on the first weight's device."""
    total = torch.zeros((), device=weights[0].device if weights else None)
    for g, a, w in zip(gradients, start, weights, strict=True):
        if g is not None:
            total = total + torch.sum(g.conj() * (a - w)).real.to(total.device)
    return total


def _gradient(p: Tensor) -> Tensor | None:
    return p.grad.to_dense() if p.grad is not None and p.grad.is_sparse else p.grad
