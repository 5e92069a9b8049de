"""Shards: tensors of which each rank holds a part (DTensor, or marked as one), which it is, and sums over all parts."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.errors import ShardedParametersError

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


def refuse_flat(tensors: Iterable[Tensor]) -> None:
    """Raise for weights of which a rank cannot tell which numbers it holds: those of FSDP1."""
    for number, tensor in enumerate(tensors):
        kinds = {kind.__name__ for kind in type(tensor).__mro__}
        if "FlatParameter" in kinds or getattr(tensor, "_fsdp_flattened", False):
            raise ShardedParametersError(
                f"parameter number {number} of shape {tuple(tensor.shape)} belongs to FullyShardedDataParallel "
                "(FSDP1), which flattens weights before it shards them; use FSDP2: "
                "torch.distributed.fsdp.fully_shard(model) before the optimizer is built"
            )
        if "ShardedTensor" in kinds:
            raise ShardedParametersError(
                f"parameter number {number} is a ShardedTensor; use a DTensor, for instance by "
                "torch.distributed.tensor.distribute_tensor"
            )


def check_sharded(tensors: Iterable[Tensor], *, model_is_missing: bool) -> None:
    """Raise for shards that cannot be handled, and for shards of a model that must be known and is not."""
    found = list(tensors)
    refuse_flat(found)
    for number, tensor in enumerate(found):
        if not is_distributed(tensor):
            continue
        whole: Any = tensor
        if any(placement.is_partial() for placement in whole.placements):
            raise ShardedParametersError(
                f"parameter number {number} has the placements {whole.placements}: partial sums are no weights; "
                "redistribute it to Shard or Replicate before the optimizer is built"
            )
        if model_is_missing:
            raise ShardedParametersError(
                f"parameter number {number} of shape {tuple(tensor.shape)} is sharded (DTensor), and FSDP2's modules "
                "must be told when their weights are changed; give the model: model=model"
            )


def is_sharded(tensor: Tensor) -> bool:
    """Whether a rank holds a part of it: a DTensor, one that is marked, or one that :func:`refuse_flat` refuses."""
    kinds = {kind.__name__ for kind in type(tensor).__mro__}
    is_flat = bool(kinds & {"FlatParameter", "ShardedTensor"}) or getattr(tensor, "_fsdp_flattened", False)
    return is_distributed(tensor) or bool(place(tensor)) or is_flat


class Partitioned(Optimizer):
    """An optimizer whose parameters are not the model's own: partitions of them, or copies in a higher precision.

    Such an optimizer may make its step in parts, some parameters after the others. Each part is told of.
    """

    stepping: frozenset[int] = frozenset()
    """Ids of the parameters that the part to come is of."""
    continues: bool = False
    """Whether the part to come belongs to the same step as the one before it."""

    def refresh(self) -> None:
        """Bring what stands in the parameters to where the model's forward pass reads. Collective."""
        raise NotImplementedError


def refresh(optimizer: Optimizer) -> None:
    """After weights were written: have the model see them. Collective where the optimizer holds partitions."""
    if isinstance(optimizer, Partitioned):
        optimizer.refresh()


def is_continued(optimizer: Optimizer) -> bool:
    """Whether the step that is told of now is a further part of one that was told of."""
    return isinstance(optimizer, Partitioned) and optimizer.continues


def stepping_now(optimizer: Optimizer, parameters: Sequence[Tensor]) -> list[Tensor | None]:
    """The parameters that the part to come is of, which hold its gradients; None in the place of others."""
    if not isinstance(optimizer, Partitioned):
        return list(parameters)
    return [p if id(p) in optimizer.stepping else None for p in parameters]


def refuse_partitions(optimizer: Optimizer, why: str) -> None:
    """Raise if the optimizer holds partitions; ``why`` says what would go wrong, and what to do.

    DeepSpeed calls a scheduler that is given as a function with the user's own optimizer, after the parameters in it
    were replaced: by partitions of ZeRO 1 and 2, by nothing between steps in ZeRO 3, by fp32 copies of a model in half
    precision. None of them is a module's parameter.
    """
    if "deepspeed" not in sys.modules or isinstance(optimizer, Partitioned):
        return
    found = [p for group in optimizer.param_groups for p in group["params"]]
    if found and all(isinstance(p, nn.Parameter) for p in found):
        return
    shapes = [tuple(p.shape) for p in found if not isinstance(p, nn.Parameter)]
    raise ShardedParametersError(
        f"the optimizer holds {f'tensors of the shapes {shapes[:4]}' if shapes else 'no parameters'} where the model's "
        f"parameters were, as DeepSpeed's ZeRO stages 1, 2 and 3 and its half precision have it: {why}"
    )


def reshard(model: nn.Module | None) -> None:
    """Weights that FSDP2 has gathered are given up: the next forward pass gathers what the shards hold then.

    Without gradients nothing else gives them up: the root module keeps its own after its forward pass.
    """
    _reshard([] if model is None else model.modules())


def reshard_all() -> None:
    """The same for every module of this process, where the model is not known: torch has a list of them for itself."""
    composed = sys.modules.get("torch.distributed._composable_state")
    _reshard(list(getattr(composed, "_module_state_mapping", ())))


def _reshard(modules: Iterable[nn.Module]) -> None:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # where nobody has imported it, there is nothing to do
    if fsdp is None:
        return
    for module in modules:
        if isinstance(module, fsdp.FSDPModule):
            module.reshard()


@contextmanager
def resharded(model: nn.Module | None) -> Iterator[None]:
    """Forward passes inside read the shards as they are, and those afterwards too, whatever is written to them."""
    reshard(model)
    try:
        yield
    finally:
        reshard(model)
