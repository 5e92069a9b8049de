"""The weights that an optimizer evaluates, where they are others than those it trains: Schedule-Free keeps both."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

__all__ = ["evaluated", "evaluates_others", "parts_of"]


def evaluates_others(optimizer: Optimizer) -> bool:
    """Whether the parameters hold other weights now than those that the optimizer evaluates."""
    return any(_switches(part) for part in parts_of(optimizer))


def parts_of(optimizer: Optimizer) -> list[Any]:
    """The optimizers that are seen as one by ``hdet.auto``; else the optimizer itself."""
    return list(getattr(optimizer, "parts", [optimizer]))


def _switches(part: Any) -> bool:
    return callable(getattr(part, "eval", None)) and any(group.get("train_mode") for group in part.param_groups)


@contextmanager
def evaluated(optimizer: Optimizer) -> Iterator[None]:
    """Inside, the parameters hold what the optimizer evaluates: those of Schedule-Free after its ``eval()``."""
    switched = [part for part in parts_of(optimizer) if _switches(part)]
    for part in switched:
        part.eval()
    try:
        yield
    finally:
        for part in switched:
            part.train()
