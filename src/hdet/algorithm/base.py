"""The base value of a learning rate: the schedule, and what the controller has learned on top of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hdet.algorithm.decay import decay_rate

__all__ = ["FACTOR_LIMITS", "Decaying"]

FACTOR_LIMITS = (1e-6, 1e6)
"""Bounds of the learned multiplier m."""


class Decaying(NamedTuple):
    """The published decay, per knob: base <- max(floor, base (1 - gamma)(1 + move)), constant within a round.

    >>> state = Decaying.begin([1.0])
    >>> state = state.after_round(moves=[0.0], floors=[0.01], rounds=2)
    >>> [round(base, 12) for base in state.bases]
    [0.1]
    """

    starts: list[float]
    """Base at S_warm, from which gamma follows."""
    bases: list[float]

    @classmethod
    def begin(cls, schedule: Sequence[float]) -> Decaying:
        """At S_warm, from the schedule's values there."""
        return cls(list(schedule), list(schedule))

    def begun(self, schedule: Sequence[float]) -> Decaying:
        """Knobs that have not begun (groups added late) begin here, from the schedule's values."""
        starts = [start or value for start, value in zip(self.starts, schedule, strict=True)]
        bases = [base if start else value for start, base, value in zip(self.starts, self.bases, schedule, strict=True)]
        return Decaying(starts, bases)

    def grown(self, more: int) -> Decaying:
        """With further knobs that have not begun."""
        return Decaying(self.starts + [0.0] * more, self.bases + [0.0] * more)

    def after_round(self, moves: Sequence[float], floors: Sequence[float], rounds: int) -> Decaying:
        """One round later. ``rounds`` is K, the rounds from S_warm to the end."""
        bases = [
            max(floor, base * (1 - decay_rate(start, floor, rounds)) * (1 + move))
            for start, base, floor, move in zip(self.starts, self.bases, floors, moves, strict=True)
        ]
        return self._replace(bases=bases)
