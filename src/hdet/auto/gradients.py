"""Gradients as an optimizer reads them before it makes a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from hdet.distributed.shards import local_gradient
from hdet.parameters import parts_of

__all__ = ["Reading"]


class Reading(NamedTuple):
    """What an optimizer makes of the gradients that its parameters hold."""

    turned: frozenset[int] = frozenset()
    """Ids of the parameters that are to go up along them: ``maximize=True``."""
    scale: Tensor | None = None
    """What a GradScaler has multiplied them by: torch hands it to fused optimizers, which divide by themselves."""
    left_out: Tensor | None = None
    """Above 0 where the optimizer will find some that are not finite, and make no step."""

    @classmethod
    def of(cls, optimizer: Optimizer) -> Reading:
        """How the optimizer will read them in the step to come."""
        ascending = (group["params"] for group in optimizer.param_groups if group.get("maximize", False))
        turned = frozenset(id(p) for parameters in ascending for p in parameters)
        scaled = parts_of(optimizer)[0]
        return cls(turned, getattr(scaled, "grad_scale", None), getattr(scaled, "found_inf", None))

    def held(self, parameters: Sequence[Tensor | None]) -> list[Tensor | None]:
        """What parameters hold, with the sign in which the optimizer uses it; None where there is nothing."""
        return [None if p is None else self._gradient(p) for p in parameters]

    def read(self, gradient: Tensor) -> Tensor:
        """Without the scale, and zero where there will be no step. Does not synchronise."""
        if self.scale is not None:
            gradient = gradient / self.scale.to(gradient.device, non_blocking=True)
        if self.left_out is not None:
            gradient = torch.where(self.left_out.to(gradient.device, non_blocking=True) > 0, 0.0, gradient)
        return gradient

    def _gradient(self, p: Tensor) -> Tensor | None:
        gradient = local_gradient(p)
        if gradient is None:
            return None
        dense = gradient.to_dense() if gradient.is_sparse else gradient
        return -dense if id(p) in self.turned else dense
