"""The weights that an optimizer evaluates, where they are others than those it trains: Schedule-Free keeps both."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

__all__ = ["evaluated", "evaluates_others"]


def evaluates_others(optimizer: Optimizer) -> bool:
    """Whether the parameters hold other weights now than those that the optimizer evaluates."""
    switches = callable(getattr(optimizer, "eval", None))
    return switches and any(group.get("train_mode") for group in optimizer.param_groups)


@contextmanager
def evaluated(optimizer: Optimizer) -> Iterator[None]:
    """Inside, the parameters hold what the optimizer evaluates: those of Schedule-Free after its ``eval()``."""
    if not evaluates_others(optimizer):
        yield
        return
    switch: Any = optimizer
    switch.eval()
    try:
        yield
    finally:
        switch.train()
