"""Partitions: the flat tensors that DeepSpeed puts in the place of an optimizer's parameters, each rank its own.

They are known without importing DeepSpeed. Nothing in a partition tells that it is one: it has the shape of those of
other ranks, and other numbers.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.errors import ShardedParametersError

__all__ = ["Partitioned", "is_continued", "refresh", "refuse_partitions", "stepping_now"]


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
