"""Learning rates in an optimizer: floats or tensors, and each stays what it was."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["Rate", "as_type_of", "copy_rate", "put_rate", "shared_rates", "stands_still"]

Rate = float | Tensor


def put_rate(group: dict[str, Any], rate: Rate) -> None:
    """Write a rate into a param group: in place where it is a tensor."""
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def copy_rate(rate: Rate) -> Rate:
    """A rate that does not change when the optimizer's tensor does."""
    return rate.clone() if isinstance(rate, Tensor) else rate


def as_type_of(example: Rate, rate: Rate) -> Rate:
    """``rate`` as a tensor like ``example``, if that is one."""
    return torch.full_like(example, float(rate)) if isinstance(example, Tensor) else rate


def shared_rates(optimizer: Optimizer) -> list[int]:
    """For each group, the first group whose rate is the same tensor: those must be spread alike.

    torch gives all groups one tensor when the optimizer is built with ``lr=torch.tensor(...)``.
    """
    lrs = [group["lr"] for group in optimizer.param_groups]
    return [next(h for h, other in enumerate(lrs) if h == g or _same(other, lr)) for g, lr in enumerate(lrs)]


def stands_still(optimizer: Optimizer) -> bool:
    """Whether all rates are 0, which is no step. Those on a device are not read.

    To know an optimizer's state, torch.distributed.checkpoint makes such a step before it loads the weights.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    return all((not isinstance(rate, Tensor) or rate.is_cpu) and rate == 0 for rate in rates)


def _same(a: Rate, b: Rate) -> bool:
    return isinstance(a, Tensor) and a is b
