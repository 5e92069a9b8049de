"""How large gradients and weights are, in few launches and without synchronising host and device."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.parameters import trained_parameters
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
