"""The published decay of the base value, corrected so that it decays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Decaying", "decay_rate"]


def decay_rate(start: float, floor: float, rounds: int) -> float:
    r"""The per-round decay that takes ``start`` to ``floor`` in ``rounds`` rounds.

    .. math:: \gamma = 1 - (\eta_{floor} / \eta_{S_{warm}})^{1/K}

    As printed in the paper, with ``f_div / f_final`` of OneCycleLR's defaults, gamma is negative and the rate grows.

    Args:
        start: base value at S_warm.
        floor: the schedule's last value, ``min_lr``.
        rounds: K.

    >>> gamma = decay_rate(start=1.0, floor=0.01, rounds=2)
    >>> round((1 - gamma) ** 2, 12)
    0.01
    >>> decay_rate(start=0.0, floor=0.0, rounds=5)  # nothing to decay
    0.0
    """
    if start <= 0.0 or floor >= start:
        return 0.0
    return 1.0 - math.pow(max(floor, 0.0) / start, 1.0 / rounds)


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
