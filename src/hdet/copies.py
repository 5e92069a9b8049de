"""Copies of tensors, and writing them back in place. Of a tensor that is shared out over ranks: of this rank's part."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from hdet.distributed.shards import local

__all__ = ["copies_of", "copy_all_", "put_back", "wide", "write_"]


@contextmanager
def put_back(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Whatever happens to the tensors inside, they are as before afterwards, also after an exception.

    One copy, which is what ``with`` gives.
    """
    own = copies_of(tensors)
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
    copy_all_(zip(tensors, values, strict=True))
    torch.clear_autocast_cache()


def copies_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """A copy of each, on its own device, in few launches."""
    plain = [local(tensor).detach() for tensor in tensors]
    own = [torch.empty_like(tensor) for tensor in plain]
    copy_all_(zip(own, plain, strict=True))
    return own


@torch.no_grad()
def copy_all_(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy the second of each pair into the first: a few launches for those of one device and kind.

    Between host and device nothing waits for the copies where host memory is pinned: read them on the device only.
    """
    alike: dict[tuple[torch.device, torch.device, torch.dtype, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in ((local(one), local(other)) for one, other in pairs):
        targets, sources = alike.setdefault((target.device, source.device, target.dtype, source.dtype), ([], []))
        targets.append(target)
        sources.append(source)
    for (device, other, *_), (targets, sources) in alike.items():
        if device == other:
            torch._foreach_copy_(targets, sources)
            continue
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source, non_blocking=True)


def wide(p: Tensor) -> Tensor:
    """A zero like ``p``, at least fp32: a bf16 mean would destroy small displacements."""
    dtype = p.dtype if p.is_complex() else torch.promote_types(p.dtype, torch.float32)
    return torch.zeros_like(local(p).detach(), dtype=dtype)
