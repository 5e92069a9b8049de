"""The mean loss of a round, gathered without synchronising host and device."""

from __future__ import annotations

from numbers import Real

import torch
from torch import Tensor

from hdet.errors import ArgumentError

__all__ = ["LossMeter"]


class LossMeter:
    """Sums losses: numbers and CPU tensors on the host, others on their own device.

    A value is copied at once, since the caller may reuse the tensor.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything: a new round begins."""
        self.count = 0
        self._on_host = 0.0
        self._on_device: dict[torch.device, Tensor] = {}

    def add(self, loss: float | Tensor) -> None:
        """Add one loss: a number or a tensor of one element."""
        if isinstance(loss, Tensor):
            if loss.numel() != 1 or loss.is_complex():
                raise ArgumentError(
                    f"a loss must be one real number, but got a tensor of shape {tuple(loss.shape)}, {loss.dtype}; "
                    "reduce it first, for instance loss.mean()"
                )
            if loss.is_cpu:
                self._on_host += loss.item()
            else:
                self._add_on_device(loss)
        elif isinstance(loss, Real):
            self._on_host += float(loss)
        else:
            raise ArgumentError(
                f"a loss must be a number or a tensor of one element, but got {loss!r}; "
                "pass the loss itself, or call step() without an argument"
            )
        self.count += 1

    def mean(self, device: torch.device) -> Tensor:
        """Mean of what was added, a float64 scalar on ``device``; NaN if nothing was. Does not synchronise."""
        total = torch.full((), self._on_host, dtype=torch.float64, device=device)  # unlike tensor(): no synchronising
        for part in self._on_device.values():
            total = total + part.to(device)
        return total / self.count if self.count else torch.full_like(total, torch.nan)

    def _add_on_device(self, loss: Tensor) -> None:
        value = loss.detach().reshape(()).double()
        total = self._on_device.get(loss.device)
        if total is None:
            self._on_device[loss.device] = value.clone()  # double() of a double is the caller's own memory
        else:
            total.add_(value)
