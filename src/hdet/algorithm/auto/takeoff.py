"""Take-off: from any guess to the right decade of the learning rate within some forty steps. Pure functions.

The rate begins very low and grows every few steps, by the larger of two estimates. The fan: how far along the
displacement since the start does the loss on one fixed batch fall? And the reach: at which rate would one step go as
far as the gradients of all steps so far, together, ask for (:mod:`hdet.algorithm.auto.reach`)? Where neither asks for
more it has landed. Where that costs little, training goes back to weights that have not been near the found rate, and
climbs to it slowly: some networks never recover from a rate that comes too early.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from hdet.algorithm.auto import constants as c
from hdet.algorithm.auto.evidence import Evidence
from hdet.algorithm.knob import FACTOR_LIMITS

__all__ = ["BLIND", "NEVER_MOVED", "NOT_FINITE", "Leg", "Phase", "TakeOffState", "Wish", "after_round", "wide_fan"]

BLIND = "the probe does not see the weights"
NOT_FINITE = "the probe's loss is not finite, whatever the weights"
NEVER_MOVED = "no step has moved the weights"


class Phase(IntEnum):
    """Where take-off stands."""

    FIRST = 0
    """Before a first step whose length is known."""
    RISING = 1
    LANDED = 2


class Wish(IntEnum):
    """What take-off wants done with the weights."""

    NOTHING = 0
    KEEP = 1
    """These weights are good: remember them."""
    RESTART = 2
    """Back to the weights from before the first step."""
    GO_BACK = 3
    """To the last ones kept at the leg's ceiling or below."""


class TakeOffState(NamedTuple):
    """Where take-off stands; plain numbers."""

    phase: Phase = Phase.FIRST
    level: float = c.BEGIN
    """log of the factor m on the user's guess, common to all knobs."""
    first: float = math.nan
    """Loss on the fixed batch at the beginning."""
    best: float = math.inf
    """The lowest so far."""
    best_at: float = math.inf
    """The level at which it was lowest."""
    bad: int = 0
    """Rounds in a row in which the loss stood far above the first."""
    fallen: int = 0
    """Rounds in a row in which it stood far above the lowest."""
    dark: int = 0
    """Rounds without a finite loss, before there was any."""
    quiet: int = 0
    """Steps in a row in which nothing asked for a higher rate."""
    seen: bool = False
    """Whether the loss has ever moved."""
    rounds: int = 0
    """Rounds so far that were judged."""

    @property
    def scale(self) -> float:
        """The size of the first loss; 0 before there is one."""
        return abs(self.first) if math.isfinite(self.first) else 0.0


class Leg(NamedTuple):
    """What follows from one round of take-off."""

    state: TakeOffState
    growth: float = 1.0
    """The rate grows by this factor during the next round; 1 once landed."""
    wish: Wish = Wish.NOTHING
    ceiling: float = math.inf
    exploded: bool = False
    """Whether it must go back, whatever that costs."""
    alarm: str | None = None
    """Why the guess is kept to: nothing that is seen tells anything about the rate."""


def wide_fan(points: int) -> list[float]:
    """rho of take-off's fan: from 1, the weights as they are, to about 1448 times the displacement.

    >>> [round(rho, 1) for rho in wide_fan(8)][:4]
    [1.0, 2.8, 8.0, 22.6]
    """
    return [2.0 ** (c.FAN_OCTAVES * r / max(points - 1, 1)) for r in range(points)]


def after_round(state: TakeOffState, evidence: Evidence, *, late: bool = False) -> Leg:
    """One round of take-off.

    Args:
        state: before it.
        evidence: the losses are those of :func:`wide_fan` on the fixed batch.
        late: whether it should land, wherever it is.
    """
    if evidence.steps == 0 and not late:  # skipped steps, or gradients that are still being accumulated
        return Leg(state)
    if state.phase is Phase.FIRST:
        return _after_first_step(state, evidence, late)
    return _after_a_round(state, evidence, late)


def _after_first_step(state: TakeOffState, evidence: Evidence, late: bool) -> Leg:
    """The first step tells how far a step moves the weights: from then on the guess does not matter."""
    moved, loss = evidence.displacement, evidence.losses[0]
    if late:
        return _kept_to_guess(state, NEVER_MOVED)
    if not moved > 0:  # lost in rounding, or skipped by the optimizer itself
        return Leg(state._replace(level=min(state.level + c.TRY_HIGHER, math.log(FACTOR_LIMITS[1]))))
    if math.isinf(moved):
        return Leg(state._replace(level=state.level - c.TRY_LOWER), wish=Wish.RESTART)
    too_far = moved >= c.TOO_FAR
    step = max(c.RELATIVE_STEP, c.RESOLVED * evidence.resolution)
    state = state._replace(phase=Phase.RISING, level=state.level + math.log(step / moved))
    if math.isfinite(loss) and not too_far:
        state = state._replace(first=loss, best=loss)
    return Leg(state, wish=Wish.RESTART if too_far else Wish.KEEP)


def _after_a_round(state: TakeOffState, evidence: Evidence, late: bool) -> Leg:
    if evidence.displacement == 0 and not late:
        return Leg(state)
    if evidence.displacement > c.VISIBLE and evidence.blind:
        return _kept_to_guess(state, BLIND)
    now = evidence.losses[0]
    if not (math.isfinite(now) or math.isfinite(state.first)):
        state = state._replace(dark=state.dark + 1)
        return _kept_to_guess(state, NOT_FINITE) if state.dark >= c.TWICE or late else Leg(state)
    state = _judged(state, now)
    failed = _failed(state, now, late)
    if failed is not None:
        return failed
    growth = 1.0 if state.bad else _growth(state, evidence)
    moved_at_all = not abs(now - state.first) <= c.UNSEEN * state.scale
    state = state._replace(seen=state.seen or moved_at_all)
    if not state.seen:
        growth = max(growth, c.LEAST)
    began, ended = evidence.span
    state = state._replace(quiet=0 if growth >= c.SLACK else state.quiet + min(ended - began, evidence.steps))
    wish = Wish.KEEP if now <= state.best else Wish.NOTHING
    if wish is Wish.KEEP:
        state = state._replace(best=now, best_at=state.level if now < state.first else state.best_at)
    state = state._replace(level=state.level + math.log(growth))
    if late or state.quiet >= c.QUIET or state.rounds >= c.LONGEST:
        if now > state.first - c.UNDONE * (state.first - state.best):
            state = state._replace(level=min(state.level, state.best_at))
        return Leg(state._replace(phase=Phase.LANDED), wish=Wish.GO_BACK, ceiling=state.level + c.CEILING)
    return Leg(state, growth, wish)


def _kept_to_guess(state: TakeOffState, why: str) -> Leg:
    return Leg(state._replace(phase=Phase.LANDED, level=0.0), alarm=why)


def _judged(state: TakeOffState, now: float) -> TakeOffState:
    """After one more round, with its loss compared with the first and with the lowest."""
    if math.isfinite(now) and not math.isfinite(state.first):
        state = state._replace(first=now, best=now)
    bad = not now - state.first <= c.RISE * state.scale
    learned = state.first - state.best > c.GAINED * state.scale
    fallen = learned and now - state.best > c.FALL * state.scale
    return state._replace(
        rounds=state.rounds + 1,
        bad=state.bad + 1 if bad else 0,
        fallen=state.fallen + 1 if fallen else 0,
    )


def _failed(state: TakeOffState, now: float, late: bool) -> Leg | None:
    """The end of a take-off whose loss has exploded, or has lost what was learned; None: it goes on."""
    at_once = not now - state.first <= c.RISE_AT_ONCE * c.RISE * state.scale
    if state.bad and (state.bad >= c.TWICE or late or at_once):
        level = state.level - c.BACK
    elif state.fallen >= c.TWICE:
        level = min(state.level, state.best_at)
    else:
        return None
    landed = state._replace(phase=Phase.LANDED, level=level)
    return Leg(landed, wish=Wish.GO_BACK, ceiling=level, exploded=True)


def _growth(state: TakeOffState, evidence: Evidence) -> float:
    """By the fan a root of the best multiple, by the reach all that it asks for; both within bounds.

    The fan counts only until the loss has moved: a small batch that is being learned falls to nothing far out on any
    line. A near point may win by luck where the next one explodes: so near, the reach decides.
    """
    farthest = wide_fan(len(evidence.losses))[_place_of_lowest(evidence.losses)]
    by_fan = farthest**c.BY_FAN if farthest > c.NEAR and not state.seen else 1.0
    asked = evidence.reach - state.level
    by_reach = math.exp(min(asked, math.log(c.FASTEST))) if math.isfinite(asked) else 1.0
    return max(1.0, min(max(by_fan, by_reach), c.FASTEST))


def _place_of_lowest(losses: Sequence[float]) -> int:
    finite = [loss if math.isfinite(loss) else math.inf for loss in losses]
    return finite.index(min(finite))
