"""The batches of many runs, made once on all cores and kept on the device."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import checkout  # noqa: F401 - so that lab is found
import torch
from torch import Tensor

from lab.tasks import Task

_BLOCK = 25
"""Steps that one thread makes at a time: neighbours share an epoch's order."""


class Supply:
    """Training batches of every seed and step.

    Args:
        task: whose batches.
        seeds: one row each.
        steps: how many training batches; shorter runs use the first of them.
        device: where they lie.
    """

    def __init__(self, task: Task, seeds: Sequence[int], steps: int, device: torch.device) -> None:
        def block(seed: int, first: int) -> list[tuple[Tensor, ...]]:
            return [task.batch(seed, step) for step in range(first, min(first + _BLOCK, steps))]

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            blocks = [[pool.submit(block, seed, t) for t in range(0, steps, _BLOCK)] for seed in seeds]
            rows = [[batch for future in row for batch in future.result()] for row in blocks]
        parts = [[torch.stack(part).to(device) for part in zip(*row, strict=True)] for row in rows]
        self.batches: tuple[Tensor, ...] = tuple(torch.stack(same, 1) for same in zip(*parts, strict=True))
        """Each [step, seed, ...]."""

    def dealt(self, arms: int) -> tuple[Tensor, ...]:
        """Every batch dealt out to some arms: [step, seed and arm, ...]. What is left of it is left out."""
        whole = (part[:, :, : part.shape[2] // arms * arms] for part in self.batches)
        return tuple(part.unflatten(2, (arms, -1)).flatten(1, 2) for part in whole)
