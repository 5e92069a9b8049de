"""The pilot of a probed run: which points to probe at the end of a round, and what follows from their losses. Pure.

The engine carries it out on one model, the experiments on a stack of them: both run the same rules.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from hdet.algorithm.controllers import Controller, Update
from hdet.algorithm.design import Balanced
from hdet.algorithm.rounds import Growing
from hdet.algorithm.signals import comparable
from hdet.algorithm.takeoff import CLIMBING, FIRST, LANDED, Course, Leg, TakeOff, TakeOffState

__all__ = ["Fan", "Flight", "Order", "Pilot"]

LATE = 0.8
"""Nothing moves once the schedule has fallen below this part of its peak: then "more" always looks better."""
SHORTEST = 40
"""Runs of fewer steps do not take off: they would end before it does."""
WORTH = 0.1
"""Going back at landing may cost this part of the run; where it would cost more, training goes on as it is."""
RUINED = 0.1, 0.25
"""The weights are ruined, perhaps and certainly, where earlier ones have a loss on the same batch that is lower by
these parts of the first loss, or of their own if that is larger."""
FACTORS = (1e-15, 1e15)
"""Bounds of m: a guess may be wrong by any amount."""


class Flight(NamedTuple):
    """State of a probed run."""

    takeoff: TakeOffState
    course: Course
    landed: int | None
    """The step at which take-off ended; None: not yet."""
    learned: list[float]
    """m per knob: base = m * course * schedule."""
    controller: Any
    scale: float = math.nan
    """The largest probe loss of a good round: later losses come near 0 and differ by their batch."""
    worse: float = 0.0
    """Rounds in a row in which the weights were perhaps ruined."""
    low: float = math.inf
    """The lowest probe loss since take-off."""


class Fan(NamedTuple):
    """The points of a round."""

    rho: list[list[float]]
    """``rho[point][knob]``: multiples of the round's displacement."""
    fixed: bool
    """Whether the batch is take-off's one fixed batch, and the displacement ends at the weights as they are."""


class Order(NamedTuple):
    """What the pilot wants done after a round."""

    flight: Flight
    action: Literal["", "keep", "restart", "go back"] = ""
    """To the weights: nothing, remember them, or go back to earlier ones."""
    level: float = 0.0
    """log m of the weights to keep, or the highest allowed to go back to."""
    since: float = -math.inf
    """Weights from before this step are not worth going back to."""
    update: Update | None = None


@dataclass(frozen=True)
class Pilot:
    """The rules of a probed run.

    Args:
        controller: moves the base values after take-off; None: nothing ever moves.
        knobs: how many.
        spread: a: points stand at 1 - a to 1 + a times the round's displacement.
        points: how many.
        seed: of the design.
        rounds: where rounds end.
        peak: the step at which the schedule's rising phase ends: until there the rate climbs after take-off.
        start: the step from which the controller may move. Above 0 there is no take-off.
        takeoff: its rules.
        columns: the column of the design of each knob; None: each its own.
    """

    controller: Controller | None
    knobs: int
    spread: float
    points: int
    seed: int
    rounds: Growing
    peak: float
    start: int = 0
    takeoff: TakeOff = field(default_factory=TakeOff)
    columns: tuple[int, ...] | None = None

    def begin(self) -> Flight:
        """Before the first step."""
        total = self.rounds.total_steps
        long_enough = total is None or total >= SHORTEST
        takes_off = self.controller is not None and self.start == 0 and long_enough
        state = self.takeoff.init() if takes_off else TakeOffState(phase=LANDED)
        landed = None if takes_off else 0
        memory = self.controller.init(self.knobs) if self.controller is not None else None
        course = Course()
        if self.controller is not None and not takes_off:  # the rise of the schedule is held: climb as it would
            course = Course(0, max(self.peak, 0.0), 1 / 25, geometric=False)
        return Flight(state, course, landed, [math.exp(state.level)] * self.knobs, memory)

    def fan(self, flight: Flight, k: int) -> Fan:
        """The points of round ``k``."""
        if flight.landed is None:
            return Fan([[rho] * self.knobs for rho in self.takeoff.fan(self.points)], True)
        rows = Balanced().places(self.points, self.knobs, self.seed, k)
        apart = k % 3 == 2  # two rounds of three all knobs stand together: the common rate matters most
        columns = (self.columns or range(self.knobs)) if apart else [0] * self.knobs
        return Fan([[1 + self.spread * row[g] for g in columns] for row in rows], False)

    def doubts(self, flight: Flight, losses: Sequence[float]) -> bool:
        """Whether the loss seems to have exploded, or half of what was gained to be lost again.

        Batches differ: the weights that it would go back to will tell, on the same one.
        """
        if flight.landed is None:
            return False
        first, best = flight.takeoff.first, _lowest(losses)
        half_way = flight.low < first - abs(first) / 2
        return best > 3 * flight.scale or (half_way and best > (first + flight.low) / 2)

    def after_round(
        self,
        flight: Flight,
        fan: Fan,
        span: tuple[int, int],
        losses: Sequence[float],
        moved: float,
        shape: float,
        reach: float = -math.inf,
        before: float = math.nan,
    ) -> Order:
        """One round.

        Args:
            flight: the state in the round.
            fan: its points.
            span: the steps at which it began and ended.
            losses: of the points.
            moved: the norm of the displacement over the norm of the weights.
            shape: the schedule at its end, over its peak.
            reach: while taking off, log m of the rate that the gradients ask for.
            before: where the pilot :meth:`doubts`, the loss on the same batch of the weights that it would go back to.
        """
        if flight.landed is None:
            return self._taking_off(flight, span[1], losses, moved, reach)
        best = _lowest(losses)
        ruin = self._ruin(flight, losses, before)
        if ruin > RUINED[0]:
            return self._worse(flight, best, span[1], certain=ruin > RUINED[1])
        scale = max(flight.scale, abs(best)) if math.isfinite(flight.scale) else abs(best)
        flight = flight._replace(worse=0.0, scale=scale, low=min(flight.low, best))
        if self.controller is None:
            return Order(flight)
        level = math.log(max(flight.learned) * flight.course.at(span[1]))
        action: Literal["", "keep"] = "" if best > 2 * abs(flight.takeoff.first) else "keep"
        signals = comparable(losses)
        if signals is None or span[1] < self.start or shape < LATE:
            return Order(flight, action, level)
        offsets = [[rho - 1 for rho in row] for row in fan.rho]
        update = self.controller.update(flight.controller, signals, offsets)
        climbing = flight.course.at(sum(span) / 2) < 1
        if climbing and sum(update.moves) > 0:  # below the target more always looks better: climb there first
            return Order(flight, action, level)
        learned = [_bounded(m * math.exp(move)) for m, move in zip(flight.learned, update.moves, strict=True)]
        return Order(flight._replace(learned=learned, controller=update.state), action, level, update=update)

    def _taking_off(self, flight: Flight, t: int, losses: Sequence[float], moved: float, reach: float) -> Order:
        was = flight.takeoff
        if was.phase == FIRST:
            leg = self.takeoff.after_first_step(was, moved, losses[0])
        else:
            early, late = self._is_early(t), self._is_late(t)
            leg = self.takeoff.after_round(was, losses, reach, moved, early, late, self.rounds.short)
        state = leg.state
        learned = [_bounded(math.exp(state.level))] * self.knobs
        scale = abs(state.first) if math.isfinite(state.first) else flight.scale
        flight = flight._replace(takeoff=state, learned=learned, scale=scale)
        if state.phase == LANDED:
            flight = flight._replace(course=Course(), landed=t)
            if leg.action != "go back":  # the probe does not see the weights
                return Order(flight)
            total = self.rounds.total_steps
            since = -math.inf if leg.exploded or total is None else t - WORTH * total
            return Order(flight, leg.action, leg.ceiling, since)
        if state.phase == CLIMBING:
            flight = flight._replace(course=Course(t, t + self.rounds.short, 1 / leg.growth))
        return Order(flight, leg.action, _kept_at(was, leg))

    def _is_early(self, t: int) -> bool:
        """Whether going back would hardly cost anything."""
        total = self.rounds.total_steps
        return total is None or t <= 1.5 * WORTH * total

    def _is_late(self, t: int) -> bool:
        """Take-off may have three tenths of the run; of a short one forty steps, or six tenths."""
        total = self.rounds.total_steps
        return total is not None and t > max(0.3 * total, min(40, 0.6 * total))

    def gone_back(self, flight: Flight, t: int, kept_at: float) -> Flight:
        """After going back to weights kept at a level: the climb begins where they were."""
        total = self.rounds.total_steps
        end = max(self.peak, t + (0.1 * total if total is not None else t))
        start = min(1.0, math.exp(kept_at) / max(flight.learned))
        return flight._replace(course=Course(t, end, start, geometric=False))

    def _ruin(self, flight: Flight, losses: Sequence[float], before: float) -> float:
        """How far the loss is above that of earlier weights, over the first loss or their own; 0 without a doubt."""
        best = _lowest(losses)
        if math.isinf(best):
            return math.inf
        if not self.doubts(flight, losses):
            return 0.0
        if math.isfinite(before):
            unit = max(abs(before), abs(flight.takeoff.first))  # a first loss that is no number does not count
            return (best - before) / (unit or 1.0)
        certain, perhaps = best > 10 * flight.scale, best > 3 * flight.scale  # no weights were kept
        return math.inf if certain else RUINED[1] if perhaps else 0.0

    def _worse(self, flight: Flight, best: float, t: int, certain: bool) -> Order:
        """The weights are ruined. Go back at a third of the rate: beyond doubt at once, else the second time."""
        scale = max(flight.scale, best / 3) if math.isfinite(best) else flight.scale
        flight = flight._replace(worse=flight.worse + 1)
        if self.controller is None or (flight.worse < 2 and not certain):
            return Order(flight)
        now = flight.course.at(t)
        learned = [_bounded(m * now / 3) for m in flight.learned]
        return Order(flight._replace(worse=0.0, learned=learned, course=Course(), scale=scale), "go back", math.inf)


def _lowest(losses: Sequence[float]) -> float:
    """Of those that are finite."""
    return min((loss for loss in losses if math.isfinite(loss)), default=math.inf)


def _kept_at(was: TakeOffState, leg: Leg) -> float:
    """The level of the weights at the end of a round of take-off: before the growth that follows."""
    return leg.state.level if was.phase == FIRST else was.level


def _bounded(m: float) -> float:
    return min(max(m, FACTORS[0]), FACTORS[1])
