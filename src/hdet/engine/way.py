"""What is known when a round of replicas ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch.optim import Optimizer

from hdet.algorithm.controller import Controller, Update
from hdet.errors import ArgumentError
from hdet.rollback.losses import Losses

__all__ = ["RoundEnd", "check_moves"]


class RoundEnd(NamedTuple):
    """What is known when a round ends."""

    before: int
    """The step counter in the round that ends."""
    after: int
    """The step counter to come: a round end."""
    optimizer: Optimizer
    schedule: Callable[[int], list[float]]
    """The plain schedule per knob at a step; anything for knobs that have none."""
    floors: Callable[[], list[float]]
    """The schedule's lowest value per knob."""
    losses: Losses
    """What was observed in the round."""
    keeps_journal: bool
    """Whether this rank has a journal."""


def check_moves(controller: Controller | None, update: Update, knobs: int, signals: Sequence[float]) -> None:
    """Raise for what no controller may return."""
    if len(update.moves) != knobs or not all(abs(move) < float("inf") for move in update.moves):
        raise ArgumentError(
            f"a controller must return one finite move per knob, here {knobs}, but {controller!r} "
            f"returned {update.moves} for the signals {signals}; correct its update()"
        )
