"""The mean loss of a round, gathered without synchronising host and device."""

from __future__ import annotations

import math
from numbers import Real

import torch
from torch import Tensor

from hdet.comm.host import to_host
from hdet.errors import ArgumentError

__all__ = ["LossMeter"]


class LossMeter:
    """Sums losses: numbers and CPU tensors on the host, others on their own device.

    A value is copied at once, since the caller may reuse the tensor.
    """

    def __init__(self) -> None:
        self.count, self._ever = 0, False
        self.reset()

    @property
    def ever(self) -> bool:
        """Whether a loss was added in any round."""
        return self._ever or self.count > 0

    def reset(self) -> None:
        """Forget the losses: a new round begins."""
        self._ever = self.ever
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
        elif isinstance(loss, Real) and not isinstance(loss, bool):
            self._on_host += _number(loss)
        else:
            raise ArgumentError(
                f"a loss must be a number or a tensor of one element, but got {loss!r}; "
                "pass the loss itself, or call step() without an argument"
            )
        self.count += 1

    def mean(self) -> float:
        """Mean of what was added; NaN if nothing was. Synchronises host and device if losses lie there."""
        if not self.count:
            return math.nan
        return math.fsum([self._on_host, *to_host(list(self._on_device.values()))]) / self.count

    def _add_on_device(self, loss: Tensor) -> None:
        value = loss.detach().reshape(())
        total = self._on_device.get(loss.device)
        if total is None:
            wide = torch.promote_types(loss.dtype, torch.float32)  # no float64: not every device has it
            self._on_device[loss.device] = value.to(wide, copy=True)
        else:
            total.add_(value)


def _number(loss: Real) -> float:
    try:
        return float(loss)
    except OverflowError:
        raise ArgumentError(
            "a loss must be a number that a float can hold, but got a far larger integer; pass the loss itself"
        ) from None
