"""The placebo: a controller that gets the losses shuffled over the replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hdet.ensemble.controller import Corrected, Update, Velocity
from hdet.ensemble.design import permutation

__all__ = ["Placebo", "PlaceboState"]

_NO_KNOB = -1
"""The fan-out's own permutations are those of knobs 0, 1, 2 …: this one must not follow any of them."""


class PlaceboState(NamedTuple):
    """How many rounds were shuffled (once per knob, as states are), and the velocities of the rule inside."""

    rounds: list[float]
    velocity: list[float]


@dataclass(frozen=True)
class Placebo:
    """Shuffles the signals over the replicas, then asks the corrected controller.

    What it does to a run is what noise of the same size does: an effect that it shares was no effect of the losses.

    Args:
        seed: of the shuffling, which depends on it and on the round alone.
        inside: the controller that is asked.

    >>> rule = Placebo(seed=1)
    >>> states = [PlaceboState(rounds=[k], velocity=[0.0]) for k in range(5)]
    >>> [rule.update(state, signals=[1.0, 0.9], offsets=[[-0.1], [0.1]]).moves[0] > 0 for state in states]
    [True, False, False, True, True]
    """

    seed: int = 0
    inside: Corrected = field(default_factory=Corrected)

    def init(self, knobs: int) -> PlaceboState:
        """No round yet."""
        return PlaceboState([0.0] * knobs, self.inside.init(knobs).velocity)

    def update(self, state: PlaceboState, signals: Sequence[float], offsets: Sequence[Sequence[float]]) -> Update:
        """One round of the controller inside, on shuffled signals."""
        k = int(max(state.rounds, default=0))
        order = permutation(self.seed, k + 1, _NO_KNOB, len(signals))
        update = self.inside.update(Velocity(state.velocity), [signals[r] for r in order], offsets)
        return update._replace(state=PlaceboState([k + 1.0] * len(state.rounds), update.state.velocity))
