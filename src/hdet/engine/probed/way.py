"""The probed fan-out: everybody trains at the base value; replicas are points on the line of a round's displacement."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.algorithm.auto.course import Course
from hdet.algorithm.auto.evidence import Evidence, Fan
from hdet.algorithm.auto.pilot import Action, Order, Pilot, PilotState
from hdet.algorithm.auto.rounds import Growing
from hdet.algorithm.auto.takeoff import BLIND, NEVER_MOVED, NOT_FINITE, Phase, TakeOffState
from hdet.algorithm.knob import KnobSpec
from hdet.comm.group import ReplicaGroup, Seat, arriving
from hdet.engine.checkpoint import controller_from, controller_saved, in_pairs
from hdet.engine.clock import Clock
from hdet.engine.meeting import Meeting
from hdet.engine.probe import ProbeBatch, ProbeFn
from hdet.engine.probed.evaluated import evaluated
from hdet.engine.probed.gradients import Gradients
from hdet.engine.probed.line import Line, loss_now
from hdet.engine.probed.slots import Slots
from hdet.engine.probed.watch import Watch
from hdet.engine.rates import Rate, copy_rate
from hdet.engine.records import round_record, verdict_records
from hdet.engine.rollcall import Occasion, RollCall
from hdet.engine.way import RoundEnd, RoundReport, check_moves, terms
from hdet.engine.weights import NO_WEIGHTS, Body, Weights, trained_parameters
from hdet.errors import ArgumentError, DisagreementError, DivergedError

__all__ = ["ProbedWay"]

_CURES = {
    BLIND: "Give probe= a loss of the model that trains",
    NOT_FINITE: "Look for NaN in the probe batch, and for a loss that overflows",
    NEVER_MOVED: "Call optimizer.step() before scheduler.step(), with gradients that are not zero",
}


class _Measured(NamedTuple):
    """What one rank measures at the end of a round; equal on all ranks but for the losses."""

    losses: list[float]
    """Of this rank's points; NaN for the others'."""
    displacement: float = math.nan
    reach: float = -math.inf


class ProbedWay:
    """Probes, take-off and line search of one replica.

    No weights are averaged: gradients are shared, so all ranks hold the same ones. The points of a round are dealt out
    to the ranks; each evaluates its own, and their losses are gathered.

    Memory: the anchor and the round's mean (in take-off, the sum of gradients) in fp32 and, while points are evaluated,
    the weights to come back to. Host memory: :class:`hdet.engine.probed.slots.Slots`.

    Args:
        pilot: the rules.
        specs: the knobs, all of them learning rates.
        knob_of_group: the knob that is each parameter group's rate.
        probe: gives a loss of the current model; a :class:`hdet.ProbeBatch` shares one batch among all ranks.
        model: whose buffers are put back when training goes back; None: the probe's.
    """

    name: Literal["probed"] = "probed"
    drifts_apart = False

    def __init__(
        self,
        pilot: Pilot,
        specs: Sequence[KnobSpec],
        knob_of_group: Mapping[int, int],
        probe: ProbeFn,
        model: nn.Module | None,
    ) -> None:
        self.pilot = pilot
        self.pilot_state = pilot.begin()
        self.specs = list(specs)
        self._knob_of_group = dict(knob_of_group)
        self._probe = probe
        self._model = model if model is not None else getattr(probe, "model", None)
        self._body = Body(None)
        self._highest = 0.0
        """The schedule's highest value so far, of the first knob."""
        self._finished = False
        self._forget()

    def _forget(self) -> None:
        """What is measured and copied begins anew; none of it is saved or copied."""
        self._line = Line()
        self._gradients = Gradients()
        self._slots = Slots()
        self._watch = Watch()
        self._steps = 0
        """Steps of the optimizer in this round."""
        self._weights_before: list[Tensor] = []
        """Where steps are replayed from a graph and not heard of: the weights from before the one to come."""

    # -- values ---------------------------------------------------------------------------------------------------

    @property
    def rounds(self) -> Growing:
        return self.pilot.rounds(self.pilot_state)

    @property
    def learned(self) -> list[float]:
        return self.pilot_state.learned

    @property
    def holds_rise(self) -> bool:
        return self.pilot_state.held

    def base(self, schedule: Sequence[Rate], t: int) -> list[Rate]:
        """m times the course times the schedule."""
        way = self.pilot_state.course.at(t)
        return [value * (m * way) for value, m in zip(schedule, self.learned, strict=True)]

    def rates(self, schedule: Sequence[Rate], t: int, seat: Seat) -> list[Rate]:
        return self.base(schedule, t)

    def multipliers(self, t: int, seat: Seat) -> list[float]:
        return [1.0] * len(self.specs)

    def values(self, t: int, seat: Seat) -> list[float]:
        return list(self.learned)

    def terms(self) -> dict[str, float]:
        pilot = self.pilot
        return terms(
            self.specs,
            [self.name, pilot.controller, pilot.points],
            controller=pilot.controller,
            total_steps=pilot.total_steps,
            sync_every=pilot.length,
            seed=pilot.seed,
            start=pilot.start,
        )

    def grow(self, more: Sequence[KnobSpec]) -> None:
        """Further groups begin at the common rate, the controller anew."""
        state, controller = self.pilot_state, self.pilot.controller
        common = math.exp(math.fsum(map(math.log, state.learned)) / len(state.learned))
        first_group = max(self._knob_of_group, default=-1) + 1
        self._knob_of_group |= {first_group + i: len(self.specs) + i for i in range(len(more))}
        self.specs += more
        self.pilot = dataclasses.replace(self.pilot, knobs=len(self.specs), columns=None)
        memory = controller.init(len(self.specs)) if controller is not None else None
        self.pilot_state = state._replace(learned=[*state.learned, *[common] * len(more)], controller=memory)

    # -- the loop -------------------------------------------------------------------------------------------------

    def begin(self, optimizer: Optimizer) -> None:
        self._body.remember(optimizer)
        self._watch.begin(optimizer, self, ProbedWay._before_step)

    def first_weights(self, optimizer: Optimizer) -> Weights:
        return self._body.first_weights(optimizer)

    def met(self, group: ReplicaGroup) -> None:
        pass

    def _before_step(self, optimizer: Optimizer) -> None:
        """The anchor is taken just before the first step of a round, and gradients are seen."""
        if self._finished:
            return
        if self.pilot_state.takeoff.phase is Phase.FIRST:
            self._slots.keep_start(optimizer)
        self._line.anchor_at(optimizer)
        self._see_gradients(optimizer, trained_parameters(optimizer))
        self._steps += 1

    def _see_gradients(self, optimizer: Optimizer, weights: Sequence[Tensor]) -> None:
        """Part of the reach, in take-off. Parameters that were frozen or thawed since make it begin anew."""
        if self.pilot_state.takeoff.phase is not Phase.RISING:
            return
        parameters = trained_parameters(optimizer)
        start = self._line.anchor_of(parameters)
        if start is None or len(weights) != len(start):
            self._begin_anew()
        else:
            self._gradients.add(start, weights, parameters, self._rate(optimizer))

    def _rate(self, optimizer: Optimizer) -> Rate:
        """The first knob's learning rate; a tensor stays on its device."""
        group = next((g for g, knob in self._knob_of_group.items() if knob == 0), 0)
        return copy_rate(optimizer.param_groups[group]["lr"])

    def _begin_anew(self) -> None:
        """The displacement, and what was seen along it, begin with the next step."""
        self._line.reset()
        self._gradients.reset()
        self._steps = 0

    def after_step(self, optimizer: Optimizer, t: int, meeting: Meeting) -> None:
        """A step of training has been made: part of the round's mean."""
        self._watch.begin(optimizer, self, ProbedWay._before_step)  # a copy has no hook yet
        self._finished = t >= (self.pilot.total_steps or math.inf)
        if t <= 0:  # SequentialLR sets the first rates: what was trained before is not this scheduler's
            self._begin_anew()
            return
        if not self._watch.sees_steps:
            self._step_unseen(optimizer)
        self._line.anchor_at(optimizer)
        if self.pilot_state.landed is not None:  # take-off looks at the weights as they are
            start, end = self.rounds.span(t)
            self._line.add(optimizer, t - start, end - start)
        self._expect_step(optimizer)

    def _step_unseen(self, optimizer: Optimizer) -> None:
        """A step that no hook told of, replayed from a graph or made by a wrapper: its traces are still there."""
        if self._line.anchor_of(trained_parameters(optimizer)) is not None:
            self._steps += 1
            if self._weights_before:
                self._see_gradients(optimizer, self._weights_before)

    def _expect_step(self, optimizer: Optimizer) -> None:
        """Where the next step will not be heard of: remember what it begins from."""
        if self._watch.sees_steps or self._finished:
            return
        self._line.anchor_at(optimizer)
        rising = self._watch.captured and self.pilot_state.takeoff.phase is Phase.RISING
        self._weights_before = [p.detach().clone() for p in trained_parameters(optimizer)] if rising else []

    def end_round(self, end: RoundEnd, meeting: Meeting) -> RoundReport:
        """Probe, decide, go back if need be. Nothing is averaged.

        Cost: one forward pass of the probe batch per point, shared by the ranks, and one small gather.
        """
        clock = Clock()
        roll = self._meet(end, meeting)
        clock.lap("gather")
        before, k = self.pilot_state, self.rounds.index(end.before)
        state = self.pilot.remembering(before, self._slots.present(end.optimizer))
        evidence = self._evidence(state, k, end, meeting.group)
        clock.lap("probe")
        order = self.pilot.after_round(state, evidence)
        if order.update is not None:
            check_moves(self.pilot.controller, order.update, len(self.specs), evidence.losses)
        self._carry_out(order, end)
        clock.lap("controller")
        record = None
        if roll.writer == meeting.group.rank:
            record = self._record(k, end, roll, evidence, before, order, {**clock.seconds, "converge": 0.0})
        return RoundReport(record, _warning(order.alarm, end.after))

    def weights(self, optimizer: Optimizer) -> Weights:
        """What trains, and nothing else: buffers may differ between ranks until DDP's next forward pass."""
        return NO_WEIGHTS._replace(parameters=self._body.weights(optimizer).parameters)

    def converge(self, optimizer: Optimizer, t: int, meeting: Meeting, occasion: Occasion) -> None:
        """The ranks hold one model already."""

    def _meet(self, end: RoundEnd, meeting: Meeting) -> RollCall:
        """Where there are others: check that all hold the same weights."""
        alone = meeting.group.seat.size == 1
        if alone and not meeting.keeps_journal:
            return RollCall.alone()
        weights = NO_WEIGHTS if alone else self.weights(end.optimizer)
        with arriving(f"the roll call at step {end.after}"):
            roll = meeting.roll_call(Occasion.ROUND_END, end.before, self.terms(), weights, expect_equal=True)
        if not roll.moving_equal and all(roll.finite):
            raise DisagreementError(
                f"the ranks hold different weights at step {end.after}, but a probed fan-out compares points of one "
                'model: wrap the model in DistributedDataParallel, or use fanout="trained"'
            )
        return roll

    # -- evidence -------------------------------------------------------------------------------------------------

    def _evidence(self, state: PilotState, k: int, end: RoundEnd, group: ReplicaGroup) -> Evidence:
        """What the round has shown; on every rank the same."""
        fan = self.pilot.fan(state, k)
        if isinstance(self._probe, ProbeBatch):
            with arriving(f"sharing the probe batch of round {k}"):
                self._probe.prepare(0 if fan.fixed else k, group)
        what, points = f"gathering the points of round {k}", len(fan.rho)
        rows = _gathered(group, what, points, lambda: self._measure(fan, end, group))
        losses = [rows[point % len(rows)].losses[point] for point in range(points)]
        span, displacement = self.rounds.span(end.after), rows[0].displacement
        if self._steps == 0 and displacement > 0:  # a graph was captured before this scheduler was built
            self._watch.captured, self._steps = True, span[1] - span[0]
        earlier = math.nan
        if self.pilot.doubts(state, losses):
            earlier = self._loss_of_proven(state, end, group)
        return Evidence(
            span=span,
            fan=fan,
            losses=losses,
            peak=end.peak(),
            shape=self._shape(end),
            steps=self._steps,
            displacement=displacement,
            reach=rows[0].reach,
            resolution=_resolution(end.optimizer),
            earlier=earlier,
        )

    def _measure(self, fan: Fan, end: RoundEnd, group: ReplicaGroup) -> _Measured:
        """This rank's share."""
        optimizer = end.optimizer
        mine = range(group.rank, len(fan.rho), group.seat.size)
        rho = self._by_group(fan.rho, optimizer)
        losses = self._line.losses(optimizer, rho, mine, self._probe, at_mean=not fan.fixed)
        suspicious = len({losses[point] for point in mine}) == 1 or self._steps == 0
        moved = math.nan
        if fan.fixed or suspicious:
            moved = self._line.displacement(optimizer, self._knob_of_group)
        return _Measured(losses, moved, self._reach_of(end) if fan.fixed else -math.inf)

    def _loss_of_proven(self, state: PilotState, end: RoundEnd, group: ReplicaGroup) -> float:
        """The loss of the weights that it would go back to, on this round's batch; NaN without any. Rank 0's."""
        moment = state.memory.proven

        def measure() -> _Measured:
            if moment is None:
                return _Measured([math.nan])
            with self._slots.shown(moment.slot, end.optimizer, self._model), evaluated(end.optimizer):
                return _Measured([loss_now(self._probe, trained_parameters(end.optimizer))])

        return _gathered(group, f"comparing with earlier weights at step {end.after}", 1, measure)[0].losses[0]

    def _reach_of(self, end: RoundEnd) -> float:
        """log m of the rate that the gradients of take-off ask for; -inf where they say nothing."""
        parameters = trained_parameters(end.optimizer)
        start = self._line.anchor_of(parameters)
        rate = self._gradients.reach(start, parameters) if start is not None else 0.0
        guess = max(end.schedule(end.before)[:1], default=0.0)
        return math.log(rate / guess) if rate > 0 and guess > 0 else -math.inf

    def _by_group(self, rho: list[list[float]], optimizer: Optimizer) -> list[list[float]]:
        """``rho[point][group]``: 1 for groups whose rate is no knob."""
        knob_of, groups = self._knob_of_group, range(len(optimizer.param_groups))
        return [[row[knob_of[g]] if g in knob_of else 1.0 for g in groups] for row in rho]

    def _shape(self, end: RoundEnd) -> float:
        """The schedule of the first knob, relative to its highest value so far."""
        now = max(end.schedule(end.after)[:1], default=1.0)
        self._highest = max(self._highest, now, *end.schedule(end.before)[:1])
        return now / self._highest if self._highest else 1.0

    # -- orders ---------------------------------------------------------------------------------------------------

    def _carry_out(self, order: Order, end: RoundEnd) -> None:
        """Do what the pilot wants with the weights."""
        optimizer, slot = end.optimizer, order.slot
        if order.action is Action.KEEP and slot is not None:
            self._slots.keep(slot, optimizer, self._model)
        elif order.action is Action.GO_BACK and slot is not None:
            self._slots.restore_(slot, optimizer, self._model)
        elif order.action is Action.RESTART:
            self._line.back_to_anchor_(optimizer)
            self._slots.restart_(optimizer)
        elif order.action is Action.GO_ON and not bool(self.weights(optimizer).all_finite()):
            raise DivergedError(
                f"the weights are not finite at step {end.after}, and none are remembered to go back to; load an "
                "earlier checkpoint"
            )
        self.pilot_state = order.state
        self._slots.keep_only(order.state.memory.slots)
        self._steps = 0
        if order.anew:
            self._begin_anew()
        self._expect_step(optimizer)

    def _record(
        self,
        k: int,
        end: RoundEnd,
        roll: RollCall,
        evidence: Evidence,
        before: PilotState,
        order: Order,
        seconds: dict[str, float],
    ) -> dict[str, Any]:
        losses, rho = list(evidence.losses), evidence.fan.rho
        then, now = end.schedule(end.before), end.schedule(end.after)
        base = [m * before.course.at(end.before) * value for m, value in zip(before.learned, then, strict=True)]
        shown = roll._replace(losses=roll.losses[:1] * len(losses), signals=losses, finite=[True] * len(losses))
        record = round_record(
            k=k,
            step=end.after,
            roll=shown,
            base=base,
            values=[[b * multiple for b, multiple in zip(base, row, strict=True)] for row in rho],
            multipliers=rho,
            update=order.update,
            controller_state=order.state.controller,
            learned=order.state.learned,
            new_base=[float(value) for value in self.base(now, end.after)],
            divergence=[0.0] * len(rho),
            seconds=seconds,
        )
        verdict = verdict_records(self.pilot.controller, order.state.controller, order.update)
        story = {"event": order.event, "went_back_to": order.went_back_to, "alarm": order.alarm}
        return {**record, "shape": [float(value) for value in now], "verdict": verdict, **story}

    # -- state ----------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """With the pilot's state. Weights kept for going back are not saved."""
        pilot, state = self.pilot, self.pilot_state
        return {
            "sync_every": pilot.length if pilot.length is not None else "auto",
            "seed": pilot.seed,
            "auto_lr_start": pilot.start,
            "points": pilot.points,
            "learned": list(state.learned),
            **controller_saved(pilot.controller, state.controller),
            "takeoff": in_pairs({**state.takeoff._asdict(), "phase": int(state.takeoff.phase)}),
            "course": in_pairs(state.course._asdict()),
            "landed": state.landed,
            "held": state.held,
            "scale": state.scale,
            "worse": state.worse,
            "low": state.low,
            "alarmed": state.alarmed,
            "highest": self._highest,
        }

    def tensors(self) -> list[list[Tensor]]:
        return []

    def load(self, state: Mapping[str, Any], tensors: Sequence[Sequence[Tensor]], total_steps: int | None) -> None:
        """A round's displacement begins anew."""
        controller, memory = controller_from(state, self.pilot.controller, len(self.specs))
        takeoff = dict(state["takeoff"])
        loaded = PilotState(
            TakeOffState(**{**takeoff, "phase": Phase(takeoff["phase"])}),
            Course(**dict(state["course"])),
            None if state["landed"] is None else int(state["landed"]),
            list(state["learned"]),
            memory,
            held=bool(state["held"]),
            scale=state["scale"],
            worse=int(state["worse"]),
            low=state["low"],
            alarmed=bool(state["alarmed"]),
        )
        spread = max(state["spreads"], default=self.pilot.spread)
        self.pilot = dataclasses.replace(
            self.pilot,
            controller=controller,
            total_steps=total_steps,
            length=None if state["sync_every"] == "auto" else int(state["sync_every"]),
            points=int(state["points"]),
            spread=float(spread),
            seed=int(state["seed"]),
            start=int(state["auto_lr_start"]),
        )
        self.specs = [dataclasses.replace(spec, spread=float(spread)) for spec in self.specs]
        self.pilot_state, self._highest = loaded, state["highest"]
        self._line, self._gradients, self._slots = Line(), Gradients(), Slots()
        self._steps, self._weights_before = 0, []

    def adopt(self, total_steps: int, t: int) -> None:
        """From the rate of torch's checkpoint, without a take-off."""
        self.pilot = dataclasses.replace(self.pilot, total_steps=total_steps)
        if t > 0:
            self.pilot_state = self.pilot.without_take_off(t, self.pilot_state.controller)

    def __getstate__(self) -> dict[str, Any]:
        left_out = ("_line", "_gradients", "_slots", "_watch", "_steps", "_weights_before")
        return {name: value for name, value in vars(self).items() if name not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()


def _gathered(group: ReplicaGroup, what: str, points: int, measure: Callable[[], _Measured]) -> list[_Measured]:
    """What every rank has measured. Whatever the user's probe raises on one rank, the others hear of it."""
    failure, mine = None, _Measured([math.nan] * points)
    try:
        mine = measure()
    except Exception as error:
        failure = error
    with arriving(what):
        rows = group.gather([*mine.losses, mine.displacement, mine.reach, float(failure is not None)])
    if failure is not None:
        raise failure
    failed = [rank for rank, row in enumerate(rows) if row[-1]]
    if failed:
        raise ArgumentError(f"the probe raised an error on the ranks {failed}; see their messages")
    return [_Measured(row[:points], *row[points:-1]) for row in rows]


def _resolution(optimizer: Optimizer) -> float:
    """The coarsest relative distance of neighbouring numbers among the types of the weights."""
    return max((torch.finfo(p.dtype.to_real()).eps for p in trained_parameters(optimizer)), default=0.0)


def _warning(alarm: str | None, step: int) -> str | None:
    if alarm is None:
        return None
    return f"{alarm}, at step {step}: the learning rate cannot be found, and the guess is kept to. {_CURES[alarm]}"
