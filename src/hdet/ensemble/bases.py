"""Base values: what was learned of each knob, and how a round moves it. Also the settings of an ensemble."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from hdet.ensemble.controller import Controller, Update
from hdet.ensemble.design import Rounds
from hdet.ensemble.knob import KnobSpec
from hdet.optimizer import Rate, as_type_of

Decay = Literal["schedule", "exponential", "printed"]
DECAYS: tuple[Decay, ...] = ("schedule", "exponential")
"""The decays that users can give. The controller :class:`hdet.AsPrinted` brings "printed" with it."""


@dataclass(frozen=True)
class Settings:
    """The arguments of an ensemble that its state has, with all defaults filled in."""

    rounds: Rounds
    seed: int = 0
    decay: Decay = "schedule"
    start: int | None = 0
    """S_warm, the end of a round from which the controller moves values; None: it never does."""

    def state(self) -> dict[str, Any]:
        """Plain values for a checkpoint and the journal's header. The scheduler saves total_steps."""
        names = {"sync_every": self.rounds.length, "seed": self.seed}
        return {**names, "decay": self.decay, "auto_lr_start": self.start}

    @classmethod
    def from_state(cls, state: Mapping[str, Any], total_steps: int | None) -> Settings:
        """The settings of a checkpoint."""
        rounds = Rounds(int(state["sync_every"]), total_steps)
        return cls(rounds, int(state["seed"]), state["decay"], state["auto_lr_start"])


def decay_rate(start: float, floor: float, rounds: int) -> float:
    r"""The per-round decay that takes ``start`` to ``floor`` in ``rounds`` rounds.

    .. math:: \gamma = 1 - (\eta_{floor} / \eta_{S_{warm}})^{1/K}

    The paper's own formula is :meth:`hdet.AsPrinted.gamma`.

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


class Bases(NamedTuple):
    """What was learned of each knob, the base values that decay by themselves, and the controller's state."""

    learned: list[float]
    """Per knob: a value or, for a scheduled knob, a factor on the schedule, which is 1 before it was moved."""
    starts: list[float]
    """Base values at which the decay began, from which gamma follows; 0 for knobs that have not begun."""
    decayed: list[float]
    """Base values after the decay so far."""
    controller: Any

    @classmethod
    def begin(cls, learned: Sequence[float], controller: Controller | None) -> Bases:
        """The base values before the first round."""
        zeros, state = [0.0] * len(learned), controller.init(len(learned)) if controller is not None else None
        return cls(list(learned), zeros, zeros, state)

    def grown(self, more: int, controller: Any) -> Bases:
        """The same with further rates, whose factors are 1. ``controller``: its state, which begins anew."""
        zeros = [0.0] * more
        return Bases(self.learned + [1.0] * more, self.starts + zeros, self.decayed + zeros, controller)

    def scheduled(self, schedule: Sequence[Rate], settings: Settings, t: int) -> list[Rate]:
        """The base values of scheduled knobs at step ``t``; each keeps the type of its schedule."""
        began = settings.start is not None and t >= settings.start
        if settings.decay != "schedule" and began and any(self.starts):
            rows = zip(schedule, self.starts, self.decayed, strict=True)
            return [as_type_of(value, base) if start else value for value, start, base in rows]
        return [value if m == 1.0 else value * m for value, m in zip(schedule, self.learned, strict=True)]

    def moved(self, update: Update, specs: Sequence[KnobSpec]) -> Bases:
        """The base values after a round in which the controller moved what was learned."""
        rows = zip(specs, self.learned, update.moves, strict=True)
        return self._replace(learned=[spec.moved(value, move) for spec, value, move in rows], controller=update.state)

    def after_round(
        self, moves: Sequence[float], schedule: Sequence[float], floors: Sequence[float], rounds: int
    ) -> Bases:
        """After a round of the exponential decay: base <- max(floor, base (1 - gamma)(1 + move)).

        Knobs that have not begun (all of them at S_warm, later groups that were added) begin at the schedule's value.

        Args:
            moves: of the controller, per knob.
            schedule: the plain schedule of each knob after the round.
            floors: the schedule's lowest value of each knob.
            rounds: K, the rounds from S_warm to the end.

        >>> bases = Bases.begin([1.0], None).after_round(moves=[0.0], schedule=[1.0], floors=[0.01], rounds=2)
        >>> [round(base, 12) for base in bases.decayed]
        [0.1]
        """
        starts = [start or value for start, value in zip(self.starts, schedule, strict=True)]
        rows = zip(self.starts, self.decayed, schedule, strict=True)
        begun = [base if start else value for start, base, value in rows]
        decayed = [
            max(floor, base * (1 - decay_rate(start, floor, rounds)) * (1 + move))
            for start, base, floor, move in zip(starts, begun, floors, moves, strict=True)
        ]
        return self._replace(starts=starts, decayed=decayed)

    def as_printed(self, moves: Sequence[float], rates: Sequence[float], gammas: Sequence[float]) -> Bases:
        """After a round of the paper's recursion: base <- base (1 - gamma) + move, which may fall below 0.

        Args:
            moves: of the controller, in units of the rate.
            rates: the base rate of each knob in the step that was just made.
            gammas: the decay of each knob.

        >>> Bases.begin([1.0], None).as_printed(moves=[-0.25], rates=[1.0], gammas=[0.5]).decayed
        [0.25]
        """
        starts = [start or rate for start, rate in zip(self.starts, rates, strict=True)]
        decayed = [rate * (1 - gamma) + move for rate, gamma, move in zip(rates, gammas, moves, strict=True)]
        return self._replace(starts=starts, decayed=decayed)
