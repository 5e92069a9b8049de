"""Partitions: the flat tensors that DeepSpeed puts in the place of an optimizer's parameters, each rank its own.

They are known without importing DeepSpeed. Nothing in a partition tells that it is one: it has the shape of those of
other ranks, and other numbers.
"""

from __future__ import annotations

import sys

from torch import nn
from torch.optim import Optimizer

from hdet.errors import ShardedParametersError

__all__ = ["refuse_partitions"]


def refuse_partitions(optimizer: Optimizer, why: str) -> None:
    """Raise if the optimizer holds partitions; ``why`` says what would go wrong, and what to do.

    DeepSpeed calls a scheduler that is given as a function with the user's own optimizer, after the parameters in it
    were replaced: by partitions of ZeRO 1 and 2, by nothing between steps in ZeRO 3, by fp32 copies of a model in half
    precision. None of them is a module's parameter.
    """
    if "deepspeed" not in sys.modules:
        return
    found = [p for group in optimizer.param_groups for p in group["params"]]
    if found and all(isinstance(p, nn.Parameter) for p in found):
        return
    shapes = [tuple(p.shape) for p in found if not isinstance(p, nn.Parameter)]
    raise ShardedParametersError(
        f"the optimizer holds {f'tensors of the shapes {shapes[:4]}' if shapes else 'no parameters'} where the model's "
        f"parameters were, as DeepSpeed's ZeRO stages 1, 2 and 3 and its half precision have it: {why}"
    )
