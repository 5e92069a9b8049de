"""The engine: one replica's share of the ensemble, the same for one replica and for many.

A face (:class:`hdet.OneCycleLR`, :class:`hdet.Ensemble`) computes a schedule, asks for this replica's values and calls
:meth:`Engine.end_round` when a round ends. The engine never holds the face or the optimizer.
"""

from __future__ import annotations

import dataclasses
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import mul
from typing import Any, NamedTuple, TypeVar
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from hdet.algorithm.base import Decaying
from hdet.algorithm.controllers import Controller, Published, Update
from hdet.algorithm.design import Design
from hdet.algorithm.knob import KnobSpec
from hdet.algorithm.linesearch import LineSearch
from hdet.algorithm.normalised import Normalised
from hdet.algorithm.rounds import Rounds
from hdet.algorithm.signals import comparable
from hdet.comm import fingerprint
from hdet.comm.arms import Arms
from hdet.comm.average import average_
from hdet.comm.group import Group, ReplicaGroup, Seat, Solo, arriving, connect, find_seat
from hdet.engine.chronicle import Chronicle
from hdet.engine.converge import converge, refuse_diverged
from hdet.engine.losses import LossMeter
from hdet.engine.outer import Mean, OuterStep
from hdet.engine.rates import as_type_of
from hdet.engine.records import round_record
from hdet.engine.rollcall import Occasion, RollCall, call
from hdet.engine.settings import Settings
from hdet.engine.snapshots import kept
from hdet.engine.weights import NO_WEIGHTS, Body, Weights
from hdet.errors import ArgumentError, ResumeWarning
from hdet.journal import Sink

__all__ = ["Engine", "RoundEnd", "in_pairs"]

STATE_VERSION = 1
Face = TypeVar("Face")
_CONTROLLERS: dict[str, type[Published] | type[Normalised] | type[LineSearch]] = {
    "Published": Published,
    "Normalised": Normalised,
    "LineSearch": LineSearch,
}

_initialised: Callable[[], bool] = dist.is_initialized if dist.is_available() else lambda: False
"""Whether torch.distributed is. Every step asks, so what never changes is asked once."""


class RoundEnd(NamedTuple):
    """What the face knows when a round ends."""

    before: int
    """The step counter in the round that ends."""
    after: int
    """The step counter to come: a round end."""
    optimizer: Optimizer
    schedule: Callable[[int], list[float]]
    """The plain schedule per knob at a step; anything for knobs that have none."""
    floors: Callable[[], list[float]]
    """The schedule's lowest value per knob."""
    signal: Callable[[], Tensor] | None = None
    """This replica's number to be compared; None: its mean loss."""


class Engine:
    """Spread, rounds, converge, controller and journal of one replica.

    Args:
        settings: the checked arguments.
        controller: moves the base values, or None.
        specs: the knobs.
        learned: what is learned of each knob before the first round: a value, or 1 for a factor on a schedule.
        design: where replicas stand on the knobs in a round.
        group: the user's process group or arms; None: the default group, once there is one.
        sink: where the journal goes, or None.
        arguments: the user's arguments, for the journal's header.
        body: which tensors make up the replica.
        outer: what converge makes of the parameters.
        parts: further settings, in words, that must be equal on all replicas.
    """

    def __init__(
        self,
        settings: Settings,
        controller: Controller | None,
        specs: Sequence[KnobSpec],
        learned: Sequence[float],
        design: Design,
        group: Group,
        sink: Sink | None,
        arguments: Mapping[str, Any],
        body: Body,
        outer: OuterStep | None = None,
        parts: Sequence[str] = (),
    ) -> None:
        self.settings = settings
        self.controller = controller
        self.controller_state = controller.init(len(specs)) if controller is not None else None
        self.specs = list(specs)
        self.learned = list(learned)
        self.columns = list(range(len(specs)))
        """The column of the design that each knob takes: its own, unless two share one value."""
        self.decaying = Decaying.begin([0.0] * len(specs))
        """Base values of the exponential decay; zeros before S_warm."""
        self.design = design
        self.body = body
        self.outer = outer or Mean()
        self.parts = list(parts)
        self.meter = LossMeter()
        self.chronicle = Chronicle(sink, arguments)
        self.just_loaded = False
        """Between loading a checkpoint and the next step: an optimizer loaded now brings another replica's values."""
        self.watches_optimizer = False
        """Whether the face has a hook on the optimizer's ``load_state_dict``."""
        self._in_consensus = False
        self._user_group = group
        self._group: ReplicaGroup | None = None
        self._assigned: _Assignment | None = None
        self._round_began = time.perf_counter()

    # -- values ---------------------------------------------------------------------------------------------------

    @property
    def knobs(self) -> int:
        return len(self.specs)

    @property
    def group(self) -> ReplicaGroup:
        """The replicas that have met; alone before that."""
        return self._group or Solo()

    @property
    def seat(self) -> Seat:
        """This replica's place; may be asked at any time, no collective."""
        if self._group is not None:
            return self._group.seat
        return find_seat(self._user_group) if _initialised() else Solo.seat

    def grow(self, more: Sequence[KnobSpec]) -> None:
        """Groups were added to the optimizer: they start unlearned."""
        self.columns += range(self.knobs, self.knobs + len(more))
        self.specs += more
        self.learned = self.learned + [1.0] * len(more)
        self.decaying = self.decaying.grown(len(more))
        self.controller_state = self.controller.init(self.knobs) if self.controller is not None else None
        self._assigned = None

    def places(self, t: int) -> list[list[float]]:
        """x[r][g] of every replica and knob at step ``t``."""
        return self._assignment(t).everybody

    def my_places(self, t: int) -> list[float]:
        """x of this replica per knob at step ``t``."""
        return self._assignment(t).everybody[self.seat.replica]

    def multipliers(self, t: int) -> list[float]:
        """rho of this replica per knob at step ``t``; of use for scheduled knobs."""
        return self._assignment(t).rho

    def base(self, schedule: Sequence[float | Tensor], t: int) -> list[float | Tensor]:
        """The shared base values of scheduled knobs at step ``t``; each keeps the type of its schedule."""
        if self._decays_at(t):
            rows = zip(schedule, self.decaying.starts, self.decaying.bases, strict=True)
            return [as_type_of(value, base) if start else value for value, start, base in rows]
        return [_times(value, m) for value, m in zip(schedule, self.learned, strict=True)]

    def rates(self, schedule: Sequence[float | Tensor], t: int) -> list[float | Tensor]:
        """This replica's values of scheduled knobs at step ``t``: base times rho."""
        if self._decays_at(t):
            return self.spread_out(self.base(schedule, t), t)
        return list(map(mul, map(mul, schedule, self.learned), self.multipliers(t)))  # every step comes here

    def spread_out(self, base: Sequence[float | Tensor], t: int) -> list[float | Tensor]:
        """Base values of scheduled knobs times this replica's rho."""
        return [_times(value, rho) for value, rho in zip(base, self.multipliers(t), strict=True)]

    def _assignment(self, t: int) -> _Assignment:
        """Remembered for the rest of the round: every step asks."""
        known, seat, whole = self._assigned, self.seat, int(t)  # torch allows fractions of an epoch
        if known is None or whole not in known.steps or known.seat != seat:
            rounds = self.settings.rounds
            rows = self.design.places(seat.size, self.knobs, self.settings.seed, rounds.index(whole))
            rows = [[row[g] for g in self.columns] for row in rows]
            rho = [spec.factor(x) for spec, x in zip(self.specs, rows[seat.replica], strict=True)]
            known = _Assignment(range(whole, rounds.next_end(whole + 1)), seat, rows, rho)
            self._assigned = known
        return known

    # -- meeting the other replicas ---------------------------------------------------------------------------------

    def connect(self, optimizer: Optimizer, t: int) -> None:
        """Once torch.distributed is initialised: make our own group, and check that the replicas agree. Collective."""
        if self._group is not None or not _initialised():
            return
        self._round_began = time.perf_counter()
        if self.seat.size == 1:
            self._group = Solo()
            if dist.get_rank() > 0:  # one arm of several ranks: one of them writes the journal
                self.chronicle.sink = None
            return
        found = self.body.first_weights(optimizer)
        with arriving("the first step, where the replicas meet"):
            group = connect(self._user_group)
            self._roll_call(group, Occasion.FIRST_STEP, found, t)
            average_(self.outer.tensors(), group, [True] * group.seat.size)  # one starting point for the outer step
            self._group = group

    def begin(self, optimizer: Optimizer) -> None:
        """The optimizer is known. Of use to a probed fan-out, which wants to know when a round's first step comes."""

    def after_step(self, optimizer: Optimizer, t: int) -> None:
        """A step of training has been made. Of use to a probed fan-out, which keeps the round's mean."""

    def end_round(self, end: RoundEnd) -> bool:
        """Gather, decide, average, move the base values, write the journal. An error before the mean changes nothing.

        Returns whether this replica counted, or was left out because it is not finite.

        Cost: one gather (the only synchronisation), one all-reduce of the weights; with a journal a second gather.
        """
        k, clock = self.settings.rounds.index(end.before), _Clock(self._round_began)
        group, what = self.group, f"round {k}, at step {end.after}"
        # One replica is probed too, though nobody compares: a probe that fails should fail on a laptop.
        signal = end.signal() if end.signal is not None else None
        clock.lap("probe")
        with arriving(what):
            if group.seat.size == 1 and self.chronicle.sink is None:
                roll = RollCall.alone()
            else:
                weights = self.body.weights(end.optimizer)
                roll = self._roll_call(group, Occasion.ROUND_END, weights, end.before, signal)
        refuse_diverged(roll, what)
        clock.lap("gather")
        decision = self._decide(end, roll)
        clock.lap("controller")
        divergence = None
        with arriving(what):
            if group.seat.size > 1:
                divergence = converge(group, weights, roll, self.outer, measure=roll.writer is not None)
            clock.lap("converge")
        writes = roll.writer == group.rank
        record = self._record(k, end, roll, decision, divergence, clock.seconds) if writes else None
        self.learned, self.decaying, self.controller_state = decision.learned, decision.decaying, decision.state
        self.meter.reset()
        if record is not None:
            self.chronicle.write(record, group.seat.size, [spec.name for spec in self.specs])
        self._round_began = time.perf_counter()
        return roll.live[group.seat.replica]

    @contextmanager
    def consensus(self, optimizer: Optimizer, t: int) -> Iterator[None]:
        """Averaged weights inside, this replica's own back afterwards. Collective; one copy of the weights."""
        if self.seat.size == 1:
            yield
            return
        if self._in_consensus:
            raise ArgumentError("consensus() is entered already; leave the outer `with ...consensus():` first")
        self.connect(optimizer, t)
        with kept(self.body.weights(optimizer).tensors):
            self._in_consensus = True
            try:
                self.converge_now(Occasion.CONSENSUS, optimizer, t)
                yield
            finally:
                self._in_consensus = False

    def watch(self, optimizer: Optimizer, face: Face, rewrite: Callable[[Face], None]) -> None:
        """Let ``rewrite`` write this replica's values again if the optimizer is loaded after the face.

        An optimizer's checkpoint brings rank 0's values. The hook holds the face weakly: no reference cycle.
        """
        if self.watches_optimizer:
            return
        held, engine = ref(face), ref(self)

        def after_load(_: Optimizer) -> None:
            found, mine = held(), engine()
            if found is not None and mine is not None and mine.just_loaded:
                rewrite(found)

        try:
            optimizer.register_load_state_dict_post_hook(after_load)
        except AttributeError:  # a framework's wrapper that has no hooks: the next step() writes the values
            return
        self.watches_optimizer = True

    def refuse_inside_consensus(self, t: int) -> None:
        """Raise for a step there: it would be lost."""
        if self._in_consensus:
            raise ArgumentError(
                f"step() was called inside consensus(), at step {t}: the weights are put back afterwards, so training "
                "inside is lost; leave the `with` block first"
            )

    def converge_now(
        self, occasion: Occasion, optimizer: Optimizer, t: int, within: ReplicaGroup | None = None
    ) -> None:
        """Average now, nothing else. Collective. ``within``: only some of the replicas, those of a node."""
        self.connect(optimizer, t)
        group = within or self.group
        if group.seat.size == 1:
            return
        what = f"{occasion.name.lower()}() at step {t}"
        with arriving(what):
            found = self.body.weights(optimizer)
            roll = self._roll_call(group, occasion, found, t)
            if occasion is Occasion.INNER and not any(roll.live):
                return  # the whole node will be left out at the end of the round
            refuse_diverged(roll, what)
            converge(group, found, roll, Mean(), measure=False)

    def compare(self, metrics: float, t: int) -> None:
        """Raise unless all ranks give the same metrics. Collective."""
        group = self.group
        if group.seat.size == 1:
            return
        value = torch.tensor(metrics, dtype=torch.float64)
        with arriving(f"comparing metrics at step {t}"):
            self._roll_call(group, Occasion.METRICS, NO_WEIGHTS, t, value)

    def _roll_call(
        self,
        group: ReplicaGroup,
        occasion: Occasion,
        weights: Weights,
        t: int,
        signal: Tensor | None = None,
        expect_equal: bool | None = None,
    ) -> RollCall:
        solo = group.seat.size == 1
        return call(
            group,
            occasion,
            {} if solo else self._agreed(t),
            NO_WEIGHTS if solo else weights,  # nobody to compare with: do not read them
            self.meter,
            signal=signal,
            expect_equal=all(s.spread == 0 for s in self.specs) if expect_equal is None else expect_equal,
            journal=self.chronicle.sink is not None,
        )

    def _agreed(self, t: int) -> dict[str, float]:
        """Numbers that must be equal on all replicas; always the same keys, since rows must have one length."""
        parts = [_in_words(self.controller), _in_words(self.outer), *self.parts]
        rule = self.controller if isinstance(self.controller, Published) else None
        spreads = {spec.spread for spec in self.specs}
        text = repr([(spec.name, spec.scale.name, spec.spread, spec.bounds) for spec in self.specs])
        return {
            "step": float(t),
            "number of knobs": float(self.knobs),
            "spread": spreads.pop() if len(spreads) == 1 else math.nan,
            "knobs (fingerprint)": fingerprint.words([text]),
            "controller, outer, inner, signal, optimizer_state (fingerprint)": fingerprint.words(parts),
            **self.settings.agreed,
            "auto_lr (0: off, 1: on)": float(self.controller is not None),
            "sigma": rule.sigma if rule else math.nan,
            "meta_momentum": rule.meta_momentum if rule else math.nan,
            "meta_lr": rule.meta_lr if rule else math.nan,
        }

    # -- moving the base values ---------------------------------------------------------------------------------------

    def _decide(self, end: RoundEnd, roll: RollCall) -> _Decision:
        """The new base values: a function of the roll call, so equal on all replicas."""
        start = self.settings.auto_lr_start
        if self.controller is None or start is None or end.after < start:
            return _Decision(None, self.learned, self.decaying, self.controller_state)
        update = self._consult(end, roll)
        state = update.state if update is not None else self.controller_state
        moves = update.moves if update is not None else [0.0] * self.knobs
        if self.settings.decay == "schedule":
            learned = self.learned if update is None else self._moved(moves)
            return _Decision(update, learned, self.decaying, state)
        decaying = self.decaying.begun(end.schedule(end.after))
        assert isinstance(self.settings.rounds, Rounds)  # growing rounds are refused with this decay
        rounds_left = self.settings.rounds.left_from(start)
        return _Decision(update, self.learned, decaying.after_round(moves, end.floors(), rounds_left), state)

    def _moved(self, moves: Sequence[float]) -> list[float]:
        return [spec.moved(value, move) for spec, value, move in zip(self.specs, self.learned, moves, strict=True)]

    def _consult(self, end: RoundEnd, roll: RollCall) -> Update | None:
        """What the controller says, or None without a signal: no losses, or only one replica to look at."""
        live = roll.live
        if self.controller is None or not (roll.has_losses or end.signal is not None) or sum(live) < 2:
            return None
        signals = comparable([signal for signal, is_live in zip(roll.signals, live, strict=True) if is_live])
        if signals is None:
            return None
        offsets = [
            [spec.spread * x for spec, x in zip(self.specs, row, strict=True)]
            for row, is_live in zip(self.places(end.before), live, strict=True)
            if is_live
        ]
        update = self.controller.update(self.controller_state, signals, offsets)
        self.check_moves(update, signals)
        return update

    def check_moves(self, update: Update, signals: Sequence[float]) -> None:
        """Raise for what no controller may return."""
        if len(update.moves) != self.knobs or not all(math.isfinite(move) for move in update.moves):
            raise ArgumentError(
                f"a controller must return one finite move per knob, here {self.knobs}, but {self.controller!r} "
                f"returned {update.moves} for the signals {signals}; correct its update()"
            )

    def _decays_at(self, t: int) -> bool:
        start = self.settings.auto_lr_start
        return self.settings.decay == "exponential" and start is not None and t >= start and any(self.decaying.starts)

    # -- journal --------------------------------------------------------------------------------------------------

    def _record(
        self,
        k: int,
        end: RoundEnd,
        roll: RollCall,
        decision: _Decision,
        divergence: list[float] | None,
        seconds: dict[str, float],
    ) -> dict[str, Any]:
        base = self._bases(end.schedule(end.before), self.learned, self._decays_at(end.before), self.decaying)
        decays = self.settings.decay == "exponential" and any(decision.decaying.starts)
        places = self.places(end.before)
        return round_record(
            k=k,
            step=end.after,
            roll=roll,
            base=base,
            values=[[s.value(b, x) for s, b, x in zip(self.specs, base, row, strict=True)] for row in places],
            multipliers=[[s.factor(x) for s, x in zip(self.specs, row, strict=True)] for row in places],
            update=decision.update,
            controller_state=decision.state,
            learned=decision.learned,
            new_base=self._bases(end.schedule(end.after), decision.learned, decays, decision.decaying),
            divergence=divergence or [0.0] * len(places),
            seconds=seconds,
        )

    def _bases(
        self, schedule: Sequence[float], learned: Sequence[float], decays: bool, decaying: Decaying
    ) -> list[float]:
        if decays:
            return decaying.bases
        rows = zip(self.specs, schedule, learned, strict=True)
        return [m * value if spec.scheduled else m for spec, value, m in rows]

    # -- state ----------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Plain numbers, lists and strings; the same on every replica, with keys that never change."""
        controller = self.controller
        known = isinstance(controller, (Published, Normalised, LineSearch))
        arguments = dataclasses.asdict(controller) if known else {}  # type: ignore[call-overload]
        return {
            "version": STATE_VERSION,
            **self.settings.state(),
            "knobs": [spec.name for spec in self.specs],
            "spreads": [spec.spread for spec in self.specs],
            "learned": list(self.learned),
            "starts": list(self.decaying.starts),
            "bases": list(self.decaying.bases),
            "controller": type(controller).__name__ if controller is not None else None,
            "controller_arguments": in_pairs(arguments),
            "controller_state": in_pairs(self.controller_state._asdict() if self.controller_state is not None else {}),
        }

    def load(self, state: Mapping[str, Any], total_steps: int | None, t: int) -> None:
        """Go on from :meth:`state` at step ``t``. Checks everything before it changes anything."""
        if state.get("version") != STATE_VERSION:
            raise ArgumentError(
                f"the checkpoint's hdet state has version {state.get('version')!r}, this hdet reads {STATE_VERSION}; "
                "load it with the hdet that wrote it"
            )
        here, there = self.state(), state
        if ("takeoff" in here) != ("takeoff" in there):
            ways = ["probed" if "takeoff" in one else "trained" for one in (there, here)]
            raise ArgumentError(
                f'the checkpoint was written with fanout="{ways[0]}", but here it is "{ways[1]}"; build the scheduler '
                "as it was when it was saved"
            )
        names = [spec.name for spec in self.specs]
        if list(state["knobs"]) != names:
            raise ArgumentError(
                f"the checkpoint has the knobs {list(state['knobs'])}, but here they are {names}; "
                "build the optimizer and the knobs as they were when it was saved"
            )
        settings = Settings.from_state(state, total_steps)
        controller = self._controller_for(state)
        spreads = zip(self.specs, state["spreads"], strict=True)
        self.specs = [dataclasses.replace(spec, spread=float(spread)) for spec, spread in spreads]
        self.settings, self.controller, self._assigned = settings, controller, None
        self.controller_state = None
        if controller is not None:
            self.controller_state = controller.init(self.knobs)._replace(**dict(state["controller_state"]))
        self.learned = list(state["learned"])
        self.decaying = Decaying(list(state["starts"]), list(state["bases"]))
        self._resume(t)

    def adopt(self, total_steps: int, t: int) -> None:
        """Go on from a checkpoint of torch's own scheduler: only the counters are known."""
        rounds = dataclasses.replace(self.settings.rounds, total_steps=total_steps)
        self.settings, self._assigned = dataclasses.replace(self.settings, rounds=rounds), None
        self._resume(t)

    def _resume(self, t: int) -> None:
        """The counter was set to ``t`` by a checkpoint: losses of the round so far are not in it."""
        self.meter.reset()
        self.just_loaded = True
        rounds = self.settings.rounds
        mid_round = t > 0 and not rounds.ends_at(t)
        self.chronicle.resume(t, mid_round)
        if self.seat.size > 1 and mid_round:
            warnings.warn(
                f"resumed inside round {rounds.index(t)}, at step {t}: its multipliers and its end at step "
                f"{rounds.next_end(t)} are kept, its loss sums start empty, and all replicas go on from the loaded "
                "weights",
                ResumeWarning,
                stacklevel=4,  # _resume, load, load_state_dict, the user
            )

    def _controller_for(self, state: Mapping[str, Any]) -> Controller | None:
        name = state["controller"]
        if name is None:
            return None
        if name in _CONTROLLERS:
            return _CONTROLLERS[name](**dict(state["controller_arguments"]))
        if type(self.controller).__name__ == name:
            return self.controller
        raise ArgumentError(
            f"the checkpoint was written with a controller {name}, but here it is {self.controller!r}; "
            f"build it with auto_lr={name}(...) or controller={name}(...) before loading"
        )

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Engine) and self.state() == other.state() and self.chronicle.sink == other.chronicle.sink
        )

    __hash__ = None  # type: ignore[assignment]  # equal by value and, like a list, not meant as a key

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and deepcopy: everything but the connection to the other replicas, which is made anew.

        A process group cannot be pickled: the copy looks for the default group.
        """
        group = self._user_group if isinstance(self._user_group, Arms) else None
        return {**vars(self), "_user_group": group, "_group": None, "_assigned": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, watches_optimizer=False)


class _Assignment(NamedTuple):
    """The places of a round."""

    steps: range
    """Steps for which they are known to hold."""
    seat: Seat
    everybody: list[list[float]]
    """``everybody[replica][knob]``"""
    rho: list[float]
    """This replica's multiplier per knob."""


class _Decision(NamedTuple):
    """Where the base values go at the end of a round."""

    update: Update | None
    learned: list[float]
    decaying: Decaying
    state: Any


class _Clock:
    """Seconds per phase of a round."""

    def __init__(self, round_began: float) -> None:
        self._last = time.perf_counter()
        self.seconds = {"train": self._last - round_began}

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase] = now - self._last
        self._last = now


def _in_words(part: object) -> str:
    """Equal words for equal parts on all ranks: an address in memory would not be."""
    return repr(part) if type(part).__repr__ is not object.__repr__ else type(part).__name__


def in_pairs(values: Mapping[str, Any]) -> list[list[Any]]:
    """As lists: torch.distributed.checkpoint would make keys of a dict's names."""
    return [[name, list(value) if isinstance(value, list) else value] for name, value in values.items()]


def _times(value: float | Tensor, factor: float) -> float | Tensor:
    return value if factor == 1.0 else value * factor
