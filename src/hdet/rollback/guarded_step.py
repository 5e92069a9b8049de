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
from hdet.ranks.shards import Partitioned, local
from hdet.ranks.weights import norm_of

_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
"""Optimizers of torch whose fused kernels leave a step out, state and all, if a tensor on the device says so."""


def skips_on_device(optimizer: Optimizer) -> bool:
    """Whether a step can be left out without waiting for the device, as GradScaler has it done.

    A first step has no state yet, and that of SGD would leave its momentum uninitialised (torch 2.13).
    """
    groups = optimizer.param_groups
    if not isinstance(optimizer, _FUSED) or not all(group.get("fused") for group in groups):
        return False
    with_momentum = (p for group in groups if group.get("momentum") for p in group["params"] if p.grad is not None)
    return all(p in optimizer.state for p in with_momentum)


@torch.no_grad()
def gradient_norm(optimizer: Optimizer) -> Tensor | None:
    """The 2-norm of the gradients that this rank holds, as a scalar on their device; None if there are none.

    On a device, where each tensor takes time, only matrices are measured: if a gradient is NaN, infinite or far too
    large, it is so in most layers. A scale that a fused step will divide by is taken out. If ranks hold partitions, it
    is that of all ranks' gradients.
    """
    if isinstance(optimizer, Partitioned) and (known := optimizer.gradient_norm()) is not None:
        return known
    held = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    measured = [gradient for gradient in held if gradient.is_cpu or gradient.dim() > 1] or held
    norm = norm_of([one if type(one) is Tensor and not one.is_sparse else _held(one) for one in measured], 2.0)
    scale = getattr(optimizer, "grad_scale", None)
    return norm if norm is None or scale is None else norm / scale.to(norm.device)


def skipped_by_scaler(optimizer: Optimizer) -> Tensor | None:
    """Above 0 if a GradScaler has this step left out by the optimizer's fused kernels; None if it takes no part."""
    found: Tensor | None = getattr(optimizer, "found_inf", None)
    return found


@torch.no_grad()
def largest(tensors: Iterable[Tensor]) -> Tensor | None:
    """The largest absolute value of what this rank holds of some tensors; NaN if there is one, None if there are none.

    >>> largest([torch.tensor([1.0, -3.0]), torch.tensor([2.0])])
    tensor(3.)
    """
    return norm_of([local(tensor) for tensor in tensors], math.inf)


def _held(gradient: Tensor) -> Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else local(gradient)


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


class StepChanges:
    """What a guard changes for the time of one step, which :meth:`undo` restores."""

    def __init__(self) -> None:
        self._rates: list[tuple[dict[str, Any], Rate, Rate]] = []
        """Parameter groups with their own rate and the one that stands there now."""
        self._gradients: list[tuple[Tensor, Tensor]] = []
        self._skipping: tuple[Optimizer, Tensor | None] | None = None
        """An optimizer, and what its scaler had told it."""

    @property
    def are_there(self) -> bool:
        """Whether something has not been restored yet."""
        return bool(self._rates or self._gradients or self._skipping)

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
    def skip_above(self, optimizer: Optimizer, norm: Tensor, limit: float) -> None:
        """Have the optimizer's fused kernels leave the step out if the norm is above the limit, NaN or infinite."""
        scaler = skipped_by_scaler(optimizer)
        skip = (norm <= limit).logical_not().to(torch.float32)
        self._skipping = optimizer, scaler
        optimizer.found_inf = skip if scaler is None else torch.maximum(skip, scaler.to(skip))  # type: ignore[attr-defined]

    @torch.no_grad()
    def undo(self) -> None:
        """Restore rates and gradients, bit by bit. A rate that was written by someone else since then stays."""
        for group, own, lent in self._rates:
            if isinstance(own, Tensor):
                group["lr"].copy_(torch.where(group["lr"] == lent, own, group["lr"]))
            elif group["lr"] == lent:
                group["lr"] = own
        for p, gradient in self._gradients:
            p.grad = gradient
        if self._skipping is not None:
            optimizer, scaler = self._skipping
            if scaler is not None:
                optimizer.found_inf = scaler  # type: ignore[attr-defined]
            elif hasattr(optimizer, "found_inf"):
                del optimizer.found_inf
        self._rates, self._gradients, self._skipping = [], [], None
