"""Which tensors are averaged, and what a replica can say about them without sending them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.errors import ShardedParametersError

__all__ = ["Weights", "collect", "refuse_sharded"]


class Weights(NamedTuple):
    """The tensors of one replica that converge averages, each once."""

    moving: list[Tensor]
    """Trained parameters and float buffers."""
    still: list[Tensor]
    """Frozen parameters: expected to be equal, averaged only if they are not."""

    @property
    def tensors(self) -> list[Tensor]:
        return self.moving + self.still

    @property
    def device(self) -> torch.device:
        """Where numbers about the weights are put together."""
        tensors = self.tensors
        return tensors[0].device if tensors else torch.device("cpu")

    def all_finite(self) -> Tensor:
        """1.0 or 0.0 as a float64 scalar on :attr:`device`. One read of the weights; does not synchronise."""
        extremes = [part.to(self.device) for tensor in self.tensors if tensor.numel() for part in _extremes(tensor)]
        if not extremes:
            return torch.ones((), dtype=torch.float64, device=self.device)
        return torch.stack(extremes).isfinite().all().double()


def collect(optimizer: Optimizer, model: nn.Module | None) -> Weights:
    """The optimizer's parameters and, with a model, its parameters and buffers too. Integers are left out."""
    seen: dict[int, Tensor] = {}
    for tensor in _candidates(optimizer, model):
        if tensor.is_floating_point() or tensor.is_complex():
            seen.setdefault(id(tensor), tensor)
    still: list[Tensor] = [t for t in seen.values() if isinstance(t, nn.Parameter) and not t.requires_grad]
    frozen = {id(t) for t in still}
    return Weights([t for key, t in seen.items() if key not in frozen], still)


def refuse_sharded(tensors: Iterable[Tensor]) -> None:
    """Raise if some parameter is only a shard: the mean over all ranks would mix different pieces of it."""
    for number, tensor in enumerate(tensors):
        kind = _sharding_of(tensor)
        if kind is not None:
            raise ShardedParametersError(
                f"parameter number {number} of shape {tuple(tensor.shape)} is sharded ({kind}), and the replica group "
                "spans the ranks that share it: averaging over them would corrupt the weights. Replicas must hold "
                "whole parameters: use DistributedDataParallel, or torch's own OneCycleLR with sharded training"
            )


def _candidates(optimizer: Optimizer, model: nn.Module | None) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
    if model is not None:
        yield from model.parameters()
        yield from model.buffers()


def _extremes(tensor: Tensor) -> Iterator[Tensor]:
    """Smallest and largest element: NaN if there is one, so both finite means all finite."""
    real = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    for extreme in torch.aminmax(real):
        yield extreme.double()


def _sharding_of(tensor: Tensor) -> str | None:
    # By name: importing DTensor or FSDP takes a second that most users need not wait.
    for kind in type(tensor).__mro__:
        if kind.__name__ in ("DTensor", "FlatParameter", "ShardedTensor"):
            return kind.__name__
    return "FSDP" if getattr(tensor, "_fsdp_flattened", False) else None
