"""The probed way: one model, whose learning rate is searched while it trains."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.algorithm.auto import constants as c
from hdet.algorithm.auto.evidence import Evidence
from hdet.algorithm.auto.pilot import Action, Moment, Order, Phase, Pilot, PilotState
from hdet.algorithm.auto.rounds import Growing
from hdet.algorithm.knob import KnobSpec
from hdet.distributed.average import average_
from hdet.distributed.group import ReplicaGroup, Seat, Solo, arriving
from hdet.distributed.meeting import Meeting
from hdet.distributed.partitions import refuse_partitions
from hdet.distributed.rollcall import Occasion, RollCall
from hdet.distributed.shards import hold_alike
from hdet.distributed.weights import NO_WEIGHTS, Body, Weights
from hdet.engine.checkpoint import STATE_WORDS
from hdet.engine.clock import Clock
from hdet.engine.probe import ProbeBatch, ProbeFn
from hdet.engine.probed.losses import gathered, loss_now
from hdet.engine.probed.saving import check_search, loaded, saved
from hdet.engine.probed.slots import Slots
from hdet.engine.probed.telling import record_of, warning_of
from hdet.engine.probed.witness import Witness
from hdet.engine.train_probe import TrainProbe
from hdet.engine.way import RoundEnd, RoundReport, no_train_probe, terms
from hdet.errors import DisagreementError, DivergedError, ShardedParametersError
from hdet.parameters import trained_parameters
from hdet.rates import Rate, stands_still
from hdet.state_rules import check_state, flag, number, pairs

__all__ = ["ProbedWay"]

_NOT_PROBED = (
    "a probe would not see what is written into them. Leave lr_scheduler out of deepspeed.initialize, and call "
    "hdet.integrations.deepspeed.auto(engine, total_steps=..., probe=...) after it"
)


class ProbedWay:
    """The search of one replica.

    No weights are averaged: gradients are shared, so all ranks hold the same ones. Buffers are: each rank's batch norms
    have seen other batches. At the end of a round the loss of the weights as they are is compared with that of a round
    ago; two ranks or more evaluate one each.

    Memory, while it searches: the origin and the sum of gradients in fp32. Two copies to go back to: :class:`Slots`.

    Args:
        pilot: the rules.
        specs: the knobs, all of them learning rates.
        knob_of_group: the knob that is each parameter group's rate; groups that are left alone are not in it.
        probe: gives a loss of the current model; a :class:`hdet.ProbeBatch` shares one batch among all ranks.
        model: whose buffers are averaged, and put back when training goes back; None: the probe's.
        limit: bytes of a device that copies to go back to may take; None: half of what is free.
    """

    name: Literal["probed"] = "probed"

    def __init__(
        self,
        pilot: Pilot,
        specs: Sequence[KnobSpec],
        knob_of_group: Mapping[int, int],
        probe: ProbeFn,
        model: nn.Module | None,
        limit: int | None = None,
    ) -> None:
        self.pilot = pilot
        self.pilot_state = pilot.begin()
        self.specs = list(specs)
        self.probe = probe
        self.model = model if model is not None else getattr(probe, "model", None)
        self._body = Body(self.model)
        self._witness = Witness(knob_of_group)
        self._lead = min(knob_of_group.values())
        """The knob whose rate stands for all."""
        self._slots = Slots(limit)
        self._highest = 0.0
        """The schedule's highest value so far, of the leading knob."""
        self._falling = False
        """Whether the schedule has fallen so far that nothing is raised any more."""
        self._finished = False
        self._teams = Solo.members
        self._begins_anew = False
        """Whether the search goes on from a checkpoint without what it held in tensors."""

    # -- values ---------------------------------------------------------------------------------------------------

    @property
    def rounds(self) -> Growing:
        return self.pilot.rounds

    @property
    def learned(self) -> list[float]:
        return [self.pilot_state.factor] * len(self.specs)

    @property
    def holds_rise(self) -> bool:
        return self.pilot_state.phase is not Phase.KEPT

    @property
    def drifts_apart(self) -> bool:
        return bool(self._body.buffers())

    def base(self, schedule: Sequence[Rate], t: int) -> list[Rate]:
        """m times the schedule, less while it rises."""
        factor = self.pilot_state.factor * self.pilot_state.rise(t)
        return [value * factor for value in schedule]

    def rates(self, schedule: Sequence[Rate], t: int, seat: Seat) -> list[Rate]:
        return self.base(schedule, t)

    def multipliers(self, t: int, seat: Seat) -> list[float]:
        return [1.0] * len(self.specs)

    def values(self, t: int, seat: Seat) -> list[float]:
        return self.learned

    def terms(self) -> dict[str, float]:
        return terms(
            self.specs,
            [self.name, self.pilot.searches],
            controller=None,
            total_steps=self.pilot.total_steps,
            sync_every=None,
            seed=0,
            start=None,
        )

    def grow(self, more: Sequence[KnobSpec]) -> None:
        """Further groups have the common factor."""
        self._witness.grow(len(self.specs), len(more))
        self.specs += more

    # -- the loop -------------------------------------------------------------------------------------------------

    def begin(self, optimizer: Optimizer) -> None:
        refuse_partitions(optimizer, _NOT_PROBED)
        self._body.remember(optimizer)
        self._witness.watch(optimizer, self, ProbedWay._before_step)

    def take_over(self) -> None:
        """What was measured and kept so far belongs to another run or another scheduler."""
        self._witness.begin_anew()
        self._witness.length = None
        self._witness.sleep(False)
        self._slots = self._slots.emptied()
        if isinstance(self.probe, TrainProbe):
            self.probe.begin_anew()

    def set_aside(self, batch: Any) -> None:
        if not isinstance(self.probe, TrainProbe):
            raise no_train_probe(f"here it is {self.probe!r}")
        self.probe.set_aside(batch)

    def first_weights(self, optimizer: Optimizer) -> Weights:
        self._body.first_weights(optimizer, self.model)  # raises for what cannot be trained so
        return _what_trains(optimizer)._replace(buffers=self._body.buffers())

    def met(self, group: ReplicaGroup, roll: RollCall) -> None:
        """Who evaluates a loss together: a forward pass of a sharded model takes all ranks that share it."""
        if hold_alike(group.members, roll.held):
            self._teams = group.members
        elif all(len(ranks) == 1 for ranks in group.members):
            self._teams = [list(range(len(roll.held)))]
        else:
            raise ShardedParametersError(
                f"the arms {group.members} given as group= do not hold one whole model each; use "
                'group=hdet.arms(mesh, "replicate") with the dimension of the mesh along which the model is not '
                "sharded, or leave group out"
            )

    @property
    def _looks(self) -> bool:
        """Whether steps are of interest: the first one, and all until the schedule falls."""
        phase = self.pilot_state.phase
        return not self._finished and (phase is Phase.FIRST or (phase is Phase.SEARCHING and not self._falling))

    @property
    def _hears(self) -> bool:
        """Whether gradients are of interest."""
        return self.pilot_state.phase is Phase.SEARCHING

    def _before_step(self, optimizer: Optimizer) -> None:
        self._slots.wait()
        if not self._looks or stands_still(optimizer):
            return
        if self.pilot_state.phase is Phase.FIRST:
            self._slots.keep_start(optimizer, self.model)
        self._witness.before_step(optimizer, self._hears)

    def after_step(self, optimizer: Optimizer, t: int, meeting: Meeting) -> None:
        """A step of training has been made."""
        self._witness.watch(optimizer, self, ProbedWay._before_step)  # a copy has no hook yet
        self._finished = t >= (self.pilot.total_steps or math.inf)
        if t <= 0:  # SequentialLR sets the first rates
            self.take_over()
        elif self._looks:
            self._witness.after_step(optimizer, self._hears)
            if self._witness.length is None:  # resumed inside a round
                self._witness.length = self.rounds.next_end(t + 1) - t
            self._witness.expect_step(optimizer, self._hears)

    def rest(self, t: int) -> range:
        """While nothing is listened to, steps until the end of the round ask nothing of us."""
        return range(0) if self._looks else range(t, self.rounds.next_end(t + 1))

    def end_round(self, end: RoundEnd, meeting: Meeting) -> RoundReport:
        """Average the buffers, probe, decide, go back if need be.

        Cost: two forward passes of the probe batch, shared by the ranks, and one small gather; with buffers two, and an
        all-reduce of those.
        """
        clock = Clock()
        roll = self._meet(end, meeting)
        if meeting.group.seat.size > 1 and self.drifts_apart:  # before the probes and the copies: all ranks' are equal
            self.converge(end.optimizer, end.before, meeting, Occasion.BUFFERS)
        clock.lap("gather")
        before, then, k = self.pilot_state, end.schedule(end.before), self.rounds.index(end.before)
        state = self.pilot.remembering(before, self._slots.present(end.optimizer))
        evidence = self._evidence(state, k, end, meeting.group)
        if not all(roll.finite):  # on one rank, perhaps not the one that has measured: nobody's weights are to be kept
            evidence = evidence._replace(now=math.nan, displacement=math.inf)
        clock.lap("probe")
        order = self.pilot.after_round(state, evidence)
        self._falling = evidence.shape < c.FALLING
        self._carry_out(order, end, roll)
        clock.lap("controller")
        record = None
        if roll.writer == meeting.group.rank:
            record = record_of(k, end, roll, evidence, before, then, order, self._lead, clock.seconds)
        return RoundReport(record, warning_of(order, end.after))

    def weights(self, optimizer: Optimizer) -> Weights:
        """Buffers, which may differ between ranks until DDP's next forward pass. What trains is equal."""
        return NO_WEIGHTS._replace(buffers=self._body.buffers())

    def converge(self, optimizer: Optimizer, t: int, meeting: Meeting, occasion: Occasion) -> None:
        """Average the buffers, where they differ. A rank whose buffers are not finite gets the others' mean."""
        group, weights = meeting.group, self.weights(optimizer)
        with arriving(f"averaging the buffers at step {t}"):
            roll = meeting.roll_call(occasion, t, self.terms(), weights, expect_equal=True)
            if any(roll.finite) and not roll.moving_equal:
                average_(weights.buffers, group, roll.finite)

    def _meet(self, end: RoundEnd, meeting: Meeting) -> RollCall:
        """Where there are others: check that all hold the same weights."""
        alone = meeting.group.seat.size == 1
        if alone and not meeting.keeps_journal:
            return RollCall.alone()
        weights = NO_WEIGHTS if alone else _what_trains(end.optimizer)
        with arriving(f"the roll call at step {end.after}"):
            roll = meeting.roll_call(Occasion.ROUND_END, end.before, self.terms(), weights, expect_equal=True)
        if not roll.moving_equal and all(roll.finite):
            raise DisagreementError(
                f"the ranks hold different weights at step {end.after}, but a probed fan-out searches the rate of one "
                "model: wrap the model in DistributedDataParallel, shard it over a mesh of all ranks, or use "
                'fanout="trained"'
            )
        return roll

    def _evidence(self, state: PilotState, k: int, end: RoundEnd, group: ReplicaGroup) -> Evidence:
        """What the round has shown; on every rank the same."""
        optimizer, witness, span = end.optimizer, self._witness, self.rounds.span(end.after)
        if isinstance(self.probe, ProbeBatch):
            with arriving(f"sharing the probe batch of round {k}"):
                self.probe.prepare(k, group)
        looks = self._looks
        scalars = witness.scalars(optimizer) if looks else []
        device, what = _what_trains(optimizer).device, f"gathering the losses of round {k}"
        losses = [lambda: loss_now(self.probe, optimizer, self.model, device)]
        if state.moments:
            losses.append(lambda: self._loss_of(state.moments[-1].slot, optimizer, device))
        found, rows = gathered(group, self._teams, device, what, losses, scalars, witness.shown)
        measured = witness.measured(rows)
        if looks:
            witness.notice_unseen_steps(measured.displacement, span[1] - span[0])
        return Evidence(
            span=span,
            now=found[0],
            before=found[1] if state.moments else math.nan,
            peak=end.peak(),
            shape=self._shape(end),
            steps=witness.steps if looks else span[1] - span[0],
            displacement=measured.displacement,
            reach=_level(measured.reach, end.schedule(end.before)[self._lead]),
            straightness=measured.straightness,
            gradient=measured.gradient if looks else 0.0,
            rates=measured.rates if looks else 0.0,
            stretch=measured.stretch if looks else 0,
            direction=witness.direction(optimizer),
            resolution=witness.resolution(optimizer),
        )

    def _loss_of(self, slot: int, optimizer: Optimizer, device: torch.device) -> Tensor:
        with self._slots.shown(slot, optimizer, self.model):
            return loss_now(self.probe, optimizer, self.model, device)

    def _shape(self, end: RoundEnd) -> float:
        """The schedule of the leading knob, relative to its highest value so far; 1 until the climb ends."""
        before, now = end.schedule(end.before)[self._lead], end.schedule(end.after)[self._lead]
        self._highest = max(self._highest, before, now)
        climbs = end.after <= end.peak()  # also where the schedule of an Ensemble falls from its first step on
        return 1.0 if climbs or not self._highest else now / self._highest

    def _carry_out(self, order: Order, end: RoundEnd, roll: RollCall) -> None:
        """Do what the pilot wants with the weights."""
        optimizer, slot = end.optimizer, order.slot
        if order.action is Action.KEEP and slot is not None:
            self._slots.keep(slot, optimizer, self.model)
        elif order.action is Action.GO_BACK and slot is not None:
            self._slots.restore_(slot, optimizer, self.model)
        elif order.action is Action.RESTART:
            self._witness.restart_(optimizer)
            self._slots.restart_(optimizer, self.model)
        elif order.action is Action.GO_ON and not self._finite(optimizer, roll):
            raise DivergedError(
                f"the weights are not finite at step {end.after}, and none are remembered to go back to; load an "
                "earlier checkpoint"
            )
        self.pilot_state = order.state
        self._slots.keep_only(order.state.slots)
        if order.state.phase is not Phase.FIRST:
            self._slots.forget_start()
        following = self.rounds.next_end(end.after + 1) - end.after
        self._witness.begin_round(following, anew=order.anew or not self._looks)
        self._witness.sleep(not self._looks)
        if self._looks:
            self._witness.expect_step(optimizer, self._hears)
        if not self._witness.sees_steps:  # nobody will call us before the next step
            self._slots.wait()

    def _finite(self, optimizer: Optimizer, roll: RollCall) -> bool:
        """Whether the weights are, all ranks' parts of them; one that is alone has not read them yet."""
        return all(roll.finite) if len(roll.held) > 1 else bool(_what_trains(optimizer).all_finite())

    # -- state ----------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        return {**saved(self.pilot, self.pilot_state), "highest": self._highest, "falling": self._falling}

    def tensors(self) -> list[list[Tensor]]:
        return []

    def check(self, state: Mapping[str, Any], tensors: Sequence[Sequence[Tensor]], total_steps: int | None) -> None:
        check_state(state, {"searches": flag, "search": pairs, "highest": number, "falling": flag}, STATE_WORDS)
        check_search(state["search"])

    def load(self, state: Mapping[str, Any], tensors: Sequence[Sequence[Tensor]], total_steps: int | None) -> None:
        """Without :meth:`load_search`: on from an origin of its own, and there is nothing to go back to yet."""
        pilot, pilot_state = loaded(state, total_steps)
        self.pilot, self.pilot_state = pilot, pilot_state
        self._highest, self._falling = state["highest"], state["falling"]
        self.take_over()
        self._begins_anew = pilot_state.phase is Phase.SEARCHING

    def search(self, optimizer: Optimizer) -> dict[str, Any]:
        return {
            "moments": [list(moment) for moment in self.pilot_state.moments],
            "witness": self._witness.saved(optimizer),
            "slots": self._slots.saved(optimizer),
        }

    def check_search(self, search: Mapping[str, Any], optimizer: Optimizer) -> None:
        """By reading it as a load does, and forgetting it."""
        _moments(search)
        self._slots.loaded(search["slots"], optimizer)
        self._witness.fresh().load(search["witness"], optimizer)

    def load_search(self, search: Mapping[str, Any], optimizer: Optimizer) -> None:
        moments, slots = _moments(search), self._slots.loaded(search["slots"], optimizer)
        self._witness.load(search["witness"], optimizer)
        self._slots = slots
        self.pilot_state = self.pilot_state._replace(moments=moments)
        self._begins_anew = False

    def lost(self, t: int, seat: Seat) -> str | None:
        """A search that goes on: its copies and what was seen of it, unless they were loaded too."""
        begins_anew, self._begins_anew = self._begins_anew, False
        if self.pilot_state.phase is not Phase.SEARCHING or t >= (self.pilot.total_steps or math.inf):
            return None
        lost = ["the weights to go back to"] if begins_anew else []
        if begins_anew and not self._falling:
            lost.append("the way measured so far")
        if isinstance(self.probe, TrainProbe):
            lost.append("the batches that TrainProbe had set aside")
        if not lost:
            return None
        return (
            f"resumed at step {t} with the rate found so far, but without {', '.join(lost)}: the rounds from here on, "
            f"the first to step {self.rounds.next_end(t + 1)}, make them anew"
            + ("; hdet.save keeps them, or search_state_dict() beside state_dict()" if begins_anew else "")
        )

    def adopt(self, total_steps: int, t: int) -> None:
        """From the rate of torch's checkpoint, without a search."""
        self.pilot = dataclasses.replace(self.pilot, total_steps=total_steps)
        if t > 0:
            self.pilot_state = self.pilot.kept()

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and deepcopy: a copy has other tensors, so what was measured and kept of them is left out."""
        return {**vars(self), "_witness": self._witness.fresh(), "_slots": self._slots.emptied()}


def _moments(search: Mapping[str, Any]) -> tuple[Moment, ...]:
    return tuple(Moment(int(step), int(slot)) for step, slot in search["moments"])


def _what_trains(optimizer: Optimizer) -> Weights:
    return NO_WEIGHTS._replace(parameters=trained_parameters(optimizer))


def _level(rate: float, guess: float) -> float:
    """log m of a rate that the gradients ask for; -inf where they say nothing."""
    return math.log(rate / guess) if rate > 0 and guess > 0 else -math.inf
