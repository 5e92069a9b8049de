"""The pilot of a probed run: what follows from what a round has shown. Pure.

One idea: the rate begins very low and is raised as long as the gradients of all steps so far, together, ask for more
(:mod:`hdet.algorithm.auto.reach`). Once it is right, steps go to and fro, gradients cancel, and nothing asks any more.
If then nothing is gained either, it is halved. Everything else is for the edges: a first step whose length nobody
knows, and weights that got too hot.

The engine carries the pilot's orders out on one model, the experiments on a stack of them: both follow the same rules.
"""

from __future__ import annotations

import math
from collections.abc import Container
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from hdet.algorithm.auto import constants as c
from hdet.algorithm.auto.evidence import Evidence
from hdet.algorithm.auto.rounds import Growing
from hdet.algorithm.knob import FACTOR_LIMITS, bounded_factor

__all__ = [
    "BLIND",
    "NEVER_MOVED",
    "NOT_FINITE",
    "NOT_FOLLOWED",
    "NO_GAIN",
    "NO_GRADIENT",
    "Action",
    "Moment",
    "Order",
    "Phase",
    "Pilot",
    "PilotState",
]

BLIND = "the probe does not see the weights"
NOT_FINITE = "the probe's loss is not finite, whatever the weights"
NEVER_MOVED = "no step has moved the weights"
NO_GRADIENT = "weights moved, but no gradient was seen before the schedule's peak"
NOT_FOLLOWED = "steps do not follow the rate"
NO_GAIN = "no gain: half the rate"


class Phase(IntEnum):
    """Where the search stands."""

    FIRST = 0
    """Before a first step whose length is known."""
    SEARCHING = 1
    """The rate is raised as long as the gradients ask for more, and lowered where it was overdone."""
    KEPT = 2
    """The guess is kept to, on the schedule as it is: nothing is searched."""


class Moment(NamedTuple):
    """Everything that training changes, at the end of a round; its copy lies in ``slot``."""

    step: int
    slot: int


class PilotState(NamedTuple):
    """Everything that a probed run has learned; plain numbers."""

    phase: Phase = Phase.FIRST
    level: float = c.BEGIN
    """log of m, the factor on the user's guess: the target is m times the schedule."""
    peak: float = 0.0
    """The step at which the schedule's rising phase ends: until there the rate is below the target."""
    first: float = math.nan
    """The first probe loss."""
    moments: tuple[Moment, ...] = ()
    """The ends of the last good rounds, two at most."""
    worse: int = 0
    """Rounds in a row in which the weights were perhaps ruined."""
    idle: int = 0
    """Rounds in a row, not too short, in which the gradients did not ask for more and the loss rose."""
    dark: int = 0
    """Rounds without a finite loss, before there was any."""
    seen: bool = False
    """Whether the probe loss has ever changed with the weights."""
    pace: float = math.nan
    """How far the first step that was measured moved the weights, over its rate ..."""
    rate: float = math.nan
    """... and that rate."""

    @property
    def factor(self) -> float:
        """m."""
        return bounded_factor(math.exp(self.level))

    def at(self, level: float) -> PilotState:
        """The state at another level, within the bounds of all factors: beyond them it is not that of the rate."""
        low, high = FACTOR_LIMITS
        return self._replace(level=min(max(level, math.log(low)), math.log(high)))

    @property
    def slots(self) -> frozenset[int]:
        """The slots in use; all others are free."""
        return frozenset(moment.slot for moment in self.moments)

    def rise(self, t: float) -> float:
        """The part of the target at which step ``t`` is made: max(0.3, ((t + 1) / (peak + 1))^0.7) until the peak.

        >>> state = PilotState(Phase.SEARCHING, peak=99.0)
        >>> round(state.rise(9), 3), state.rise(99), state.rise(500)
        (0.3, 1.0, 1.0)
        """
        if self.phase is not Phase.SEARCHING or t >= self.peak:
            return 1.0
        return max(c.LEAST_RISE, float(((t + 1) / (self.peak + 1)) ** c.RISE))


class Action(IntEnum):
    """What is to be done with the weights."""

    NOTHING = 0
    KEEP = 1
    """Copy them, with buffers and optimizer state, into the order's slot."""
    RESTART = 2
    """Back to how they were before the first step."""
    GO_BACK = 3
    """Put back what lies in the order's slot."""
    GO_ON = 4
    """There is nothing to go back to, though there should be: the weights must at least be finite."""


class Order(NamedTuple):
    """What the pilot wants done after a round."""

    state: PilotState
    action: Action = Action.NOTHING
    slot: int | None = None
    event: str | None = None
    """What happened, in words; None: nothing special."""
    went_back_to: int | None = None
    """The step that training goes back to."""
    alarm: str | None = None
    """What people must know: why the guess is kept to."""
    anew: bool = False
    """Whether the way that the reach is measured along begins anew."""


@dataclass(frozen=True)
class Pilot:
    """The rules of a probed run.

    Args:
        total_steps: S, the run's length; None: nobody knows.
        searches: whether the rate is searched at all.
    """

    total_steps: int | None
    searches: bool = True

    @property
    def long_enough(self) -> bool:
        return self.total_steps is None or self.total_steps >= c.SHORTEST

    @property
    def rounds(self) -> Growing:
        """Where rounds end."""
        return Growing(self.total_steps)

    def begin(self) -> PilotState:
        """Before the first step."""
        return PilotState() if self.searches and self.long_enough else self.kept()

    def kept(self) -> PilotState:
        """At the guess, without a search."""
        return PilotState(Phase.KEPT, level=0.0)

    def remembering(self, state: PilotState, slots: Container[int]) -> PilotState:
        """The state where only the copies in some slots exist: a checkpoint has none."""
        return state._replace(moments=tuple(moment for moment in state.moments if moment.slot in slots))

    def after_round(self, state: PilotState, evidence: Evidence) -> Order:
        """One round."""
        late = evidence.span[1] > max(evidence.peak, c.SHORTEST)
        if state.phase is Phase.FIRST and late:
            return self._alarmed(NO_GRADIENT if evidence.displacement > 0 else NEVER_MOVED)
        if state.phase is Phase.KEPT or evidence.steps == 0:
            return Order(state)  # no step: skipped, or gradients are still being accumulated
        if state.phase is Phase.FIRST:
            return self._measured(state, evidence)
        changed = math.isfinite(evidence.before) and evidence.now != evidence.before
        state = state._replace(seen=state.seen or changed)
        if not math.isfinite(evidence.now) and not math.isfinite(state.first):
            dark = state.dark + 1
            return Order(state._replace(dark=dark)) if dark < c.TWICE else self._alarmed(NOT_FINITE)
        same = evidence.now == evidence.before and evidence.direction != 0
        if evidence.displacement > c.VISIBLE and not state.seen and same:
            return self._alarmed(BLIND)
        if _lags(state, evidence):
            return self._alarmed(NOT_FOLLOWED)
        ruin = _ruin(state, evidence)
        if ruin > c.WORSE:
            return _too_hot(state._replace(worse=state.worse + 1), certain=ruin > c.RUINED)
        return _gone_well(state, evidence)

    def _measured(self, state: PilotState, evidence: Evidence) -> Order:
        """The first step tells how far a step moves the weights: from then on the guess does not matter."""
        moved, event = evidence.displacement, "first step"
        if evidence.gradient == 0 or not (moved > 0 or math.isfinite(evidence.gradient)):
            return Order(state, anew=True)  # without gradients, or skipped because of them: it says nothing
        if not moved > 0:  # lost in rounding
            return Order(state.at(state.level + c.TRY_HIGHER), event=event, anew=True)
        again = "restarted: the first step was too long"
        if math.isinf(moved):
            return Order(state.at(state.level - c.TRY_LOWER), Action.RESTART, event=again, anew=True)
        step = max(c.RELATIVE_STEP, c.RESOLVED * evidence.resolution)
        found = state._replace(phase=Phase.SEARCHING, peak=evidence.peak)
        if evidence.rates > 0:
            found = found._replace(pace=moved / evidence.rates, rate=evidence.rates / evidence.stretch)
        found = found.at(state.level + math.log(step) - math.log(moved) - math.log(found.rise(evidence.span[1])))
        if moved >= c.TOO_FAR:
            return Order(found, Action.RESTART, event=again, anew=True)
        first = evidence.now if math.isfinite(evidence.now) else math.nan
        return _keeping(Order(found._replace(first=first), event=event, anew=True), evidence.span[1])

    def _alarmed(self, why: str) -> Order:
        return Order(self.kept(), event=f"kept to the guess: {why}", alarm=why)


def _lags(state: PilotState, evidence: Evidence) -> bool:
    """Whether the rate was raised and the steps have not become longer: part of them has a rate of its own."""
    if not (0 < evidence.stretch <= c.WATCHED and evidence.rates > 0 and evidence.displacement > 0):
        return False
    raised = evidence.rates / evidence.stretch / state.rate
    shorter = state.pace * evidence.rates / evidence.displacement
    return raised >= c.RAISED and shorter >= max(raised**c.LAGS, c.WANDERS * evidence.stretch)


def _ruin(state: PilotState, evidence: Evidence) -> float:
    """How far the loss is above that of a round ago, over the first loss; 0 where nothing can be compared."""
    if not math.isfinite(evidence.now):
        return math.inf if math.isfinite(evidence.before) or not state.moments else 0.0
    return _rise(evidence) / (abs(state.first) or 1.0) if math.isfinite(evidence.before) else 0.0


def _rise(evidence: Evidence) -> float:
    """How far the loss is above that of a round ago; of what is maximised, how far below."""
    return evidence.direction * (evidence.now - evidence.before)


def _too_hot(state: PilotState, certain: bool) -> Order:
    """The weights are ruined: back to those of two rounds ago at a third of the rate, at once or the second time."""
    if state.worse < c.TWICE and not certain:
        return Order(state)
    state = state.at(state.level - math.log(c.SLOWER))._replace(worse=0, idle=0, pace=math.nan)
    if not state.moments:
        return Order(state, Action.GO_ON, event="too hot: slowed down", anew=True)
    moment = state.moments[0]  # the last one may already be damaged
    event = f"too hot: went back to step {moment.step}"
    state = state._replace(moments=(moment,))
    return Order(state, Action.GO_BACK, moment.slot, event, went_back_to=moment.step, anew=True)


def _gone_well(state: PilotState, evidence: Evidence) -> Order:
    """Remember the weights, and let the target follow what the gradients ask for."""
    if not math.isfinite(evidence.now):  # nor is that of a round ago: the batch is at fault
        return Order(state)
    first = state.first if math.isfinite(state.first) else evidence.now
    state = state._replace(worse=0, first=first)
    order = _steered(state, evidence) if evidence.shape >= c.FALLING else Order(state)
    return _keeping(order, evidence.span[1])


def _steered(state: PilotState, evidence: Evidence) -> Order:
    """Raise the target as far as the gradients ask for it; halve it where they do not and nothing is gained."""
    if evidence.gradient == 0:  # the sum of rates has grown all the same, and with it the reach
        return Order(state)
    most = math.log(c.FASTEST)
    asked = most if evidence.straightness >= c.STRAIGHT else evidence.reach + math.log(c.HEED) - state.level
    if asked > 0:
        return Order(state.at(state.level + min(asked, most))._replace(idle=0))
    rose = evidence.steps >= c.JUDGED and _rise(evidence) > 0
    idle = state.idle + 1 if rose else 0
    if idle < c.IDLE:
        return Order(state._replace(idle=idle))
    return Order(state.at(state.level - most)._replace(idle=0), event=NO_GAIN)


def _keeping(order: Order, step: int) -> Order:
    """The order, and remember the weights as they are, in a slot that the last moment does not need."""
    last = order.state.moments[-1:]
    slot = 1 - last[0].slot if last else 0
    state = order.state._replace(moments=(*last, Moment(step, slot)))
    return order._replace(state=state, action=Action.KEEP, slot=slot)
