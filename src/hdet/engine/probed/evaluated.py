"""The weights that an optimizer evaluates, where they are others than those it trains: Schedule-Free keeps both."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

__all__ = ["evaluated"]


@contextmanager
def evaluated(optimizer: Optimizer) -> Iterator[None]:
    """Inside, the parameters hold what the optimizer evaluates: those of Schedule-Free after its ``eval()``."""
    switch: Any = optimizer
    training = callable(getattr(switch, "eval", None)) and any(g.get("train_mode") for g in optimizer.param_groups)
    if not training:
        yield
        return
    switch.eval()
    try:
        yield
    finally:
        switch.train()
