"""The probed fan-out: all ranks train at the base value; replicas are points on the line of a round's displacement."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.algorithm.auto.evidence import Evidence
from hdet.algorithm.auto.pilot import Action, Order, Pilot, PilotState
from hdet.algorithm.auto.rounds import Growing
from hdet.algorithm.auto.takeoff import Phase
from hdet.algorithm.knob import KnobSpec
from hdet.comm.group import ReplicaGroup, Seat, arriving
from hdet.engine.clock import Clock
from hdet.engine.meeting import Meeting
from hdet.engine.probe import ProbeBatch, ProbeFn
from hdet.engine.probed.evaluated import evaluated
from hdet.engine.probed.line import loss_now
from hdet.engine.probed.saving import loaded, saved
from hdet.engine.probed.slots import Slots
from hdet.engine.probed.telling import record_of, warning_of
from hdet.engine.probed.witness import Measured, Witness, gathered
from hdet.engine.rates import Rate
from hdet.engine.rollcall import Occasion, RollCall
from hdet.engine.way import RoundEnd, RoundReport, check_moves, terms
from hdet.engine.weights import NO_WEIGHTS, Body, Weights, trained_parameters
from hdet.errors import DisagreementError, DivergedError

__all__ = ["ProbedWay"]


class ProbedWay:
    """Probes, take-off and line search of one replica.

    No weights are averaged: gradients are shared, so all ranks hold the same ones. The points of a round are shared out
    over the ranks; each evaluates its own, and their losses are gathered.

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
        self.probe = probe
        self._model = model if model is not None else getattr(probe, "model", None)
        self._body = Body(None)
        self._witness = Witness(knob_of_group)
        self._slots = Slots()
        self._highest = 0.0
        """The schedule's highest value so far, of the first knob."""
        self._finished = False

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

    @property
    def _rising(self) -> bool:
        return self.pilot_state.takeoff.phase is Phase.RISING

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
        self._witness.grow(len(self.specs), len(more))
        self.specs += more
        self.pilot = dataclasses.replace(self.pilot, knobs=len(self.specs), columns=None)
        memory = controller.init(len(self.specs)) if controller is not None else None
        self.pilot_state = state._replace(learned=[*state.learned, *[common] * len(more)], controller=memory)

    # -- the loop -------------------------------------------------------------------------------------------------

    def begin(self, optimizer: Optimizer) -> None:
        self._body.remember(optimizer)
        self._witness.watch(optimizer, self, ProbedWay._before_step)

    def take_over(self) -> None:
        """What was measured and kept so far belongs to another run or another scheduler."""
        self._witness.begin_anew()
        self._slots = Slots()

    def first_weights(self, optimizer: Optimizer) -> Weights:
        return self._body.first_weights(optimizer)

    def met(self, group: ReplicaGroup) -> None:
        """Nothing is shared beside the weights, which are equal."""

    def _before_step(self, optimizer: Optimizer) -> None:
        if self._finished:
            return
        if self.pilot_state.takeoff.phase is Phase.FIRST:
            self._slots.keep_start(optimizer, self._model)
        self._witness.before_step(optimizer, self._rising)

    def after_step(self, optimizer: Optimizer, t: int, meeting: Meeting) -> None:
        """A step of training has been made: part of the round's mean."""
        self._witness.watch(optimizer, self, ProbedWay._before_step)  # a copy has no hook yet
        self._finished = t >= (self.pilot.total_steps or math.inf)
        if t <= 0:  # SequentialLR sets the first rates
            self.take_over()
            return
        self._witness.after_step(optimizer, self._rising)
        if self.pilot_state.landed is not None:  # take-off looks at the weights as they are
            start, end = self.rounds.span(t)
            self._witness.take_snapshot(optimizer, t - start, end - start)
        if not self._finished:
            self._witness.expect_step(optimizer, self._rising)

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
            record = record_of(k, end, roll, evidence, before, order, self.pilot.controller, clock.seconds)
        return RoundReport(record, warning_of(order, end.after))

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

    def _evidence(self, state: PilotState, k: int, end: RoundEnd, group: ReplicaGroup) -> Evidence:
        """What the round has shown; on every rank the same: what is measured twice is rank 0's."""
        optimizer, witness = end.optimizer, self._witness
        fan, span = self.pilot.fan(state, k), self.rounds.span(end.after)
        if isinstance(self.probe, ProbeBatch):
            with arriving(f"sharing the probe batch of round {k}"):
                self.probe.prepare(0 if fan.fixed else k, group)
        points, what = len(fan.rho), f"gathering the points of round {k}"
        device = self.weights(optimizer).device
        rows = gathered(group, device, what, points, lambda: witness.measure(optimizer, fan, group, self.probe))
        losses = [rows[point % len(rows)].losses[point] for point in range(points)]
        witness.notice_unseen_steps(rows[0].displacement, span[1] - span[0])
        return Evidence(
            span=span,
            fan=fan,
            losses=losses,
            peak=end.peak(),
            shape=self._shape(end),
            steps=witness.steps,
            displacement=rows[0].displacement,
            reach=_level(rows[0].reach, end),
            resolution=witness.resolution(optimizer),
            earlier=self._loss_of_proven(state, end, group) if self.pilot.doubts(state, losses) else math.nan,
        )

    def _loss_of_proven(self, state: PilotState, end: RoundEnd, group: ReplicaGroup) -> float:
        """The loss of the weights that it would go back to, on this round's batch; NaN without any. Rank 0's."""
        moment = state.memory.proven

        def measure() -> Measured:
            if moment is None:
                return Measured([math.nan])
            with self._slots.shown(moment.slot, end.optimizer, self._model), evaluated(end.optimizer):
                return Measured([loss_now(self.probe, trained_parameters(end.optimizer))])

        what, device = f"comparing with earlier weights at step {end.after}", self.weights(end.optimizer).device
        return gathered(group, device, what, 1, measure)[0].losses[0]

    def _shape(self, end: RoundEnd) -> float:
        """The schedule of the first knob, relative to its highest value so far."""
        before, now = end.schedule(end.before)[0], end.schedule(end.after)[0]
        self._highest = max(self._highest, before, now)
        return now / self._highest if self._highest else 1.0

    def _carry_out(self, order: Order, end: RoundEnd) -> None:
        """Do what the pilot wants with the weights."""
        optimizer, slot = end.optimizer, order.slot
        if order.action is Action.KEEP and slot is not None:
            self._slots.keep(slot, optimizer, self._model)
        elif order.action is Action.GO_BACK and slot is not None:
            self._slots.restore_(slot, optimizer, self._model)
        elif order.action is Action.RESTART:
            self._witness.restart_(optimizer)
            self._slots.restart_(optimizer, self._model)
        elif order.action is Action.GO_ON and not bool(self.weights(optimizer).all_finite()):
            raise DivergedError(
                f"the weights are not finite at step {end.after}, and none are remembered to go back to; load an "
                "earlier checkpoint"
            )
        self.pilot_state = order.state
        self._slots.keep_only(order.state.memory.slots)
        if order.state.takeoff.phase is not Phase.FIRST:
            self._slots.forget_start()
        self._witness.end_round(anew=order.anew)
        if not self._finished:
            self._witness.expect_step(optimizer, self._rising)

    # -- state ----------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        return {**saved(self.pilot, self.pilot_state), "highest": self._highest}

    def tensors(self) -> list[list[Tensor]]:
        return []

    def load(self, state: Mapping[str, Any], tensors: Sequence[Sequence[Tensor]], total_steps: int | None) -> None:
        """A round's displacement begins anew, and there is nothing to go back to yet."""
        pilot, pilot_state = loaded(self.pilot, state, total_steps)
        self.pilot, self.pilot_state, self._highest = pilot, pilot_state, state["highest"]
        self.specs = [dataclasses.replace(spec, spread=pilot.spread) for spec in self.specs]
        self.take_over()

    def adopt(self, total_steps: int, t: int) -> None:
        """From the rate of torch's checkpoint, without a take-off."""
        self.pilot = dataclasses.replace(self.pilot, total_steps=total_steps)
        if t > 0:
            self.pilot_state = self.pilot.without_take_off(t, self.pilot_state.controller)

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and deepcopy: a copy has other tensors, so what was measured and kept of them is left out."""
        return {**vars(self), "_witness": self._witness.fresh(), "_slots": Slots()}


def _level(rate: float, end: RoundEnd) -> float:
    """log m of a rate that the gradients ask for; -inf where they say nothing."""
    guess = end.schedule(end.before)[0]
    return math.log(rate / guess) if rate > 0 and guess > 0 else -math.inf
