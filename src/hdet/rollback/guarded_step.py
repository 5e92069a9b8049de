"""One step of an optimizer under a guard: what is measured before it, and what is changed while it is made.

Gradients, weights and optimizer state are measured in few launches and without synchronising host and device. For the
time of the step rates may be lowered, and gradients hidden from the optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hdet.errors import ArgumentError
from hdet.optimizer.groups import trained_parameters
from hdet.optimizer.hooks import is_capturing, stands_still
from hdet.optimizer.rates import Rate, copy_rate, shared_rates
from hdet.ranks.shards import Partitioned, is_continued, local
from hdet.ranks.weights import norm_of

__all__ = ["NO_CAPTURE", "GuardedStep", "gradient_norm", "is_float", "largest", "memory_of"]

NO_CAPTURE = (
    "a step that is replayed from a CUDA graph calls no hook, so its rate could not be lowered. Capture forward and "
    "backward only, and call optimizer.step() outside the graph"
)
_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
"""Optimizers of torch whose fused kernels leave a step out, state and all, if a tensor on the device says so."""


class GuardedStep:
    """The step that an optimizer is making, and what is changed until it is over.

    Args:
        optimizer: whose steps they are.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._begun = self._withheld = -1
        """The step that is being made, and the last one whose gradients were hidden. -1: none is."""
        self._rates: list[tuple[dict[str, Any], Rate, Rate]] = []
        """Parameter groups with their own rate and the one that stands there now."""
        self._gradients: list[tuple[Tensor, Tensor]] = []
        """Parameters and the gradients that are hidden."""
        self._skips = False
        """Whether the optimizer's kernels were told when to leave the step out."""
        self._scaler: Tensor | None = None
        """What a GradScaler had told them."""

    def begins(self, t: int, factor: float) -> bool:
        """Lower the rates for step ``t``. Returns whether its gradients are to be measured.

        They are measured once, although a step may call the hooks several times: an optimizer's own step may call that
        of its base class, and an engine may step one part of the parameters after the other.
        """
        if is_capturing(self._optimizer):
            raise ArgumentError(f"optimizer.step() was captured under a hdet.Guard, but {NO_CAPTURE}")
        if stands_still(self._optimizer) or self._rates or self._gradients or self._skips or self._begun == t:
            return False
        if factor != 1:
            self._lower_rates(factor)
        if is_continued(self._optimizer):
            if self._withheld == t:
                self.withhold(t)
            return False
        self._begun = t
        return True

    @torch.no_grad()
    def _lower_rates(self, factor: float) -> None:
        """Multiply the rates. Groups may share one tensor."""
        first = shared_rates(self._optimizer)
        for group in (group for g, group in enumerate(self._optimizer.param_groups) if first[g] == g):
            own = copy_rate(group["lr"])
            if isinstance(group["lr"], Tensor):
                group["lr"].mul_(factor)
            else:
                group["lr"] *= factor
            self._rates.append((group, own, copy_rate(group["lr"])))

    def withhold(self, t: int) -> None:
        """Hide the gradients of step ``t``: every optimizer leaves parameters without gradients alone."""
        self._withheld = t
        self._gradients = [(p, p.grad) for p in trained_parameters(self._optimizer) if p.grad is not None]
        for p, _ in self._gradients:
            p.grad = None

    @property
    def can_be_skipped(self) -> bool:
        """Whether the optimizer's kernels can leave a step out by themselves, as GradScaler has it done.

        A first step has no state yet, and that of SGD would leave its momentum uninitialised (torch 2.13).
        """
        optimizer, groups = self._optimizer, self._optimizer.param_groups
        if not isinstance(optimizer, _FUSED) or not all(group.get("fused") for group in groups):
            return False
        with_momentum = (p for group in groups if group.get("momentum") for p in group["params"] if p.grad is not None)
        return all(p in optimizer.state for p in with_momentum)

    @property
    def skipped_by_scaler(self) -> Tensor | None:
        """Above 0 if a GradScaler has the optimizer's kernels leave this step out. None: it takes no part."""
        return getattr(self._optimizer, "found_inf", None)

    @torch.no_grad()
    def skip_above(self, norm: Tensor, limit: float) -> None:
        """Have the optimizer's kernels leave the step out if the norm is above the limit, NaN or infinite."""
        self._skips, self._scaler = True, self.skipped_by_scaler
        skip = (norm <= limit).logical_not().to(torch.float32)
        if self._scaler is not None:
            skip = torch.maximum(skip, self._scaler.to(skip))
        self._optimizer.found_inf = skip  # type: ignore[attr-defined]

    @torch.no_grad()
    def ends(self) -> None:
        """Restore rates and gradients, bit by bit. A rate that was written by someone else since then stays."""
        for group, own, lowered in self._rates:
            if isinstance(own, Tensor):
                group["lr"].copy_(torch.where(group["lr"] == lowered, own, group["lr"]))
            elif group["lr"] == lowered:
                group["lr"] = own
        for p, gradient in self._gradients:
            p.grad = gradient
        if self._scaler is not None:
            self._optimizer.found_inf = self._scaler  # type: ignore[attr-defined]
        elif self._skips and hasattr(self._optimizer, "found_inf"):
            del self._optimizer.found_inf
        self._rates, self._gradients, self._skips, self._scaler, self._begun = [], [], False, None, -1


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
    return [v for state in states for v in state.values() if isinstance(v, Tensor) and v.dim() and is_float(v)]


def is_float(tensor: Tensor) -> bool:
    """Whether its numbers can be NaN."""
    return tensor.is_floating_point() or tensor.is_complex()
