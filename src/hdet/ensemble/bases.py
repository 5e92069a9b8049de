"""Base values: the settings of the fan-out, what was learned of each knob, and how a round moves it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from hdet.ensemble.design import Rounds
from hdet.ensemble.knob import KnobSpec
from hdet.ensemble.published import Controller, Update
from hdet.parameters import Rate, as_type_of

Decay = Literal["schedule", "exponential"]
DECAYS: tuple[Decay, ...] = ("schedule", "exponential")


@dataclass(frozen=True)
class Settings:
    """What the published method needs to know; no None stands for a default any more."""

    rounds: Rounds
    seed: int = 0
    decay: Decay = "schedule"
    start: int | None = 0
    """S_warm, the round end at which the controller begins; None: never."""

    def state(self) -> dict[str, Any]:
        """Plain values for a checkpoint and the journal's header. total_steps is the face's to save."""
        return {
            "sync_every": self.rounds.length,
            "seed": self.seed,
            "decay": self.decay,
            "auto_lr_start": self.start,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any], total_steps: int | None) -> Settings:
        """The settings of a checkpoint."""
        start = state["auto_lr_start"]
        rounds = Rounds(int(state["sync_every"]), total_steps)
        return cls(rounds, int(state["seed"]), state["decay"], None if start is None else int(start))


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


class Bases(NamedTuple):
    """What was learned of each knob, the exponential decay, and the controller's state."""

    learned: list[float]
    """A value, or 1 for a factor on a schedule that nothing has moved."""
    decaying: Decaying
    """Base values of the exponential decay; zeros before S_warm."""
    controller: Any

    @classmethod
    def begin(cls, learned: Sequence[float], controller: Controller | None) -> Bases:
        """Before the first round."""
        state = controller.init(len(learned)) if controller is not None else None
        return cls(list(learned), Decaying.begin([0.0] * len(learned)), state)

    def grown(self, more: int, controller: Any) -> Bases:
        """With further rates, which begin unlearned; the controller begins anew."""
        return Bases(self.learned + [1.0] * more, self.decaying.grown(more), controller)

    def decays(self, settings: Settings, t: int) -> bool:
        """Whether the exponential decay has begun at step ``t``."""
        began = settings.start is not None and t >= settings.start
        return settings.decay == "exponential" and began and any(self.decaying.starts)

    def scheduled(self, schedule: Sequence[Rate], settings: Settings, t: int) -> list[Rate]:
        """The base values of scheduled knobs; each keeps the type of its schedule."""
        if self.decays(settings, t):
            rows = zip(schedule, self.decaying.starts, self.decaying.bases, strict=True)
            return [as_type_of(value, base) if start else value for value, start, base in rows]
        return [value if m == 1.0 else value * m for value, m in zip(schedule, self.learned, strict=True)]

    def all_values(
        self, schedule: Sequence[float], specs: Sequence[KnobSpec], settings: Settings, t: int
    ) -> list[float]:
        """The base value of every knob, with a schedule or without."""
        rows = zip(specs, self.scheduled(schedule, settings, t), self.learned, strict=True)
        return [float(value) if spec.scheduled else m for spec, value, m in rows]

    def moved(
        self,
        update: Update | None,
        specs: Sequence[KnobSpec],
        settings: Settings,
        schedule: Callable[[], list[float]],
        floors: Callable[[], list[float]],
    ) -> Bases:
        """After a round in which the controller was allowed to move. ``update``: None without a signal.

        ``schedule``, ``floors``: the plain schedule of each knob after the round, and its lowest value.
        """
        state = update.state if update is not None else self.controller
        if settings.decay == "schedule":
            learned = self.learned
            if update is not None:
                rows = zip(specs, self.learned, update.moves, strict=True)
                learned = [spec.moved(value, move) for spec, value, move in rows]
            return Bases(learned, self.decaying, state)
        moves = update.moves if update is not None else [0.0] * len(specs)
        rounds_left = settings.rounds.left_from(settings.start or 0)
        decaying = self.decaying.begun(schedule()).after_round(moves, floors(), rounds_left)
        return Bases(self.learned, decaying, state)
