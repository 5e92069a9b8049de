"""Shards: tensors of which each rank holds a part (DTensor, or marked as one), which it is, and sums over all parts."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

__all__ = [
    "counted_once",
    "hold_alike",
    "is_distributed",
    "local",
    "local_gradient",
    "mark_part",
    "place",
    "rewrapped",
]

_PLAIN = (Tensor, nn.Parameter)
_MARK = "_hdet_part"


def is_distributed(tensor: Tensor) -> bool:
    """Whether it is a DTensor. Where nobody has imported them there are none: importing takes a second."""
    if type(tensor) in _PLAIN:
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a DTensor, in the same memory and without history. A plain tensor is given back."""
    if not is_distributed(tensor):
        return tensor
    whole: Any = tensor
    with torch.no_grad():
        held: Tensor = whole.to_local()
    return held.detach()


def local_gradient(p: Tensor) -> Tensor | None:
    """The gradient of what this rank holds of a parameter. Collective where gradients are not summed yet.

    Those of a replicated weight in a tensor-parallel model may not be.
    """
    if p.grad is None or not is_distributed(p):
        return p.grad
    sharded: Any = p
    gradient = sharded.grad
    if gradient.placements != sharded.placements:
        gradient = gradient.redistribute(sharded.device_mesh, sharded.placements)
    return local(gradient)


def rewrapped(held: Tensor, like: Tensor) -> Tensor:
    """What this rank holds, as a part of a tensor that is distributed as ``like``, where shapes say that it is one."""
    if not is_distributed(like) or held.shape != local(like).shape:
        return held
    whole: Any = like
    made: Tensor = type(whole).from_local(
        held, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
    return made


def place(tensor: Tensor) -> str:
    """Which part this rank holds, in words: equal on all ranks that hold the same; empty where that is everything."""
    if not is_distributed(tensor):
        return getattr(tensor, _MARK, "")
    whole: Any = tensor
    mesh = whole.device_mesh
    at = mesh.get_coordinate() or [-1] * mesh.ndim
    names = mesh.mesh_dim_names or range(mesh.ndim)
    dimensions = zip(names, whole.placements, at, mesh.shape, strict=True)
    return ", ".join(
        f"{placement} of {name}, {coordinate} of {size}"
        for name, placement, coordinate, size in dimensions
        if not placement.is_replicate()
    )


def mark_part(tensor: Tensor, words: str) -> None:
    """A plain tensor is this rank's part of something, as only its maker knows: :func:`place` tells it by ``words``."""
    setattr(tensor, _MARK, words)


def hold_alike(members: Sequence[Sequence[int]], held: Sequence[float]) -> bool:
    """Whether each replica as a whole holds the same parts. ``held[rank]``: a number for that rank's.

    >>> hold_alike([[0], [1]], [5.0, 7.0]), hold_alike([[0, 1], [2, 3]], [5.0, 7.0, 5.0, 7.0])
    (False, True)
    """
    return len({tuple(sorted(held[rank] for rank in ranks)) for ranks in members}) == 1


def counted_once(rows: Iterable[Sequence[float]], width: int) -> list[list[float]]:
    """Numbers that ranks have measured on their parts of something: those of equal parts count once.

    Args:
        rows: one for each rank, made of blocks; the first number of a block says which part was measured.
        width: of a block.

    Returns:
        for each of the other numbers in a block, its values.

    >>> counted_once([[1.0, 3.0], [1.0, 3.0], [2.0, 4.0]], 2)
    [[3.0, 4.0]]
    """
    blocks: dict[tuple[int, float], Sequence[float]] = {}
    for row in rows:
        for begin in range(0, len(row), width):
            part, *numbers = row[begin : begin + width]
            blocks.setdefault((begin, part), numbers)
    return [list(values) for values in zip(*blocks.values(), strict=True)]
