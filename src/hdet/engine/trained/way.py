"""The trained fan-out: every replica trains at its own values; at the end of a round they are merged and compared."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from operator import mul
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.algorithm.controller import Controller, Update
from hdet.algorithm.decay import Decaying
from hdet.algorithm.knob import KnobSpec
from hdet.algorithm.rounds import Rounds
from hdet.algorithm.signals import comparable
from hdet.distributed.average import average_
from hdet.distributed.group import ReplicaGroup, Seat, arriving, connect_alike
from hdet.distributed.meeting import Meeting
from hdet.distributed.partitions import refuse_partitions
from hdet.distributed.rollcall import Occasion, RollCall, Shown
from hdet.distributed.shards import hold_alike, local
from hdet.distributed.weights import Body, Weights, warn_without_ensemble
from hdet.engine.checkpoint import CONTROLLER, STATE_WORDS, controller_from, controller_saved
from hdet.engine.clock import Clock
from hdet.engine.records import round_record
from hdet.engine.round_mean import RoundMean
from hdet.engine.trained.bases import Bases
from hdet.engine.trained.converge import converge, refuse_diverged
from hdet.engine.trained.fanout import FanOut
from hdet.engine.trained.outer import Mean, OuterStep
from hdet.engine.trained.settings import SETTINGS, Settings
from hdet.engine.trained.signals import ProbeLoss, Signal, TrainLoss
from hdet.engine.way import RoundEnd, RoundReport, check_moves, terms
from hdet.errors import ArgumentError, ShardedParametersError
from hdet.parameters import direction
from hdet.rates import Rate
from hdet.state_rules import check_state, numbers

__all__ = ["TrainedWay"]

_NOT_AVERAGED = (
    "averaging them over the ranks would overwrite each rank's part of the model with a mean of unrelated parts. Train "
    "replicas with ZeRO stage 0 in fp32, or have the rate found: hdet.integrations.deepspeed.auto(engine, ...)"
)


class TrainedWay:
    """Spread, converge and controller of one replica.

    Args:
        settings: rounds, seed, decay, and when the controller begins.
        fan_out: where replicas stand.
        controller: moves the base values, or None.
        learned: what is learned of each knob before the first round: a value, or 1 for a factor on a schedule.
        body: which tensors make up the replica.
        signal: what replicas are compared by.
        outer: what converge makes of the parameters.
        reset_state: whether the optimizer forgets its state at the end of a round.
        keeps_journal: whether this rank does, so that a signal is read that no controller asks for.
    """

    name: Literal["replicas"] = "replicas"
    progress = 0
    holds_rise = False
    drifts_apart = True

    def __init__(
        self,
        settings: Settings,
        fan_out: FanOut,
        controller: Controller | None,
        learned: Sequence[float],
        body: Body,
        signal: Signal | None = None,
        outer: OuterStep | None = None,
        reset_state: bool = False,
        keeps_journal: bool = False,
    ) -> None:
        self.settings = settings
        self.controller = controller
        self.bases = Bases.begin(learned, controller.init(len(learned)) if controller is not None else None)
        self.body = body
        self.signal: Signal = signal if signal is not None else TrainLoss()
        self.outer: OuterStep = outer if outer is not None else Mean()
        self.reset_state = reset_state
        self._fan_out = fan_out
        self._is_told = keeps_journal
        """Whether some rank keeps a journal, once the replicas have met."""
        self._mean = RoundMean()
        self._alike: ReplicaGroup | None = None
        """Where weights are sharded: of each replica the ranks that hold the same parts as this one."""

    # -- values ---------------------------------------------------------------------------------------------------

    @property
    def model(self) -> nn.Module | None:
        return self.body.model

    @property
    def specs(self) -> list[KnobSpec]:
        return self._fan_out.specs

    @property
    def rounds(self) -> Rounds:
        return self.settings.rounds

    @property
    def total_steps(self) -> int | None:
        return self.rounds.total_steps

    @property
    def learned(self) -> list[float]:
        return self.bases.learned

    def base(self, schedule: Sequence[Rate], t: int) -> list[Rate]:
        return self.bases.scheduled(schedule, self.settings, t)

    def rates(self, schedule: Sequence[Rate], t: int, seat: Seat) -> list[Rate]:
        rho = self.multipliers(t, seat)
        if self.settings.decay == "exponential":
            return list(map(mul, self.base(schedule, t), rho))
        return list(map(mul, map(mul, schedule, self.bases.learned), rho))  # every step comes here

    def multipliers(self, t: int, seat: Seat) -> list[float]:
        return self._fan_out.standing(t, self.rounds, seat).rho

    def values(self, t: int, seat: Seat) -> list[float]:
        places = self._fan_out.standing(t, self.rounds, seat).mine
        rows = zip(self.specs, self.learned, places, strict=True)
        return [spec.value(base, x) for spec, base, x in rows]

    def terms(self) -> dict[str, float]:
        parts = [self.name, self.controller, self.outer, self.signal.kind, self.reset_state]
        return terms(
            self.specs,
            [*parts, self.body.with_state],
            controller=self.controller,
            total_steps=self.rounds.total_steps,
            sync_every=self.rounds.length,
            seed=self.settings.seed,
            start=self.settings.start,
            decays=self.settings.decay == "exponential",
        )

    def grow(self, more: Sequence[KnobSpec]) -> None:
        self._fan_out.grow(more)
        state = self.controller.init(len(self.specs)) if self.controller is not None else None
        self.bases = self.bases.grown(len(more), state)

    # -- the loop -------------------------------------------------------------------------------------------------

    def begin(self, optimizer: Optimizer) -> None:
        refuse_partitions(optimizer, _NOT_AVERAGED)
        self.body.remember(optimizer)
        self.outer.begin(self.weights(optimizer).parameters)

    def take_over(self) -> None:
        """Rounds are counted by steps: there is nothing to forget."""

    def first_weights(self, optimizer: Optimizer) -> Weights:
        warn_without_ensemble(optimizer)
        return self.body.first_weights(optimizer, needs_model=True)

    def met(self, group: ReplicaGroup, roll: RollCall) -> None:
        """One starting point for the outer step; for shards, the ranks that hold the same ones in other replicas."""
        self._is_told = roll.writer is not None
        if len(set(roll.held)) == 1:
            average_(self.outer.tensors(), group, [True] * group.seat.size)
            return
        self._refuse_shards(group, roll)
        self._alike = connect_alike(group, roll.held)

    def after_step(self, optimizer: Optimizer, t: int, meeting: Meeting) -> None:
        """A snapshot for the round's mean, where one is due."""
        if self.signal.wants_mean:
            start, end = self.rounds.span(t)
            if self._reads_signal(end) and self._mean.is_due(t - start, end - start):
                self._mean.add(self.weights(optimizer).parameters)

    def round_ends(self, t: int) -> bool:
        return self.rounds.ends_at(t)

    def inside_round(self, t: int) -> bool:
        return t > 0 and not self.rounds.ends_at(t)

    def end_round(self, end: RoundEnd, meeting: Meeting) -> RoundReport:
        """Gather, decide, average, move the base values. An error before the mean changes nothing.

        Cost: one gather, which synchronises host and device, and one all-reduce of the weights; with a journal a second
        gather.
        """
        clock, group = Clock(), meeting.group
        k, what = self.rounds.index(end.before), f"round {self.rounds.index(end.before)}, at step {end.after}"
        signal = None
        if self._reads_signal(end.after):
            parameters = self.weights(end.optimizer).parameters
            signal = self.signal.value(k, meeting.group, parameters, self._mean.of(parameters))
        clock.lap("probe")
        with arriving(what):
            roll = self._roll_call(end, meeting, signal)
        refuse_diverged(roll, what)
        clock.lap("gather")
        update, bases = self._decide(end, roll, meeting.seat)
        clock.lap("controller")
        divergence = None
        with arriving(what):
            if group.seat.size > 1:
                measured = roll.writer is not None
                weights = self.weights(end.optimizer)
                alike, sign = self._alike or group, direction(end.optimizer.param_groups)
                divergence = converge(group, alike, weights, roll, self.outer, measure=measured, sign=sign)
        clock.lap("converge")
        record = None
        if roll.writer == group.rank:
            record = self._record(k, end, roll, update, bases, divergence, clock.seconds, meeting.seat)
        self.bases = bases
        self._mean.reset()
        keeps = roll.live[group.seat.replica] or (self._alike is None and _is_finite(end.optimizer))
        if self.reset_state or not keeps:  # of one that was left out, no rank has seen the moments of all shards
            end.optimizer.state.clear()
        return RoundReport(record)

    def weights(self, optimizer: Optimizer) -> Weights:
        return self.body.weights(optimizer)

    def converge(self, optimizer: Optimizer, t: int, meeting: Meeting, occasion: Occasion) -> None:
        """Average now, nothing else."""
        group, what = meeting.group, f"{occasion.name.lower()}() at step {t}"
        if group.seat.size == 1:
            return
        with arriving(what):
            weights = self.weights(optimizer)
            equal = self._may_be_equal(t)
            roll = meeting.roll_call(occasion, t, self.terms(), weights, Shown(), expect_equal=equal)
            refuse_diverged(roll, what)
            converge(group, self._alike or group, weights, roll, Mean(), measure=False)

    def _is_controlled(self, end: int) -> bool:
        """Whether a controller is asked at this end of a round."""
        start = self.settings.start
        return self.controller is not None and start is not None and end >= start

    def _reads_signal(self, end: int) -> bool:
        """Whether a journal or a controller does. One replica's counts too: a probe that fails should on a laptop."""
        return self._is_told or self._is_controlled(end)

    @property
    def _without_spread(self) -> bool:
        return all(spec.spread == 0 for spec in self.specs)

    def _may_be_equal(self, t: int) -> bool:
        """Where a round has just ended replicas are equal: they are compared, since a mean of three would round."""
        return self._without_spread or self.rounds.ends_at(t)

    def _roll_call(self, end: RoundEnd, meeting: Meeting, signal: Tensor | None) -> RollCall:
        if meeting.group.seat.size == 1 and not end.keeps_journal:
            return RollCall.alone()
        losses, number = end.losses, None if signal is None else float(signal)
        return meeting.roll_call(
            Occasion.ROUND_END,
            end.before,
            self.terms(),
            self.weights(end.optimizer),
            Shown(losses.mean(), losses.count > 0, number, end.keeps_journal),
            expect_equal=self._without_spread,
        )

    def _refuse_shards(self, group: ReplicaGroup, roll: RollCall) -> None:
        """Raise unless each replica holds a whole model, and converge is the plain mean."""
        if not hold_alike(group.members, roll.held):
            raise ShardedParametersError(
                f"the weights are sharded (DTensor) over ranks of different replicas {group.members}: the mean over "
                "them would mix different parts. Replicas must hold a whole model each: use a mesh of two dimensions "
                'and group=hdet.arms(mesh, "replicate"), or find the rate without replicas, by max_lr="auto"'
            )
        if not isinstance(self.outer, Mean):
            raise ShardedParametersError(
                f"sharded replicas are merged by the plain mean, but got outer={self.outer!r}; leave it out"
            )

    # -- moving the base values -----------------------------------------------------------------------------------

    def _decide(self, end: RoundEnd, roll: RollCall, seat: Seat) -> tuple[Update | None, Bases]:
        """The new base values: a function of the roll call, so equal on all replicas."""
        if self.controller is None or not self._is_controlled(end.after):
            return None, self.bases
        update = self._consult(self.controller, end, roll, seat)
        return update, self.bases.moved(update, self.specs, self.settings, end)

    def _consult(self, controller: Controller, end: RoundEnd, roll: RollCall, seat: Seat) -> Update | None:
        """What the controller says, or None without a signal: no losses, or only one replica to look at."""
        live = roll.live
        if not (roll.has_losses or isinstance(self.signal, ProbeLoss)) or sum(live) < 2:
            return None
        sign = direction(end.optimizer.param_groups)  # lower is better for a controller
        signals = comparable([sign * signal for signal, is_live in zip(roll.signals, live, strict=True) if is_live])
        if signals is None or sign == 0:
            return None
        places = self._fan_out.standing(end.before, self.rounds, seat).places
        offsets = [
            [spec.spread * x for spec, x in zip(self.specs, row, strict=True)]
            for row, is_live in zip(places, live, strict=True)
            if is_live
        ]
        update = controller.update(self.bases.controller, signals, offsets)
        check_moves(controller, update, len(self.specs), signals)
        return update

    def _record(
        self,
        k: int,
        end: RoundEnd,
        roll: RollCall,
        update: Update | None,
        bases: Bases,
        divergence: list[float] | None,
        seconds: dict[str, float],
        seat: Seat,
    ) -> dict[str, Any]:
        base = self.bases.all_values(end.schedule(end.before), self.specs, self.settings, end.before)
        places = self._fan_out.standing(end.before, self.rounds, seat).places
        return round_record(
            k=k,
            step=end.after,
            roll=roll,
            base=base,
            values=[[s.value(b, x) for s, b, x in zip(self.specs, base, row, strict=True)] for row in places],
            multipliers=[[s.factor(x) for s, x in zip(self.specs, row, strict=True)] for row in places],
            update=update,
            controller_state=bases.controller,
            learned=bases.learned,
            new_base=bases.all_values(end.schedule(end.after), self.specs, self.settings, end.after),
            divergence=divergence or [0.0] * len(places),
            seconds=seconds,
        )

    # -- state ----------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        return {
            **self.settings.state(),
            "learned": list(self.bases.learned),
            "starts": list(self.bases.decaying.starts),
            "bases": list(self.bases.decaying.bases),
            **controller_saved(self.controller, self.bases.controller),
        }

    def tensors(self) -> list[list[Tensor]]:
        return self.outer.state()

    def check(self, state: Mapping[str, Any], tensors: Sequence[Sequence[Tensor]], total_steps: int | None) -> None:
        each = numbers(len(self.specs))
        check_state(state, {**SETTINGS, **CONTROLLER, "learned": each, "starts": each, "bases": each}, STATE_WORDS)
        controller_from(state, self.controller, len(self.specs))
        if _shapes(tensors) != _shapes(self.outer.state()):
            raise ArgumentError(
                f"the checkpoint's outer state does not fit outer={self.outer!r}; build the ensemble with the outer "
                "step and the parameters it was saved with"
            )

    def load(self, state: Mapping[str, Any], tensors: Sequence[Sequence[Tensor]], total_steps: int | None) -> None:
        settings = Settings.from_state(state, total_steps)
        controller, memory = controller_from(state, self.controller, len(self.specs))
        self.outer.load(tensors)
        self._fan_out.load(state["spreads"], settings.seed)
        self.settings, self.controller = settings, controller
        decaying = Decaying(list(state["starts"]), list(state["bases"]))
        self.bases = Bases(list(state["learned"]), decaying, memory)
        self._mean.reset()

    def search(self, optimizer: Optimizer) -> dict[str, Any]:
        return {}

    def check_search(self, search: Mapping[str, Any], optimizer: Optimizer) -> None:
        raise ValueError("replicas that train apart search nothing")

    def load_search(self, search: Mapping[str, Any], optimizer: Optimizer) -> None:
        self.check_search(search, optimizer)

    def lost(self, t: int, seat: Seat) -> str | None:
        """Where there are several: what they have seen of a round that is not over."""
        if seat.size == 1 or t <= 0 or self.rounds.ends_at(t):
            return None
        return (
            f"resumed inside round {self.rounds.index(t)}, at step {t}: its multipliers and its end at step "
            f"{self.rounds.next_end(t)} are kept, its loss sums start empty, and all replicas go on from the loaded "
            "weights"
        )

    def adopt(self, total_steps: int, t: int) -> None:
        rounds = dataclasses.replace(self.rounds, total_steps=total_steps)
        self.settings = dataclasses.replace(self.settings, rounds=rounds)
        self._fan_out.load([spec.spread for spec in self.specs], self.settings.seed)

    def __getstate__(self) -> dict[str, Any]:
        """A process group cannot be copied: that of shards is made anew."""
        return {**vars(self), "_alike": None}


def _shapes(tensors: Any) -> list[list[tuple[int, ...] | None]] | None:
    """None where it is no list of lists; so is what is no tensor."""
    if not isinstance(tensors, (list, tuple)) or not all(isinstance(part, (list, tuple)) for part in tensors):
        return None
    return [[tuple(t.shape) if isinstance(t, Tensor) else None for t in part] for part in tensors]


def _is_finite(optimizer: Optimizer) -> bool:
    """A replica that was left out may keep its moments only if they are finite."""
    values = (v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor))
    return all(bool(local(v).isfinite().all()) for v in values)
