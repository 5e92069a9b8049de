"""The base values of a trained fan-out: what was learned, and how a round moves it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from hdet.algorithm.controller import Update
from hdet.algorithm.decay import Decaying
from hdet.algorithm.knob import KnobSpec
from hdet.engine.trained.settings import Settings
from hdet.engine.way import RoundEnd
from hdet.rates import Rate, as_type_of

__all__ = ["Bases"]


class Bases(NamedTuple):
    """What was learned of each knob, the exponential decay, and the controller's state."""

    learned: list[float]
    """A value, or 1 for a factor on a schedule that nothing has moved."""
    decaying: Decaying
    """Base values of the exponential decay; zeros before S_warm."""
    controller: Any

    @classmethod
    def begin(cls, learned: Sequence[float], controller: Any) -> Bases:
        """Before the first round."""
        return cls(list(learned), Decaying.begin([0.0] * len(learned)), controller)

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

    def moved(self, update: Update | None, specs: Sequence[KnobSpec], settings: Settings, end: RoundEnd) -> Bases:
        """After a round in which the controller was allowed to move. ``update``: None without a signal."""
        state = update.state if update is not None else self.controller
        if settings.decay == "schedule":
            learned = self.learned
            if update is not None:
                rows = zip(specs, self.learned, update.moves, strict=True)
                learned = [spec.moved(value, move) for spec, value, move in rows]
            return Bases(learned, self.decaying, state)
        moves = update.moves if update is not None else [0.0] * len(specs)
        rounds_left = settings.rounds.left_from(settings.start or 0)
        decaying = self.decaying.begun(end.schedule(end.after)).after_round(moves, end.floors(), rounds_left)
        return Bases(self.learned, decaying, state)
