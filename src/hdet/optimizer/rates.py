"""Rates: a parameter group's ``lr`` is a number, or a tensor that is written in place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

Rate = float | Tensor


def put_rate(group: dict[str, Any], rate: Rate) -> None:
    """Write a rate into a parameter group: in place if it is a tensor."""
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate.squeeze() if isinstance(rate, Tensor) else rate)
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
    return [
        next(h for h, other in enumerate(lrs) if h == g or (isinstance(lr, Tensor) and other is lr))
        for g, lr in enumerate(lrs)
    ]
