"""A knob, and a task with one: trained with its regulariser, judged without."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from real.pools import Pool
from real.task import RealTask
from torch import Tensor, nn

from hdet.ensemble.knob import KnobSpec, away
from lab.tasks.task import Batch

__all__ = ["Knob", "KnobTask", "TrainedLoss"]

TrainedLoss = Callable[[nn.Module, Batch, Tensor], Tensor]
"""The loss that is trained, given the knob's value."""


class Knob(NamedTuple):
    """One hyperparameter.

    >>> dropout = Knob("dropout", "loss", "logit", centre=0.2, bounds=(1e-3, 0.95))
    >>> round(dropout.times(0.2, 4.0), 6), dropout.times(0.2, 1e9)
    (0.5, 0.95)
    >>> round(dropout.over(0.5, 0.2), 6)
    4.0
    """

    name: str
    where: str
    """Who reads the value: the ``loss``, or the optimizer as its ``decay`` or as its ``rest``, 1 - beta2."""
    scale: str
    """``log``, or ``logit`` for what is between 0 and 1: its odds are multiplied."""
    centre: float
    """The middle of the grid."""
    bounds: tuple[float, float]

    def spec(self, spread: float) -> KnobSpec:
        """As the library sees it; ``spread`` is the logarithm of a factor."""
        return KnobSpec(self.name, self.scale, spread, self.bounds)

    def times(self, value: float, factor: float) -> float:
        """The value, or its odds, times a factor; never beyond the bounds."""
        low, high = self.bounds
        return min(max(away(self.scale, value, math.log(factor)), low), high)

    def over(self, value: float, other: float) -> float:
        """By what factor ``value`` is above ``other`` on the knob's own scale."""
        ratio = value / other
        return ratio * (1 - other) / (1 - value) if self.scale == "logit" else ratio


class KnobTask(RealTask):
    """A task on little data.

    ``loss`` is without the regulariser: what validation and probe see. ``trained`` has it.

    Args:
        name: of the task, and of its random numbers.
        knob: what is looked for.
        pool: the training samples, with the noise that the regulariser needs.
        probe: held-out batches that arms may be compared by; nobody trains on them or is judged by them.
        judged: held-out samples that decide, how many of them, and how many in a batch.
        build: a new model.
        loss: without the regulariser.
        trained: with it.
        batch_size: samples of all arms together in one step.
    """

    def __init__(
        self,
        name: str,
        knob: Knob,
        pool: Pool,
        probe: Sequence[Batch],
        judged: tuple[Pool, int, int],
        build: Callable[[torch.Generator], nn.Module],
        loss: Callable[[nn.Module, Batch], Tensor],
        trained: TrainedLoss,
        batch_size: int,
    ) -> None:
        super().__init__(name, pool, judged[0], judged[1:], build, loss, batch_size)
        self.knob, self.probe, self.trained = knob, list(probe), trained
