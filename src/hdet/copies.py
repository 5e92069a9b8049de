"""Copies of tensors, which may be sharded: made, written and restored in few launches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hdet.checks import shown
from hdet.ranks.shards import local


def remade(example: Any, items: Iterable[Any]) -> Any:
    """Other items in a list or tuple of the example's class. One with names takes them one by one.

    >>> remade(("a", "b"), [1, 2])
    (1, 2)
    """
    return type(example)(*items) if hasattr(example, "_fields") else type(example)(items)


def copies_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """A copy of each, on its own device, in few launches."""
    plain = [local(tensor).detach() for tensor in tensors]
    own = [torch.empty_like(tensor) for tensor in plain]
    copy_all_(zip(own, plain, strict=True))
    return own


@torch.no_grad()
def copy_all_(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy the second of each pair into the first: a few launches for those of one device and kind. None is sharded.

    If memory of the host is pinned, nothing waits for copies between it and a device: wait for the device before you
    read them on the host. Other copies are there at once, on every kind of device.
    """
    alike: dict[tuple[torch.device, torch.device, torch.dtype, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in pairs:
        targets, sources = alike.setdefault((target.device, source.device, target.dtype, source.dtype), ([], []))
        targets.append(target)
        sources.append(source)
    for (device, other, *_), (targets, sources) in alike.items():
        if device == other:
            torch._foreach_copy_(targets, sources)
            continue
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source, non_blocking=target.is_pinned() or source.is_pinned())


@torch.no_grad()
def write_(tensors: Sequence[Tensor], values: Iterable[Tensor]) -> None:
    """Copy values into tensors, in place.

    Inside ``torch.autocast`` the casts of earlier weights are cached, and forward passes would go on using them: the
    cache is cleared.
    """
    copy_all_(zip(map(local, tensors), map(local, values), strict=True))
    torch.clear_autocast_cache()


@contextmanager
def put_back(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Restore the tensors afterwards, also after an exception. ``with`` gives the copy that is held meanwhile."""
    own = copies_of(tensors)
    try:
        yield own
    finally:
        write_(tensors, own)


def refuse_other_shapes(parameters: Sequence[Tensor], saved: Sequence[Tensor]) -> None:
    """Raise ValueError unless saved tensors have the shapes of what this rank holds of their parameters."""
    shapes = [[tuple(local(t).shape) for t in tensors] for tensors in (parameters, saved)]
    if shapes[0] != shapes[1]:
        raise ValueError(f"it holds tensors of shapes {shown(shapes[1])} for parameters of shapes {shown(shapes[0])}")


def wide(p: Tensor) -> Tensor:
    """A zero like ``p``, at least fp32: a bf16 mean would destroy small displacements."""
    dtype = p.dtype if p.is_complex() else torch.promote_types(p.dtype, torch.float32)
    return torch.zeros_like(local(p).detach(), dtype=dtype)
