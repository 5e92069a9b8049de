"""What a guard measures and changes around one step of the optimizer.

It measures how large gradients and weights are, in few launches and without synchronising host and device. For the time
of the step it may lower rates, or hide gradients from the optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.parameters import Rate, copy_rate, shared_rates, trained_parameters
from hdet.ranks.shards import local
from hdet.ranks.weights import norm_of


def screened(optimizer: Optimizer) -> list[Tensor]:
    """The parameters whose gradients are measured: all on a CPU; on a device, where each takes time, only matrices.

    If a gradient is NaN, infinite or far too large, it is so in most layers.
    """
    every = trained_parameters(optimizer)
    return [p for p in every if p.is_cpu or p.dim() > 1] or every


@torch.no_grad()
def gradient_norm(parameters: Iterable[Tensor]) -> Tensor | None:
    """The 2-norm of all gradients that this rank holds, as a scalar on their device; None if there are none."""
    return norm_of([_held(p.grad) for p in parameters if p.grad is not None], 2.0)


@torch.no_grad()
def largest(tensors: Iterable[Tensor]) -> Tensor | None:
    """The largest absolute value of what this rank holds of some tensors; NaN if there is one, None if there are none.

    >>> largest([torch.tensor([1.0, -3.0]), torch.tensor([2.0])])
    tensor(3.)
    """
    return norm_of([local(tensor) for tensor in tensors], math.inf)


def _held(gradient: Tensor) -> Tensor:
    return gradient._values() if gradient.is_sparse else local(gradient)


def memory_of(optimizer: Optimizer) -> list[Tensor]:
    """What the optimizer remembers of its parameters in floating point, without counters."""
    states = [optimizer.state.get(p, {}) for p in trained_parameters(optimizer)]
    return [v for state in states for v in state.values() if isinstance(v, Tensor) and v.dim() and _is_float(v)]


def not_finite(model: nn.Module) -> list[str]:
    """Names of the parameters and buffers with NaN, or parameters with infinities. Synchronises host and device."""
    found = [name for name, p in model.named_parameters() if _is_float(p) and not bool(local(p).isfinite().all())]
    return found + [name for name, b in model.named_buffers() if _is_float(b) and bool(local(b).isnan().any())]


def _is_float(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


class Loans:
    """Lowered rates and hidden gradients, which :meth:`give_back` restores when the step is over."""

    def __init__(self) -> None:
        self._rates: list[tuple[dict[str, Any], Rate, Rate]] = []
        """Parameter groups with their own rate and the one that stands there now."""
        self._gradients: list[tuple[Tensor, Tensor]] = []

    @property
    def are_open(self) -> bool:
        """Whether something has not been given back yet."""
        return bool(self._rates or self._gradients)

    @torch.no_grad()
    def lower_rates(self, optimizer: Optimizer, factor: float) -> None:
        """Multiply the rates. Groups may share one tensor."""
        first = shared_rates(optimizer)
        for group in (group for g, group in enumerate(optimizer.param_groups) if first[g] == g):
            own = copy_rate(group["lr"])
            if isinstance(group["lr"], Tensor):
                group["lr"].mul_(factor)
            else:
                group["lr"] *= factor
            self._rates.append((group, own, copy_rate(group["lr"])))

    def hide_gradients(self, optimizer: Optimizer) -> None:
        """Parameters without gradients are left alone by every optimizer."""
        self._gradients = [(p, p.grad) for p in trained_parameters(optimizer) if p.grad is not None]
        for p, _ in self._gradients:
            p.grad = None

    @torch.no_grad()
    def give_back(self) -> None:
        """Restore rates and gradients, bit by bit. A rate that was written by someone else since then stays."""
        for group, own, lent in self._rates:
            if isinstance(own, Tensor):
                group["lr"].copy_(torch.where(group["lr"] == lent, own, group["lr"]))
            elif group["lr"] == lent:
                group["lr"] = own
        for p, gradient in self._gradients:
            p.grad = gradient
        self._rates, self._gradients = [], []
