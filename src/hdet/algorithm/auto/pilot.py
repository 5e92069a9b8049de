"""The pilot of a probed run: which points to probe at the end of a round, and what follows from their losses. Pure.

The engine carries its orders out on one model, the experiments on a stack of them: both follow the same rules.
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

from hdet.algorithm.auto import constants as c
from hdet.algorithm.auto import takeoff
from hdet.algorithm.auto.course import Course
from hdet.algorithm.auto.evidence import Evidence, Fan, lowest
from hdet.algorithm.auto.memory import Memory, Moment
from hdet.algorithm.auto.rounds import Growing
from hdet.algorithm.auto.takeoff import BLIND, NOT_FINITE, Leg, Phase, TakeOffState, Wish
from hdet.algorithm.controller import Controller, Update
from hdet.algorithm.design import Balanced
from hdet.algorithm.knob import bounded_factor
from hdet.algorithm.signals import comparable

__all__ = ["Action", "Order", "Pilot", "PilotState"]


class PilotState(NamedTuple):
    """Everything that a probed run has learned."""

    takeoff: TakeOffState
    course: Course
    landed: int | None
    """The step at which take-off ended; None: not yet; 0: there was none."""
    learned: list[float]
    """m per knob: base = m * course * schedule."""
    controller: Any
    """State of the controller; None without one."""
    held: bool = True
    """Whether the schedule's rise is held at its peak: the rate climbs by what is learned."""
    memory: Memory = Memory()
    scale: float = math.nan
    """The largest probe loss of a good round: later losses come near 0 and differ by their batch."""
    worse: int = 0
    """Rounds in a row in which the weights were perhaps ruined."""
    low: float = math.inf
    """The lowest probe loss since take-off."""
    alarmed: bool = False
    """Whether an alarm was raised: once is enough."""


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
    """What people must know: the probe tells nothing."""
    update: Update | None = None
    """What the controller said, where it was asked."""
    anew: bool = True
    """Whether the displacement begins anew: take-off is one long displacement."""


@dataclass(frozen=True)
class Pilot:
    """The rules of a probed run.

    Args:
        controller: moves the base values after take-off; None: nothing ever moves.
        knobs: how many.
        total_steps: S, the run's length; None: nobody knows.
        length: steps per round after take-off; None: rounds that grow.
        points: how many are probed.
        spread: a: after take-off points stand at 1 - a to 1 + a times the round's displacement.
        seed: of the design.
        start: the step from which the controller may move. Above 0 there is no take-off.
        columns: the column of the design of each knob; None: each its own.
    """

    controller: Controller | None
    knobs: int
    total_steps: int | None
    length: int | None = None
    points: int = c.POINTS
    spread: float = c.SPREAD
    seed: int = 0
    start: int = 0
    columns: tuple[int, ...] | None = None

    # -- before a round ends --------------------------------------------------------------------------------------

    @property
    def takes_off(self) -> bool:
        """Whether the run looks for its rate at all."""
        return self.controller is not None and self.start == 0 and self.long_enough

    @property
    def long_enough(self) -> bool:
        return self.total_steps is None or self.total_steps >= c.SHORTEST

    def begin(self) -> PilotState:
        """Before the first step."""
        memory = self.controller.init(self.knobs) if self.controller is not None else None
        if self.takes_off:
            state = TakeOffState()
            return PilotState(state, Course(), None, [math.exp(state.level)] * self.knobs, memory)
        return self.without_take_off(0, memory)

    def without_take_off(self, landed: int, memory: Any) -> PilotState:
        """At the guess, on the schedule as it is: the rise is not held."""
        state = TakeOffState(phase=Phase.LANDED, level=0.0)
        return PilotState(state, Course(), landed, [1.0] * self.knobs, memory, held=False)

    def rounds(self, state: PilotState) -> Growing:
        """Where rounds end, as far as is known."""
        return Growing(self.total_steps, state.landed, self.length)

    def fan(self, state: PilotState, k: int) -> Fan:
        """The points of round ``k``."""
        if state.landed is None:
            points = 1 if state.takeoff.seen else self.points  # the fan is heard until the loss has moved
            return Fan([[rho] * self.knobs for rho in takeoff.wide_fan(points)], True)
        rows = Balanced().places(self.points, self.knobs, self.seed, k)
        apart = k % c.APART_EVERY == c.APART_EVERY - 1
        columns = (self.columns or range(self.knobs)) if apart else [0] * self.knobs
        return Fan([[1 + self.spread * row[g] for g in columns] for row in rows], False)

    def doubts(self, state: PilotState, losses: Sequence[float]) -> bool:
        """Whether the loss seems to have exploded, or half of what was gained to be lost again.

        Batches differ: earlier weights are then evaluated on the same one.
        """
        if state.landed is None:
            return False
        first, best = state.takeoff.first, lowest(losses)
        half_way = state.low < first - c.HALF * abs(first)
        return math.isinf(best) or best > c.DOUBT * state.scale or (half_way and best > c.HALF * (first + state.low))

    def remembering(self, state: PilotState, slots: Container[int]) -> PilotState:
        """The state where only the copies in some slots exist."""
        return state._replace(memory=state.memory.within(slots))

    # -- after a round --------------------------------------------------------------------------------------------

    def after_round(self, state: PilotState, evidence: Evidence) -> Order:
        """One round."""
        if state.landed is None:
            return self._taking_off(state, evidence)
        ruin = self._ruin(state, evidence)
        if ruin is None:
            return self._alarmed(Order(state), NOT_FINITE)
        if ruin > c.RUINED_PERHAPS:
            return self._worse(state, evidence, certain=ruin > c.RUINED)
        order = self._gone_well(state, evidence)
        seen = not (evidence.blind and evidence.displacement > c.VISIBLE)
        return order if seen else self._alarmed(order, BLIND)

    def _taking_off(self, state: PilotState, evidence: Evidence) -> Order:
        t, was = evidence.span[1], state.takeoff
        leg = takeoff.after_round(was, evidence, late=self._is_late(t))
        now = leg.state
        learned = [bounded_factor(math.exp(now.level))] * self.knobs
        scale = abs(now.first) if math.isfinite(now.first) else state.scale
        state = state._replace(takeoff=now, learned=learned, scale=scale)
        if leg.alarm is not None:
            course = Course(t, max(evidence.peak, t), c.CLIMB_FROM, geometric=False)
            order = Order(state._replace(course=course, landed=t), event=f"landed: {leg.alarm}")
            return self._alarmed(order, leg.alarm)
        if now.phase is Phase.LANDED:
            return self._landed(state._replace(course=Course(), landed=t), leg, evidence)
        if now.phase is Phase.RISING:
            state = state._replace(course=Course(t, t + c.SHORT, 1 / leg.growth))
        order = Order(state, event="take-off", anew=was.phase is not Phase.RISING)
        if leg.wish is Wish.RESTART:
            return order._replace(action=Action.RESTART, event="restarted: the first step was too long")
        if leg.wish is Wish.KEEP:
            return _keeping(order, _level_of_weights(was, leg), t)
        return order

    def _landed(self, state: PilotState, leg: Leg, evidence: Evidence) -> Order:
        """Take-off has found a rate: go back to weights that have not been near it, where that costs little."""
        t = evidence.span[1]
        moment = state.memory.last_below(leg.ceiling)
        if moment is None:  # nothing is remembered of before a resume
            return Order(state, Action.GO_ON, event="landed: slowed down")
        state = state._replace(memory=state.memory.only(moment))
        costly = self.total_steps is not None and moment.step < t - c.WORTH * self.total_steps
        if costly and not leg.exploded:
            return Order(state, event="landed: went on")
        return _going_back(state._replace(course=self._climb(state, moment, evidence)), moment, "landed")

    def _climb(self, state: PilotState, moment: Moment, evidence: Evidence) -> Course:
        """From the rate of the weights that it went back to up to the found one."""
        t = evidence.span[1]
        end = max(evidence.peak, t + (c.CLIMB * self.total_steps if self.total_steps is not None else t))
        start = min(1.0, math.exp(moment.level) / max(state.learned))
        return Course(t, end, start, geometric=False)

    def _is_late(self, t: int) -> bool:
        """Whether take-off has had its part of the run."""
        total = self.total_steps
        return total is not None and t > max(c.LATE * total, min(c.LATE_STEPS, c.LATE_SHORT * total))

    def _gone_well(self, state: PilotState, evidence: Evidence) -> Order:
        """Remember the weights, and let the controller move the rate."""
        (began, t), best = evidence.span, evidence.best
        scale = max(state.scale, abs(best)) if math.isfinite(state.scale) else abs(best)
        state = state._replace(worse=0, scale=scale, low=min(state.low, best))
        if self.controller is None:
            return Order(state)
        middle = (began + t) / 2
        order = self._moved(state, evidence, rising=state.course.at(middle) < 1 or middle < evidence.peak)
        if best > c.WORTH_KEEPING * abs(state.takeoff.first):
            return order
        memory = order.state.memory.ends()  # the first is that of landing
        order = order._replace(state=order.state._replace(memory=memory))
        return _keeping(order, math.log(max(state.learned) * state.course.at(t)), t)

    def _moved(self, state: PilotState, evidence: Evidence, rising: bool) -> Order:
        signals = comparable(evidence.losses)
        is_asked = self.controller is not None and evidence.span[1] >= self.start and evidence.steps > 0
        if self.controller is None or not is_asked or signals is None or evidence.shape < c.FALLING:
            return Order(state)
        offsets = [[rho - 1 for rho in row] for row in evidence.fan.rho]
        update = self.controller.update(state.controller, signals, offsets)
        if rising and _upwards(update.moves):  # below the target more always looks better, and to young weights too
            return Order(state)
        if len(update.moves) == self.knobs:  # otherwise the engine refuses the update
            learned = [bounded_factor(m * (1 + move)) for m, move in zip(state.learned, update.moves, strict=True)]
            state = state._replace(learned=learned, controller=update.state)
        return Order(state, update=update)

    def _ruin(self, state: PilotState, evidence: Evidence) -> float | None:
        """How far the loss is above that of earlier weights, over the first loss or their own; 0 without a doubt.

        None: no weights have a finite loss, so the batch or the probe is at fault.
        """
        best, earlier = evidence.best, evidence.earlier
        if not self.doubts(state, evidence.losses):
            return 0.0
        if math.isfinite(earlier):
            unit = max(abs(earlier), abs(state.takeoff.first))  # a first loss that is no number does not count
            return (best - earlier) / (unit or 1.0)
        if math.isinf(best) and (state.memory.moments or not math.isfinite(state.scale)):
            return None
        certain, perhaps = c.RUINED_ALONE * state.scale, c.DOUBT * state.scale  # no weights were kept
        return math.inf if certain < best < math.inf else c.RUINED if best > perhaps else 0.0

    def _worse(self, state: PilotState, evidence: Evidence, certain: bool) -> Order:
        """The weights are ruined. Go back at a third of the rate: at once if certain, else the second time in a row."""
        best, t = evidence.best, evidence.span[1]
        scale = max(state.scale, best / c.DOUBT) if math.isfinite(best) else state.scale
        state = state._replace(worse=state.worse + 1)
        if self.controller is None or (state.worse < c.TWICE and not certain):
            return Order(state)
        learned = [bounded_factor(m * state.course.at(t) / c.SLOWER) for m in state.learned]
        state = state._replace(worse=0, learned=learned, course=Course(), scale=scale)
        moment = state.memory.proven
        if moment is None:
            return Order(state, Action.GO_ON, event="too hot: slowed down")
        return _going_back(state._replace(memory=state.memory.used(moment)), moment, "too hot")

    @staticmethod
    def _alarmed(order: Order, why: str) -> Order:
        """With an alarm, unless there was one."""
        if order.state.alarmed:
            return order
        return order._replace(state=order.state._replace(alarmed=True), alarm=why)


def _keeping(order: Order, level: float, step: int) -> Order:
    """The order, and remember the weights as they are."""
    memory = order.state.memory.added(level, step)
    state = order.state._replace(memory=memory)
    return order._replace(state=state, action=Action.KEEP, slot=memory.moments[-1].slot)


def _going_back(state: PilotState, moment: Moment, word: str) -> Order:
    event = f"{word}: went back to step {moment.step}"
    return Order(state, Action.GO_BACK, moment.slot, event, went_back_to=moment.step)


def _upwards(moves: Sequence[float]) -> bool:
    """Whether the knobs move up on the whole; those that only part from each other do not."""
    return math.fsum(math.log1p(move) for move in moves if move > -1) > c.NO_MOVE


def _level_of_weights(was: TakeOffState, leg: Leg) -> float:
    """The level of the weights at the end of a round of take-off: before the growth that follows."""
    return leg.state.level if was.phase is Phase.FIRST else was.level
