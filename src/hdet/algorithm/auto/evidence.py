"""What one round of a probed run shows."""

from __future__ import annotations

import math
from typing import NamedTuple

__all__ = ["Evidence"]


class Evidence(NamedTuple):
    """What is known when a round ends; equal on all ranks."""

    span: tuple[int, int]
    """The steps at which the round began and ended."""
    now: float
    """The probe loss of the weights as they are."""
    before: float = math.nan
    """That of the weights of a round ago, on the same batch; NaN where none are kept."""
    peak: float = 0.0
    """The step at which the schedule's rising phase ends."""
    shape: float = 1.0
    """The schedule at the round's end, over its highest value."""
    steps: int = 1
    """How many steps the optimizer made; 0: all were skipped, or gradients are still being accumulated."""
    displacement: float = math.nan
    """How far the weights have come since the search began, over their norm."""
    reach: float = -math.inf
    """log m of the rate that the gradients ask for; -inf where they say nothing."""
    straightness: float = 0.0
    """Of the way since the search began; 1: no gradient has turned yet."""
    resolution: float = 0.0
    """The relative distance of neighbouring numbers of the weights' type."""
    gradient: float = 1.0
    """The largest number of the gradients that were heard in the round; 0: there were none."""
    rates: float = 0.0
    """The sum of the rates of all steps since the way began along which the displacement is measured."""
    stretch: int = 0
    """How many steps these were."""
    direction: float = 1.0
    """1 where the loss is minimised, -1 where it is maximised; 0: parameter groups differ in that, and only a loss that
    is no number tells anything."""
