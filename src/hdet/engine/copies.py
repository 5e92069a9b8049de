"""Copies of tensors, and writing them back in place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

__all__ = ["put_back", "wide", "write_"]


@contextmanager
def put_back(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Whatever happens to the tensors inside, they are as before afterwards, also after an exception.

    One copy, which is what ``with`` gives.
    """
    own = [t.detach().clone() for t in tensors]
    try:
        yield own
    finally:
        write_(tensors, own)


@torch.no_grad()
def write_(tensors: Sequence[Tensor], values: Iterable[Tensor]) -> None:
    """Copy values into tensors, in place.

    Inside ``torch.autocast`` the casts of earlier weights are cached, and forward passes would go on using them: the
    cache is cleared.
    """
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)
    torch.clear_autocast_cache()


def wide(p: Tensor) -> Tensor:
    """A zero like ``p``, at least fp32: a bf16 mean would destroy small displacements."""
    dtype = p.dtype if p.is_complex() else torch.promote_types(p.dtype, torch.float32)
    return torch.zeros_like(p, dtype=dtype)
