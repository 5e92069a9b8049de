"""What the entry trains with: Schedule-Free AdamW from a guess that says nothing, and the shape of its rate."""

from __future__ import annotations

from collections.abc import Iterable

from schedulefree import AdamWScheduleFree
from torch import Tensor

GUESS = 1e-6
"""The search begins here. It is far below any rate that trains, so it says nothing about a workload."""
BETAS, WEIGHT_DECAY = (0.85, 0.99), 0.08121616522670176
"""Betas chosen on the four workloads of dev (decision 036); the decay of the benchmark's own self-tuning baseline."""
RISE = 0.1
"""The share of the run in which the search climbs (decision 036)."""


def schedule_free(params: Iterable[Tensor], lr: float = GUESS) -> AdamWScheduleFree:
    """The optimizer, ready to train."""
    optimizer = AdamWScheduleFree(params, lr=lr, betas=BETAS, weight_decay=WEIGHT_DECAY)
    optimizer.train()
    return optimizer


def share_of(step: int, steps: int) -> float:
    """The schedule: up along a line, then held to the end, since averages take the place of a fall.

    >>> [round(share_of(step, 100), 2) for step in (0, 4, 9, 99)]
    [0.04, 0.47, 1.0, 1.0]
    """
    rise = RISE * steps - 1
    return 1.0 if step >= rise else 1 / 25 + (1 - 1 / 25) * step / rise
