"""Sharded models: what cannot be handled, and is refused by name with a cure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from hdet.distributed.shards import is_distributed
from hdet.errors import ShardedParametersError

__all__ = ["check_sharded", "refuse_flat", "refuse_sharded"]


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


def refuse_sharded(tensors: Iterable[Tensor], what: str) -> None:
    """Raise for any shard, where ``what`` needs whole weights."""
    found = list(tensors)
    refuse_flat(found)
    for number, tensor in enumerate(found):
        if is_distributed(tensor):
            raise ShardedParametersError(
                f"{what} needs whole weights, but parameter number {number} of shape {tuple(tensor.shape)} is sharded "
                "(DTensor); call it before fully_shard or parallelize_module, or leave it out"
            )
