"""What one round of a probed run shows: the points that were asked for, and what was measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Evidence", "Fan", "lowest"]


class Fan(NamedTuple):
    """The points of a round."""

    rho: list[list[float]]
    """``rho[point][knob]``: multiples of the round's displacement."""
    fixed: bool
    """Whether the batch is take-off's one fixed batch, and the displacement ends at the weights as they are."""


class Evidence(NamedTuple):
    """What is known when a round ends; equal on all ranks."""

    span: tuple[int, int]
    """The steps at which the round began and ended."""
    fan: Fan
    losses: Sequence[float]
    """Of the fan's points."""
    peak: float
    """The step at which the schedule's rising phase ends: until there the rate climbs after take-off."""
    shape: float = 1.0
    """The schedule at the round's end, over its highest value."""
    steps: int = 1
    """How many steps the optimizer made; 0: all were skipped, or gradients are still being accumulated."""
    displacement: float = math.nan
    """The norm of the displacement over that of the weights. NaN where nobody needs to know."""
    reach: float = -math.inf
    """While taking off, log m of the rate that the gradients ask for; -inf where they say nothing."""
    resolution: float = 0.0
    """While taking off, the relative distance of neighbouring numbers of the weights' type."""
    earlier: float = math.nan
    """On doubt, the loss on the same batch of the weights that training would go back to."""

    @property
    def best(self) -> float:
        """The lowest loss."""
        return lowest(self.losses)

    @property
    def blind(self) -> bool:
        """Whether points have one and the same loss: if they lie far apart, the probe does not see the weights."""
        return len(self.losses) > 1 and len(set(self.losses)) == 1 and math.isfinite(self.losses[0])


def lowest(losses: Sequence[float]) -> float:
    """The lowest of those that are finite; infinite without any."""
    return min((loss for loss in losses if math.isfinite(loss)), default=math.inf)
