"""The probed fan-out: everybody trains at the base value; replicas are points on the line of a round's displacement."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import finalize, ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.algorithm.controllers import Controller
from hdet.algorithm.design import Balanced
from hdet.algorithm.knob import KnobSpec
from hdet.algorithm.pilot import Fan, Flight, Order, Pilot
from hdet.algorithm.rounds import Growing
from hdet.algorithm.takeoff import CLIMBING, LANDED, Course, TakeOffState
from hdet.comm.arms import Arms
from hdet.comm.group import Group, arriving
from hdet.engine.engine import Engine, RoundEnd, in_pairs
from hdet.engine.points import Points, loss_now
from hdet.engine.probes import ProbeBatch
from hdet.engine.reach import Reach
from hdet.engine.records import round_record, verdict_records
from hdet.engine.rewind import Rewind
from hdet.engine.rollcall import Occasion, RollCall
from hdet.engine.settings import Settings
from hdet.engine.weights import NO_WEIGHTS, Body, Weights, trained_parameters
from hdet.errors import ArgumentError, DisagreementError, DivergedError
from hdet.journal import Sink

__all__ = ["ProbeFn", "ProbedEngine", "check_fanout", "probed_engine"]

ProbeFn = Callable[[], Tensor | float]


class ProbedEngine(Engine):
    """An engine whose replicas are probed instead of trained.

    No weights are averaged: gradients are shared, so all ranks hold the same ones. The points of a round are dealt out
    to the ranks; each evaluates its own, and their losses are gathered.

    Memory: the anchor and the round's mean (in take-off, the sum of gradients) in fp32 and, while points are evaluated,
    the weights to come back to. Host memory: see :class:`hdet.engine.rewind.Rewind`.

    Args:
        settings, specs, sink, arguments: as for :class:`Engine`.
        pilot: the rules.
        probe: gives a loss of the current model; a :class:`hdet.ProbeBatch` shares one batch among all ranks.
        model: whose buffers are put back when training goes back; None: the probe's.
        group: the user's process group.
    """

    def __init__(
        self,
        settings: Settings,
        pilot: Pilot,
        specs: Sequence[KnobSpec],
        probe: ProbeFn,
        model: nn.Module | None,
        group: Group,
        sink: Sink | None,
        arguments: Mapping[str, Any],
    ) -> None:
        flight = pilot.begin()
        super().__init__(
            settings, pilot.controller, specs, flight.learned, Balanced(), group, sink, arguments, Body(None)
        )
        self.pilot, self.flight = pilot, flight
        self._follow_landing()
        self.probe = probe
        self.knob_of_group: dict[int, int] | None = None
        """The knob that is each parameter group's rate; None: one each, in order."""
        self._model = model if model is not None else getattr(probe, "model", None)
        self._points = Points()
        self._reach = Reach()
        self._rewind = Rewind()
        self._watches = False
        """Whether there is a hook on the optimizer's ``step``."""
        self._unscheduled = False
        """Whether the optimizer has stepped since this scheduler last did."""
        self._finished = False
        self._highest = 0.0
        """The schedule's highest value so far, of the first knob."""

    # -- values ---------------------------------------------------------------------------------------------------

    def multipliers(self, t: int) -> list[float]:
        """1: everybody trains at the base value."""
        return [1.0] * self.knobs

    def places(self, t: int) -> list[list[float]]:
        """0: the base value."""
        return [[0.0] * self.knobs for _ in range(self.seat.size)]

    def my_places(self, t: int) -> list[float]:
        return [0.0] * self.knobs

    def base(self, schedule: Sequence[float | Tensor], t: int) -> list[float | Tensor]:
        """m times the course times the schedule."""
        way = self.flight.course.at(t)
        return [value * (m * way) for value, m in zip(schedule, self.flight.learned, strict=True)]

    def rates(self, schedule: Sequence[float | Tensor], t: int) -> list[float | Tensor]:
        """The base values: nobody is spread."""
        return self.base(schedule, t)

    def grow(self, more: Sequence[KnobSpec]) -> None:
        """Groups were added to the optimizer: they begin at the common rate, the controller anew."""
        common = math.exp(sum(math.log(m) for m in self.flight.learned) / self.knobs)
        super().grow(more)
        self.pilot = dataclasses.replace(self.pilot, knobs=self.knobs, columns=None)
        learned = [*self.flight.learned, *[common] * len(more)]
        self._take(self.flight._replace(learned=learned, controller=self.controller_state))

    # -- the loop -------------------------------------------------------------------------------------------------

    def begin(self, optimizer: Optimizer) -> None:
        """Watch the optimizer's steps: the anchor is taken just before the first of a round, and gradients are seen."""
        held = ref(self)

        def before_step(opt: Optimizer, *_: object) -> None:
            engine = held()
            if engine is not None:
                engine._before_step(opt)

        self._watches = True
        try:
            hook = optimizer.register_step_pre_hook(before_step)
        except AttributeError:  # a framework's wrapper: then a round's anchor is taken one step late
            return
        finalize(self, hook.remove)

    def _before_step(self, optimizer: Optimizer) -> None:
        if self._finished:
            return
        if self._unscheduled:  # another scheduler is in charge, as in SequentialLR: these steps are not ours to judge
            self._begin_anew()
        self._points.anchor_at(optimizer)
        if self.flight.takeoff.phase == CLIMBING:
            self._see_gradients(optimizer)
        self._unscheduled = True

    def _see_gradients(self, optimizer: Optimizer) -> None:
        """Part of the reach. Parameters that were frozen or thawed since the start make it begin anew."""
        parameters = trained_parameters(optimizer)
        start = self._points.anchor_of(parameters)
        if start is None:
            self._begin_anew()
        else:
            self._reach.before_step(start, parameters, self._rate(optimizer))

    def _rate(self, optimizer: Optimizer) -> float:
        """The first knob's learning rate."""
        group = next((g for g, knob in self._knob_of().items() if knob == 0), 0)
        return float(optimizer.param_groups[group]["lr"])

    def _begin_anew(self) -> None:
        """The displacement, and what was seen along it, begin with the next step."""
        self._points.reset()
        self._reach.reset()

    def after_step(self, optimizer: Optimizer, t: int) -> None:
        """A step of training has been made: part of the round's mean."""
        if not self._watches:  # a copy: hooks are not copied
            self.begin(optimizer)
        self._unscheduled = False
        self._finished = t >= (self.settings.rounds.total_steps or math.inf)
        if t <= 0:  # SequentialLR sets the first rates: nothing has been trained by us
            self._begin_anew()
            return
        self._points.anchor_at(optimizer)
        if self.flight.landed is not None:  # take-off looks at the weights as they are
            start, end = self.settings.rounds.span(t)
            self._points.add(optimizer, t - start, end - start)

    def end_round(self, end: RoundEnd) -> bool:
        """Probe, decide, go back if need be, write the journal. Nothing is averaged; True: this replica always counts.

        Cost: one forward pass of the probe batch per point, shared by the ranks, and one small gather.
        """
        began, k = time.perf_counter(), self.settings.rounds.index(end.before)
        seconds = {"train": began - self._round_began}
        roll = self._meet(end)
        seconds["gather"] = time.perf_counter() - began
        began = time.perf_counter()
        fan = self.pilot.fan(self.flight, k)
        losses, moved, reach = self._evaluate(fan, k, end)
        before = self._loss_of_proven(end) if self.pilot.doubts(self.flight, losses) else math.nan
        seconds["probe"] = time.perf_counter() - began
        began = time.perf_counter()
        span, shape = self.settings.rounds.span(end.after), self._shape(end)
        order = self.pilot.after_round(self.flight, fan, span, losses, moved, shape, reach, before)
        if order.update is not None:
            self.check_moves(order.update, losses)
        was = self.flight
        event, went_back_to = self._carry_out(order, end)
        seconds["controller"] = time.perf_counter() - began
        seconds["converge"] = 0.0
        if not (was.takeoff.phase == self.flight.takeoff.phase == CLIMBING):  # take-off is one long displacement
            self._begin_anew()
        if roll.writer == self.group.rank:
            shown = roll._replace(losses=roll.losses[:1] * len(losses), signals=losses, finite=[True] * len(losses))
            story = {"event": event, "went_back_to": went_back_to}
            self._write(k, end, shown, fan, was, order, story, seconds)
        self.meter.reset()
        self._round_began = time.perf_counter()
        return True

    def _meet(self, end: RoundEnd) -> RollCall:
        """Where there are others: check that all hold the same weights."""
        group = self.group
        if group.seat.size == 1:
            if self.chronicle.sink is None:
                return RollCall.alone()
            return self._roll_call(group, Occasion.ROUND_END, NO_WEIGHTS, end.before)
        weights = self._parameters(end)
        with arriving(f"the roll call at step {end.after}"):
            roll = self._roll_call(group, Occasion.ROUND_END, weights, end.before, expect_equal=True)
        if not roll.moving_equal and all(roll.finite):
            raise DisagreementError(
                f"the ranks hold different weights at step {end.after}, but a probed fan-out compares points of one "
                'model: wrap the model in DistributedDataParallel, or use fanout="trained"'
            )
        return roll

    def _parameters(self, end: RoundEnd) -> Weights:
        """What trains, and nothing else: buffers may differ between ranks until DDP's next forward pass."""
        return NO_WEIGHTS._replace(parameters=self.body.weights(end.optimizer).parameters)

    def _evaluate(self, fan: Fan, k: int, end: RoundEnd) -> tuple[list[float], float, float]:
        """Losses of the points; in take-off also how far it has moved relative to the weights, and log m of the reach.

        On every rank the same: the last two are rank 0's.
        """
        group = self.group
        if isinstance(self.probe, ProbeBatch):
            with arriving(f"sharing the probe batch of round {k}"):
                self.probe.prepare(0 if fan.fixed else k, group)
        mine = range(group.rank, len(fan.rho), group.seat.size)
        losses, moved, reach, failure = [math.nan] * len(fan.rho), 0.0, -math.inf, None
        try:
            rho = self._by_group(fan.rho, end.optimizer)
            losses = self._points.losses(end.optimizer, rho, mine, self.probe, at_mean=not fan.fixed)
            if fan.fixed:
                moved, reach = self._points.moved(end.optimizer, self._knob_of()), self._reach_of(end)
        except Exception as error:  # whatever the user's loss raises, the others must hear of it
            failure = error
        with arriving(f"gathering the points of round {k}"):
            own = torch.tensor([*losses, moved, reach, float(failure is not None)], dtype=torch.float64)
            rows = group.gather(own)
        if failure is not None:
            raise failure
        failed = [rank for rank, row in enumerate(rows) if row[-1]]
        if failed:
            raise ArgumentError(f"the probe raised an error on the ranks {failed}; see their messages")
        return [rows[point % len(rows)][point] for point in range(len(losses))], rows[0][-3], rows[0][-2]

    def _loss_of_proven(self, end: RoundEnd) -> float:
        """The loss of the weights that it would go back to, on this round's batch; NaN without any. Rank 0's."""
        self._rewind.forget_other_parameters(end.optimizer)
        kept, loss = self._rewind.proven, math.nan
        if kept is not None:
            with self._rewind.shown(kept, end.optimizer, self._model):
                loss = loss_now(self.probe, trained_parameters(end.optimizer))
        with arriving(f"comparing with earlier weights at step {end.after}"):
            return self.group.gather(torch.tensor([loss], dtype=torch.float64))[0][0]

    def _reach_of(self, end: RoundEnd) -> float:
        """log m of the rate that the gradients of take-off ask for; -inf where they say nothing."""
        parameters = trained_parameters(end.optimizer)
        start = self._points.anchor_of(parameters)
        rate = self._reach.rate(start, parameters) if start is not None else 0.0
        guess = float(max(end.schedule(end.before)[:1], default=0.0))
        return math.log(rate / guess) if rate > 0 and guess > 0 else -math.inf

    def _knob_of(self) -> dict[int, int]:
        """The knob of each parameter group that has one."""
        return self.knob_of_group if self.knob_of_group is not None else {g: g for g in range(self.knobs)}

    def _by_group(self, rho: list[list[float]], optimizer: Optimizer) -> list[list[float]]:
        """``rho[point][group]``: 1 for groups whose rate is no knob."""
        knob_of = self._knob_of()
        groups = range(len(optimizer.param_groups))
        return [[row[knob_of[g]] if g in knob_of else 1.0 for g in groups] for row in rho]

    def _shape(self, end: RoundEnd) -> float:
        """The schedule of the first knob, relative to its highest value so far."""
        now = max(end.schedule(end.after)[:1], default=1.0)
        self._highest = max(self._highest, now, *end.schedule(end.before)[:1])
        return now / self._highest if self._highest else 1.0

    def _carry_out(self, order: Order, end: RoundEnd) -> tuple[str | None, int | None]:
        """Do what the pilot wants with the weights; what happened, in words, and the step that it went back to."""
        flight, t, optimizer = order.flight, end.after, end.optimizer
        taking_off = self.flight.landed is None
        event, went_back_to = ("take-off" if taking_off else None), None
        if order.action == "keep":
            if flight.landed is not None:
                self._rewind.only_ends()  # the first is that of landing
            self._rewind.keep(order.level, t, optimizer, self._model)
        elif order.action == "restart":
            self._points.go_back_to_anchor(optimizer)
            event = "restarted: the first step was too long"
        elif order.action == "go back":
            self._rewind.forget_other_parameters(optimizer)
            kept = self._rewind.last_below(order.level) if taking_off else self._rewind.proven
            word = "landed" if taking_off else "too hot"
            if kept is None:  # nothing is remembered of before a resume
                self._refuse_lost(end)
                event = f"{word}: slowed down"
            elif kept.step < order.since:
                self._rewind.only(kept)
                event = f"{word}: went on"
            else:
                self._rewind.restore(kept, optimizer, self._model)
                if taking_off:
                    self._rewind.only(kept)
                    flight = self.pilot.gone_back(flight, t, kept.level)
                else:
                    self._rewind.used(kept)
                event, went_back_to = f"{word}: went back to step {kept.step}", kept.step
        elif taking_off and flight.landed is not None:
            event = "landed: the probe does not see the weights"
        self._take(flight)
        return event, went_back_to

    def _refuse_lost(self, end: RoundEnd) -> None:
        """Raise if the weights are not finite and there is nothing to go back to."""
        if not bool(self._parameters(end).all_finite()):
            raise DivergedError(
                f"the weights are not finite at step {end.after}, and none are remembered to go back to; load an "
                "earlier checkpoint"
            )

    def _take(self, flight: Flight) -> None:
        """A new state of the pilot, and what the engine shows of it."""
        self.flight, self.learned, self.controller_state = flight, flight.learned, flight.controller
        self._follow_landing()

    def _follow_landing(self) -> None:
        """Rounds grow from where take-off has landed."""
        rounds, landed = self.settings.rounds, self.flight.landed
        if isinstance(rounds, Growing) and rounds.landed != landed:
            self.settings = dataclasses.replace(self.settings, rounds=dataclasses.replace(rounds, landed=landed))

    # -- journal --------------------------------------------------------------------------------------------------

    def _write(
        self,
        k: int,
        end: RoundEnd,
        roll: RollCall,
        fan: Fan,
        before: Flight,
        order: Order,
        story: dict[str, Any],
        seconds: dict[str, float],
    ) -> None:
        then, now = end.schedule(end.before), end.schedule(end.after)
        base = [m * before.course.at(end.before) * value for m, value in zip(before.learned, then, strict=True)]
        record = round_record(
            k=k,
            step=end.after,
            roll=roll,
            base=base,
            values=[[b * rho for b, rho in zip(base, row, strict=True)] for row in fan.rho],
            multipliers=fan.rho,
            update=order.update,
            controller_state=self.controller_state,
            learned=self.learned,
            new_base=[float(value) for value in self.base(now, end.after)],
            divergence=[0.0] * len(fan.rho),
            seconds=seconds,
        )
        record["shape"] = [float(value) for value in now]
        record["verdict"] = verdict_records(self.controller, self.controller_state, order.update)
        record.update(story)
        self.chronicle.write(record, len(fan.rho), [spec.name for spec in self.specs])

    # -- state ----------------------------------------------------------------------------------------------------

    def adopt(self, total_steps: int, t: int) -> None:
        """Go on from torch's own checkpoint: from its rate, without a take-off."""
        super().adopt(total_steps, t)
        if t > 0:
            takeoff = self.flight.takeoff._replace(phase=LANDED)
            self._take(self.flight._replace(takeoff=takeoff, landed=t, learned=[1.0] * self.knobs))
        rounds = self.settings.rounds
        assert isinstance(rounds, Growing)  # as it was built
        self.pilot = dataclasses.replace(self.pilot, rounds=rounds)

    def state(self) -> dict[str, Any]:
        """With the pilot's state. Weights kept for going back are not saved."""
        flight = self.flight
        return {
            **super().state(),
            "takeoff": in_pairs(flight.takeoff._asdict()),
            "course": in_pairs(flight.course._asdict()),
            "landed": flight.landed,
            "scale": flight.scale,
            "worse": flight.worse,
            "low": flight.low,
            "highest": self._highest,
            "points": self.pilot.points,
        }

    def load(self, state: Mapping[str, Any], total_steps: int | None, t: int) -> None:
        """Go on from :meth:`state`. A round's displacement begins anew."""
        super().load(state, total_steps, t)
        rounds = self.settings.rounds
        assert isinstance(rounds, Growing)  # the checkpoint has "landed"
        self.pilot = dataclasses.replace(
            self.pilot,
            controller=self.controller,
            spread=max(state["spreads"]),
            points=int(state["points"]),
            rounds=rounds,
            seed=self.settings.seed,
            start=self.settings.auto_lr_start or 0,
        )
        self.flight = Flight(
            TakeOffState(**dict(state["takeoff"])),
            Course(**dict(state["course"])),
            None if state["landed"] is None else int(state["landed"]),
            list(state["learned"]),
            self.controller_state,
            state["scale"],
            state["worse"],
            state["low"],
        )
        self._highest = state["highest"]
        self._points, self._reach, self._rewind = Points(), Reach(), Rewind()

    def __getstate__(self) -> dict[str, Any]:
        return {
            **super().__getstate__(),
            "_points": Points(),
            "_reach": Reach(),
            "_rewind": Rewind(),
            "_watches": False,
        }


def probed_engine(
    settings: Settings,
    controller: Controller | None,
    specs: Sequence[KnobSpec],
    columns: Sequence[int],
    points: int,
    probe: ProbeFn,
    model: nn.Module | None,
    group: Group,
    sink: Sink | None,
    arguments: Mapping[str, Any],
    peak: float,
) -> ProbedEngine:
    """An engine with the pilot that a face's arguments ask for; ``peak``: where the schedule's rising phase ends."""
    rounds = settings.rounds
    assert isinstance(rounds, Growing)  # as settings are made for probes
    pilot = Pilot(
        controller,
        len(specs),
        max((spec.spread for spec in specs), default=0.0),
        points,
        settings.seed,
        rounds,
        peak,
        settings.auto_lr_start or 0,
        columns=tuple(columns),
    )
    return ProbedEngine(settings, pilot, specs, probe, model, group, sink, {**arguments, "points": points})


def check_fanout(fanout: object, probe: object, points: object, group: object) -> None:
    """Raise for arguments that do not go together."""
    if fanout not in ("trained", "probed"):
        raise ArgumentError(f'fanout must be "trained" or "probed", but got fanout={fanout!r}; leave it out')
    if fanout == "trained":
        if probe is not None:
            raise ArgumentError(
                f'probe= is for fanout="probed", but got fanout={fanout!r}; give that, or leave the probe out'
            )
        return
    if not callable(probe):
        raise ArgumentError(
            f"a probed fan-out needs probe=, a loss of the current model, but got probe={probe!r}; for instance "
            "probe=hdet.ProbeBatch(model, loss_fn, probe_loader)"
        )
    if not (isinstance(points, int) and not isinstance(points, bool) and points >= 3):
        raise ArgumentError(f"points must be an integer, at least 3, but got points={points!r}; leave it out for 8")
    if isinstance(group, Arms):
        raise ArgumentError(
            "a probed fan-out needs shared gradients, but group= is hdet.arms(n), whose weights come apart; "
            "leave it out"
        )
