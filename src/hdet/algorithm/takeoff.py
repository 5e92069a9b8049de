"""Take-off: from any guess to the right decade of the learning rate within some forty steps. Pure functions.

The rate grows every few steps while the loss on one fixed batch is watched. It falls, and then rises; the rate at which
training has undone itself, so that the loss is above where it began, is the edge. The found rate lies a factor below
the middle, in log, between the rate at which most of the fall was done and the edge; and training goes back to weights
that have not been near it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

__all__ = ["Course", "Leg", "TakeOff", "TakeOffState"]

FIRST, CLIMBING, LANDED = 0.0, 1.0, 2.0
_VISIBLE = 1e-3
"""A displacement of this part of the weights, and 1448 times that, changes any loss that depends on them."""


class Course(NamedTuple):
    """How the rate gets to its target: the factor on the target, from ``factor`` at ``start`` to 1 at ``end``.

    >>> Course(start=10, end=14, factor=0.25, geometric=True).at(12)
    0.5
    >>> round(Course(start=10, end=30, factor=0.0, geometric=False).at(20), 12)
    0.5
    """

    start: float = 0.0
    end: float = 0.0
    factor: float = 1.0
    geometric: bool = True
    """Equal ratios per step while taking off; afterwards a half cosine, the shape of OneCycle's own rise."""

    def at(self, t: float) -> float:
        """The factor at step ``t``."""
        if t >= self.end:
            return 1.0
        done = max(t - self.start, 0.0) / (self.end - self.start)
        if self.geometric:
            return float(self.factor ** (1 - done))
        return self.factor + (1 - self.factor) * (1 - math.cos(math.pi * done)) / 2


class TakeOffState(NamedTuple):
    """Where take-off stands; plain numbers."""

    phase: float = FIRST
    level: float = 0.0
    """log of the factor m on the user's guess, common to all knobs."""
    first: float = math.nan
    """Loss on the fixed batch at the beginning."""
    best: float = math.inf
    """The lowest so far."""
    bad: float = 0.0
    """Rounds in a row in which the loss was above the first."""
    edge: float = 0.0
    """The level at which it first was."""
    levels: tuple[float, ...] = ()
    """The level at the end of every round so far,"""
    losses: tuple[float, ...] = ()
    """and the loss there."""


class Leg(NamedTuple):
    """What follows from one round of take-off."""

    state: TakeOffState
    growth: float
    """The rate grows by this factor during the next round; 1 once landed."""
    action: Literal["", "keep", "restart", "go back"]
    """"keep": these weights are good, remember them. "restart": back to the first. "go back": to the last ones kept at
    :attr:`ceiling` or below."""
    ceiling: float = math.inf


@dataclass(frozen=True)
class TakeOff:
    """The rules of take-off, in units of nothing: they hold for any loss, optimizer and model.

    Args:
        begin: the first step is taken at this factor of the guess.
        relative_step: then a step moves the weights by this part of their norm.
        rise: a loss that stands this part above the first one is bad.
        most: the part of the fall that counts as most of it.
        back: the found rate is the geometric mean of the rate where that was done and of the edge, divided by this.
        ceiling: the weights gone back to were trained at most at this part of the found rate.
        slowest, fastest: bounds of the growth per round.
        longest: rounds after which it lands wherever it is.
    """

    begin: float = 1e-3
    relative_step: float = 1e-4
    rise: float = 0.02
    most: float = 0.9
    back: float = 8.0
    ceiling: float = 0.25
    slowest: float = 2.0
    fastest: float = 8.0
    longest: int = 60

    def init(self) -> TakeOffState:
        """On the ground."""
        return TakeOffState(level=math.log(self.begin))

    def fan(self, points: int) -> list[float]:
        """rho of the wide fan: from 1, the weights as they are, to about 1448 times the round's displacement.

        >>> [round(rho, 1) for rho in TakeOff().fan(8)][:4]
        [1.0, 2.8, 8.0, 22.6]
        """
        return [2.0 ** (10.5 * r / max(points - 1, 1)) for r in range(points)]

    def after_first_step(self, state: TakeOffState, moved: float, loss: float) -> Leg:
        """The first step moved the weights by ``moved`` times their norm: from now on the guess does not matter."""
        if not moved > 0:  # a skipped step, or one lost in rounding: try again, a little higher
            return Leg(state._replace(level=min(state.level + math.log(10), math.log(1e3))), 1.0, "")
        too_far = not moved < 1e-2
        level = state.level + (math.log(self.relative_step / moved) if math.isfinite(moved) else -math.log(1e6))
        known = math.isfinite(loss) and not too_far
        state = state._replace(phase=CLIMBING, level=level, first=loss if known else math.nan)
        state = state._replace(best=loss) if known else state
        return Leg(state, 1.0, "restart" if too_far else "keep")

    def after_round(self, state: TakeOffState, losses: Sequence[float], moved: float, late: bool) -> Leg:
        """One round.

        Args:
            state: before it.
            losses: of the fan on the fixed batch, the first at the weights as they are.
            moved: the norm of the round's displacement over that of the weights; 0 where all steps were skipped.
            late: whether it should land, wherever it is.
        """
        if moved == 0 and not late:
            return Leg(state, 1.0, "")
        if moved > _VISIBLE and len(set(losses)) == 1 and math.isfinite(losses[0]):
            return Leg(state._replace(phase=LANDED, level=0.0), 1.0, "")  # the probe is blind: keep to the guess
        rho = self.fan(len(losses))
        now = losses[0]
        finite = [loss if math.isfinite(loss) else math.inf for loss in losses]
        farthest = rho[finite.index(min(finite))]
        state = state._replace(levels=(*state.levels, state.level), losses=(*state.losses, finite[0]))
        if math.isfinite(now) and not math.isfinite(state.first):
            state = state._replace(first=now, best=now)
        scale = abs(state.first) if math.isfinite(state.first) else math.inf
        if not now <= state.first + self.rise * scale:
            state = state._replace(bad=state.bad + 1, edge=state.edge if state.bad else state.level)
            if state.bad >= 2 or not now <= state.first + scale / 2:
                return self._land(state)
        else:
            state = state._replace(bad=0.0)
        if late or len(state.levels) >= self.longest:
            if state.bad:
                return self._land(state)
            return Leg(state._replace(phase=LANDED, level=state.level - math.log(4.0)), 1.0, "")
        growth = min(max(farthest ** (1 / 3), self.slowest), self.fastest)
        is_best = now <= state.best
        state = state._replace(best=min(state.best, now), level=state.level + math.log(growth))
        return Leg(state, growth, "keep" if is_best else "")

    def _land(self, state: TakeOffState) -> Leg:
        """Half a round back each: a level is that of the round's end."""
        fallen = state.best + (1 - self.most) * (state.first - state.best)
        done = next((at for at, loss in zip(state.levels, state.losses, strict=True) if loss <= fallen), state.edge)
        level = (min(done, state.edge) + state.edge - math.log(self.slowest)) / 2 - math.log(self.back)
        return Leg(state._replace(phase=LANDED, level=level), 1.0, "go back", level + math.log(self.ceiling))
