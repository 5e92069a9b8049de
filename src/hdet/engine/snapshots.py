"""The round-mean weights: a running mean of a few evenly spaced snapshots of a round, in fp32."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

__all__ = ["RoundMean", "kept", "wide", "write_"]


class RoundMean:
    """Takes snapshots of parameters at evenly spaced steps. One fp32 copy of the parameters.

    Args:
        snapshots: at most so many in a round.
    """

    def __init__(self, snapshots: int = 32) -> None:
        self._snapshots = snapshots
        self._mean: list[Tensor] = []
        self._count = 0

    def is_due(self, step: int, length: int) -> bool:
        """Whether step 1..length of a round of ``length`` steps is one of its snapshots; the last one always is.

        >>> mean = RoundMean()
        >>> [s for s in range(1, 101) if mean.is_due(s, 100)][:4], mean.is_due(100, 100)
        ([4, 7, 10, 13], True)
        """
        taken = min(length, self._snapshots)
        return step * taken // length > (step - 1) * taken // length

    @torch.no_grad()
    def add(self, parameters: Sequence[Tensor]) -> None:
        """One more snapshot."""
        if self._count == 0:
            self._mean = [wide(p) for p in parameters]
        self._count += 1
        now = [p.detach().to(mean.dtype) for mean, p in zip(self._mean, parameters, strict=True)]
        torch._foreach_lerp_(self._mean, now, 1.0 / self._count)

    def reset(self) -> None:
        """A new round begins."""
        self._mean, self._count = [], 0

    @property
    def weights(self) -> list[Tensor] | None:
        """The mean so far, or None before the first snapshot."""
        return self._mean if self._count else None


@contextmanager
def kept(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Whatever happens to the tensors inside, they are as before afterwards, also after an exception.

    One copy, which is what ``with`` gives.
    """
    own = [t.detach().clone() for t in tensors]
    try:
        yield own
    finally:
        write_(tensors, own)


@torch.no_grad()
def write_(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy values into tensors, in place."""
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)


def wide(p: Tensor) -> Tensor:
    """A zero like ``p``, at least fp32: a bf16 mean would destroy small displacements."""
    dtype = p.dtype if p.is_complex() else torch.promote_types(p.dtype, torch.float32)
    return torch.zeros_like(p, dtype=dtype)
