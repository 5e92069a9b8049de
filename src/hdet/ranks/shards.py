"""Shards: tensors of which each rank holds a part, and optimizers whose parameters are such parts.

A shard is a DTensor, or a plain tensor that its maker has marked. Here is which part a rank holds, how numbers that
ranks have measured on their parts are put together, and which kinds of sharding are refused.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.errors import ShardedParametersError
from hdet.frameworks import partitioner

PLAIN = (Tensor, nn.Parameter)
"""Types of tensors of which this rank holds everything."""
_MARK = "_hdet_part"


def is_distributed(tensor: Tensor) -> TypeGuard[Any]:
    """Whether it is a DTensor. Does not import DTensor, which takes a second: unless it is imported there are none."""
    if type(tensor) in PLAIN:
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a DTensor, in the same memory and without history; a plain tensor itself."""
    if not is_distributed(tensor):
        return tensor
    with torch.no_grad():
        held: Tensor = tensor.to_local()
    return held.detach()


def local_gradient(p: Tensor) -> Tensor | None:
    """The gradient of what this rank holds of a parameter. Collective if gradients are not summed yet.

    Those of a replicated weight in a tensor-parallel model may not be.
    """
    if p.grad is None or not is_distributed(p):
        return p.grad
    gradient: Any = p.grad
    if gradient.placements != p.placements:
        gradient = gradient.redistribute(p.device_mesh, p.placements)
    return local(gradient)


def rewrapped(held: Tensor, like: Tensor) -> Tensor:
    """What this rank holds, as a part of a tensor that is distributed as ``like``, if its shape fits that."""
    if not is_distributed(like) or held.shape != local(like).shape:
        return held
    made: Tensor = type(like).from_local(
        held, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return made


def place(tensor: Tensor) -> str:
    """The part that this rank holds, as a text: equal on all ranks with the same part, empty if it is everything."""
    if not is_distributed(tensor):
        return getattr(tensor, _MARK, "")
    mesh = tensor.device_mesh
    at = mesh.get_coordinate() or [-1] * mesh.ndim
    names = mesh.mesh_dim_names or range(mesh.ndim)
    dimensions = zip(names, tensor.placements, at, mesh.shape, strict=True)
    return ", ".join(
        f"{placement} of {name}, {coordinate} of {size}"
        for name, placement, coordinate, size in dimensions
        if not placement.is_replicate()
    )


def mark_part(tensor: Tensor, words: str) -> None:
    """Mark a plain tensor as this rank's part of something: :func:`place` then returns ``words``."""
    setattr(tensor, _MARK, words)


def counted_once(rows: Iterable[Sequence[float]], width: int) -> list[list[float]]:
    """Numbers that ranks have measured on their parts of something; ranks with the same part count once.

    Args:
        rows: one for each rank, made of blocks; the first number of a block says which part was measured.
        width: length of a block.

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


def _is_flat(tensor: Tensor) -> bool:
    """Whether FSDP1 has flattened it, so that a rank cannot tell which numbers it holds."""
    return getattr(tensor, "_fsdp_flattened", False)


def refuse_flat(tensors: Iterable[Tensor]) -> None:
    """Raise for the weights of FSDP1."""
    if any(map(_is_flat, tensors)):
        raise ShardedParametersError(
            "the parameters belong to FullyShardedDataParallel (FSDP1), which flattens weights; use FSDP2: "
            "torch.distributed.fsdp.fully_shard(model) before the optimizer is built"
        )


def is_sharded(tensor: Tensor) -> bool:
    """Whether a rank holds a part of it: a DTensor, one that is marked, or one that :func:`refuse_flat` refuses."""
    return is_distributed(tensor) or bool(place(tensor)) or _is_flat(tensor)


class Partitioned(Optimizer):
    """An optimizer whose parameters are not the model's own: partitions of them, or copies in a higher precision.

    Only the optimizer inside is stepped, and calls hooks; it may make its step in parts, some parameters after the
    others, and calls its hooks for each part. This one hears of that, and must not be stepped itself.
    """

    inside: Optimizer
    """The optimizer that makes the steps."""
    stepping: frozenset[int] = frozenset()
    """Ids of the parameters of the coming part."""
    continues: bool = False
    """Whether the coming part belongs to the same step as the one before it."""
    _hears = False

    def hear_of_step(self) -> None:
        """Call it when a step is made: torch's schedulers watch whether ``step`` is called, and would warn."""
        self._hears = True
        try:
            self.step()
        finally:
            self._hears = False

    def step(self, closure: Any = None) -> Any:
        """Refused, unless it is called by :meth:`hear_of_step`."""
        if not self._hears:
            self.refuse_step()

    def refuse_step(self) -> None:
        """Raise an error that says what to step."""
        raise NotImplementedError

    def refresh(self) -> None:
        """Copy the parameters to where the model's forward pass reads. Collective."""
        raise NotImplementedError

    def gradient_norm(self) -> Tensor | None:
        """When a step begins: the norm of the gradients of all its parts and ranks. None: each rank has them whole."""
        raise NotImplementedError


def refresh(optimizer: Optimizer) -> None:
    """Call it after weights were written, so that the model uses them. Collective if the optimizer holds partitions."""
    if isinstance(optimizer, Partitioned):
        optimizer.refresh()


def is_continued(optimizer: Optimizer) -> bool:
    """Whether a hook is called for a further part of a step that has begun."""
    return isinstance(optimizer, Partitioned) and optimizer.continues


def stepping_now(optimizer: Optimizer, parameters: Sequence[Tensor]) -> list[Tensor | None]:
    """The parameters of the coming part, which hold its gradients; None in place of the others."""
    if not isinstance(optimizer, Partitioned):
        return list(parameters)
    return [p if id(p) in optimizer.stepping else None for p in parameters]


def refuse_partitions(optimizer: Optimizer, purpose: str, why: str) -> None:
    """Raise if a framework has put partitions or copies in place of the model's parameters: none is an nn.Parameter.

    Args:
        optimizer: the user's.
        purpose: "search", "replicas" or "guard", for the cure.
        why: what would go wrong.
    """
    framework = partitioner()
    if framework is None or isinstance(optimizer, Partitioned):
        return
    found = [p for group in optimizer.param_groups for p in group["params"]]
    if found and all(isinstance(p, nn.Parameter) for p in found):
        return
    raise ShardedParametersError(
        f"the optimizer holds {len(found)} tensors in place of the model's parameters, {framework.cases}: {why}; "
        f"{framework.cures[purpose]}"
    )


def reshard(model: nn.Module | None) -> None:
    """Free the weights that FSDP2 has gathered, so that the next forward pass gathers the shards as they are then.

    FSDP2 does not do it itself in a forward pass without gradients: the root module keeps its own weights.
    """
    for module in [] if model is None else model.modules():
        _reshard(module)


def reshard_all() -> None:
    """Free them in every module of this process, which torch has in a private list: for callers without the model."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or not fsdp.FSDPModule.__subclasses__():  # fully_shard makes one for each class that it wraps
        return
    try:
        known = list(sys.modules["torch.distributed._composable_state"]._module_state_mapping)
    except (AttributeError, KeyError):
        raise ShardedParametersError(
            f"hdet does not find FSDP2's modules in torch {torch.__version__}, and weights that they have gathered "
            "would stay as they were before the roll back; give the scheduler, or the guard, model="
        ) from None
    for module in known:
        _reshard(module)


def _reshard(module: nn.Module) -> None:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # unless it is imported, there is nothing to do
    if fsdp is not None and isinstance(module, fsdp.FSDPModule):
        module.reshard()


@contextmanager
def resharded(model: nn.Module | None) -> Iterator[None]:
    """Forward passes inside, and those afterwards, read the shards as they are at that time."""
    reshard(model)
    try:
        yield
    finally:
        reshard(model)
