"""Take-off: from any guess to the right decade of the learning rate within some forty steps. Pure functions.

The rate begins very low and grows every few steps by what two witnesses allow. The fan: how far along the displacement
since the start does the loss on one fixed batch fall? And the reach: at which rate would one step go as far as the
gradients of all steps so far, together, ask for (:class:`hdet.algorithm.reach.Tally`)? Where neither asks for more it
has landed. Where that costs little, training goes back to weights that have not been near the found rate, and climbs to
it slowly: some networks never recover from a rate that comes too early.
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

_NEAR = 3.0
"""Multiples of the displacement up to this are near."""


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
    best_at: float = math.inf
    """The level at which it was lowest."""
    bad: float = 0.0
    """Rounds in a row in which the loss stood far above the first."""
    fallen: float = 0.0
    """Rounds in a row in which it stood far above the lowest."""
    quiet: float = 0.0
    """Steps in a row in which nothing asked for a higher rate."""
    seen: float = 0.0
    """Whether the loss has ever moved."""
    rounds: float = 0.0
    """All rounds so far."""

    @property
    def scale(self) -> float:
        """The size of the first loss; 0 before there is one."""
        return abs(self.first) if math.isfinite(self.first) else 0.0


class Leg(NamedTuple):
    """What follows from one round of take-off."""

    state: TakeOffState
    growth: float
    """The rate grows by this factor during the next round; 1 once landed."""
    action: Literal["", "keep", "restart", "go back"]
    """"keep": these weights are good, remember them. "restart": back to the first. "go back": to the last ones kept at
    :attr:`ceiling` or below."""
    ceiling: float = math.inf
    exploded: bool = False
    """Whether it must go back, whatever that costs."""


@dataclass(frozen=True)
class TakeOff:
    """The rules of take-off, in units of nothing: they hold for any loss, optimizer and model.

    Args:
        begin: the first step is taken at this factor of the guess.
        relative_step: then a step moves the weights by this part of their norm.
        fastest: the most that the rate grows in a round.
        slack: a growth below this is none.
        unseen, least: until the loss has once left the first one by more than this part nothing has happened yet, and
            the rate grows by at least this much.
        quiet: it has landed after so many steps without growth.
        undone: where this part of what was gained is lost again when it lands, the last growth was too much: it lands
            at the level of the lowest loss.
        rise: a loss that stands this many times its first value above the first one is bad, twice in a row; five times
            as much is bad at once.
        back: where that ends it, the rate is divided by this.
        gained, fall: a loss that was this part of the first one below it, and then stands so much above its lowest,
            twice in a row, ends it as well: at the level and, whatever that costs, with the weights of the lowest.
        ceiling: the weights gone back to were trained at most at this part of the found rate.
        longest: rounds after which it lands wherever it is.
    """

    begin: float = 1e-3
    relative_step: float = 1e-4
    fastest: float = 8.0
    slack: float = 1.15
    unseen: float = 0.01
    least: float = 2.0
    quiet: int = 16
    undone: float = 0.5
    rise: float = 1.0
    gained: float = 0.25
    fall: float = 0.5
    back: float = 4.0
    ceiling: float = 0.25
    longest: int = 60

    def init(self) -> TakeOffState:
        """On the ground."""
        return TakeOffState(level=math.log(self.begin))

    def fan(self, points: int) -> list[float]:
        """rho of the wide fan: from 1, the weights as they are, to about 1448 times the displacement.

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

    def after_round(
        self,
        state: TakeOffState,
        losses: Sequence[float],
        reach: float,
        moved: float,
        early: bool = True,
        late: bool = False,
        steps: int = 4,
    ) -> Leg:
        """One round.

        Args:
            state: before it.
            losses: of the fan on the fixed batch, the first at the weights as they are.
            reach: the level that the gradients ask for; -inf where they say nothing.
            moved: the norm of the displacement over that of the weights; 0 where all steps were skipped.
            early: whether it may land when nothing asks for more: later it stays up, for somebody may ask again.
            late: whether it should land, wherever it is.
            steps: how many the round had.
        """
        if moved == 0 and not late:
            return Leg(state, 1.0, "")
        if moved > _VISIBLE and len(set(losses)) == 1 and math.isfinite(losses[0]):
            return Leg(state._replace(phase=LANDED, level=0.0), 1.0, "")  # the probe is blind: keep to the guess
        now = losses[0]
        state = self._judged(state, now)
        failed = self._failed(state, now, late)
        if failed is not None:
            return failed
        growth = 1.0 if state.bad else self._growth(state, losses, reach)
        moved_at_all = not abs(now - state.first) <= self.unseen * state.scale
        state = state._replace(seen=max(state.seen, float(moved_at_all)))
        if not state.seen:
            growth = max(growth, self.least)
        state = state._replace(quiet=0.0 if growth >= self.slack else state.quiet + steps)
        action: Literal["", "keep"] = "keep" if now <= state.best else ""
        if action == "keep":
            state = state._replace(best=now, best_at=state.level)
        state = state._replace(level=state.level + math.log(growth))
        if late or (early and state.quiet >= self.quiet) or state.rounds >= self.longest:
            if now > state.first - self.undone * (state.first - state.best):
                state = state._replace(level=min(state.level, state.best_at))
            return Leg(state._replace(phase=LANDED), 1.0, "go back", state.level + math.log(self.ceiling))
        return Leg(state, growth, action)

    def _judged(self, state: TakeOffState, now: float) -> TakeOffState:
        """After one more round, with its loss compared with the first and with the lowest."""
        if math.isfinite(now) and not math.isfinite(state.first):
            state = state._replace(first=now, best=now)
        bad = not now - state.first <= self.rise * state.scale
        learned = state.first - state.best > self.gained * state.scale
        fallen = learned and now - state.best > self.fall * state.scale
        return state._replace(
            rounds=state.rounds + 1,
            bad=state.bad + 1 if bad else 0.0,
            fallen=state.fallen + 1 if fallen else 0.0,
        )

    def _failed(self, state: TakeOffState, now: float, late: bool) -> Leg | None:
        """The end of a take-off whose loss has exploded, or has lost what was learned; None: it goes on."""
        beyond_doubt = state.bad >= 2 or late or not now - state.first <= 5 * self.rise * state.scale
        if state.bad and beyond_doubt:
            level = state.level - math.log(self.back)
        elif state.fallen >= 2:
            level = min(state.level, state.best_at)
        else:
            return None
        return Leg(state._replace(phase=LANDED, level=level), 1.0, "go back", level, exploded=True)

    def _growth(self, state: TakeOffState, losses: Sequence[float], reach: float) -> float:
        """By the fan the cube root of the best multiple: what is best on a line is too much for a path.

        The fan is heard until the loss has moved: a small batch that is being learned falls to nothing far out on any
        line. A near point may win by luck where the next one explodes: that close the gradients know better.
        """
        finite = [loss if math.isfinite(loss) else math.inf for loss in losses]
        farthest = self.fan(len(losses))[finite.index(min(finite))]
        by_fan = farthest ** (1 / 3) if farthest > _NEAR and not state.seen else 1.0
        by_reach = math.exp(min(reach - state.level, math.log(self.fastest))) if math.isfinite(reach) else 1.0
        return max(1.0, min(max(by_fan, by_reach), self.fastest))
