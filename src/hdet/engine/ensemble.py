"""The engine: one replica's share of the ensemble, the same for one replica and for many.

A face (:class:`hdet.OneCycleLR`) computes a schedule and asks :meth:`Engine.rates` for this replica's values; at the
end of a round it calls :meth:`Engine.end_round`. The engine never holds the face or the optimizer.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from operator import mul
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hdet.algorithm.assignment import assign
from hdet.algorithm.base import Decaying, scaled
from hdet.algorithm.controllers import Controller, Published, Update
from hdet.algorithm.spread import multipliers
from hdet.comm.group import ReplicaGroup, Seat, Solo, arriving, connect, find_seat
from hdet.engine.converge import converge, refuse_diverged
from hdet.engine.losses import LossMeter
from hdet.engine.records import header_record, resume_record, round_record
from hdet.engine.rollcall import Occasion, RollCall, call
from hdet.engine.settings import Settings
from hdet.engine.weights import Weights
from hdet.errors import ArgumentError, ResumeWarning
from hdet.journal import Sink

__all__ = ["Engine", "RoundEnd"]

STATE_VERSION = 1
_log = logging.getLogger("hdet")

_initialised: Callable[[], bool] = dist.is_initialized if dist.is_available() else lambda: False
"""Whether torch.distributed is. Every step asks, so what never changes is asked once."""


class RoundEnd(NamedTuple):
    """What the face knows when a round ends."""

    before: int
    """The step counter in the round that ends."""
    after: int
    """The step counter to come: a round end."""
    weights: Callable[[], Weights]
    schedule: Callable[[int], list[float]]
    """The plain schedule per knob at a step."""
    floors: Callable[[], list[float]]
    """The schedule's lowest value per knob."""


class Engine:
    """Spread, rounds, converge, controller and journal of one replica.

    Args:
        settings: the checked arguments.
        controller: moves the base values, or None.
        knobs: how many values are explored (parameter groups).
        group: the user's process group; None: the default group, once there is one.
        sink: where the journal goes, or None.
        arguments: the user's arguments, for the journal's header.
    """

    def __init__(
        self,
        settings: Settings,
        controller: Controller | None,
        knobs: int,
        group: dist.ProcessGroup | None,
        sink: Sink | None,
        arguments: Mapping[str, Any],
    ) -> None:
        self.settings = settings
        self.controller = controller
        self.controller_state = controller.init(knobs) if controller is not None else None
        self.factors = [1.0] * knobs
        """m per knob: base = m * schedule."""
        self.columns = list(range(knobs))
        """The column of the assignment that each knob takes: its own, unless two share one value."""
        self.decaying = Decaying.begin([0.0] * knobs)
        """Base values of the exponential decay; zeros before S_warm."""
        self.meter = LossMeter()
        self.sink = sink
        self.arguments = dict(arguments)
        self.just_loaded = False
        """Between loading a checkpoint and the next step: an optimizer loaded now brings another replica's rates."""
        self.watches_optimizer = False
        """Whether the face has a hook on the optimizer's ``load_state_dict``."""
        self.in_consensus = False
        self.parameter_ids: list[int] | None = None
        """The optimizer's parameters at construction: a sharded optimizer replaces them by its own partitions."""
        self.set_aside: frozenset[int] = frozenset()
        """Buffers that held infinities from the start, such as attention masks."""
        self._user_group = group
        self._group: ReplicaGroup | None = None
        self._journal_opened = False
        self._resumed_at: int | None = None
        self._assigned: _Assignment | None = None
        self._round_began = time.perf_counter()

    # -- values ---------------------------------------------------------------------------------------------------

    @property
    def knobs(self) -> int:
        return len(self.factors)

    @property
    def seat(self) -> Seat:
        """This replica's place; may be asked at any time, no collective."""
        if self._group is not None:
            return self._group.seat
        return find_seat(self._user_group) if _initialised() else Solo.seat

    def grow(self, knobs: int) -> None:
        """Groups were added to the optimizer: they start unlearned."""
        more = knobs - self.knobs
        self.columns += range(self.knobs, knobs)
        self.factors = self.factors + [1.0] * more
        self.decaying = Decaying(self.decaying.starts + [0.0] * more, self.decaying.bases + [0.0] * more)
        self.controller_state = self.controller.init(knobs) if self.controller is not None else None
        self._assigned = None

    def assigned(self, t: int) -> list[list[float]]:
        """rho of every replica and knob at step ``t``."""
        return self._assignment(t).everybody

    def multipliers(self, t: int) -> list[float]:
        """rho of this replica per knob at step ``t``."""
        return self._assignment(t).mine

    def _assignment(self, t: int) -> _Assignment:
        """Remembered for the rest of the round: every step asks."""
        known, seat, whole = self._assigned, self.seat, int(t)  # torch allows fractions of an epoch
        if known is None or whole not in known.steps or known.seat != seat:
            rounds = self.settings.rounds
            rho = multipliers(seat.size, self.settings.spread)
            rows = assign(rho, self.settings.seed, rounds.index(whole), self.knobs)
            rows = [[row[g] for g in self.columns] for row in rows]
            known = _Assignment(range(whole, rounds.next_end(whole + 1)), seat, rows, rows[seat.replica])
            self._assigned = known
        return known

    def base(self, schedule: Sequence[float | Tensor], t: int) -> list[float | Tensor]:
        """The shared base values at step ``t``, given the plain schedule's; each keeps its type."""
        if self._decays_at(t):
            return [_like(value, base) for value, base in zip(schedule, self.decaying.bases, strict=True)]
        return [_times(value, m) for value, m in zip(schedule, self.factors, strict=True)]

    def rates(self, schedule: Sequence[float | Tensor], t: int) -> list[float | Tensor]:
        """This replica's values at step ``t``: base times rho."""
        if self._decays_at(t):
            return self.spread_out(self.base(schedule, t), t)
        return list(map(mul, map(mul, schedule, self.factors), self._assignment(t).mine))  # every step comes here

    def spread_out(self, base: Sequence[float | Tensor], t: int) -> list[float | Tensor]:
        """Base values times this replica's rho."""
        return [_times(value, rho) for value, rho in zip(base, self.multipliers(t), strict=True)]

    # -- meeting the other replicas ---------------------------------------------------------------------------------

    def connect(self, weights: Callable[[], Weights], t: int) -> None:
        """Once torch.distributed is initialised: make our own group, and check that the replicas agree. Collective."""
        if self._group is not None or not _initialised():
            return
        if self.seat.size == 1:
            self._group = Solo()
            return
        found = weights()
        with arriving("the first step, where the replicas meet"):
            group = connect(self._user_group)
            self._roll_call(group, Occasion.FIRST_STEP, found, t)
            self._group = group

    def end_round(self, end: RoundEnd) -> None:
        """Gather, decide, average, move the base values, write the journal. An error changes nothing.

        Cost: one gather (the only synchronisation), one all-reduce of the weights; with a journal a second gather.
        """
        k, clock = self.settings.rounds.index(end.before), _Clock(self._round_began)
        group = self._group or Solo()
        what = f"round {k}, at step {end.after}"
        with arriving(what):
            if group.seat.size == 1 and self.sink is None:
                roll = RollCall.alone()
            else:
                roll = self._roll_call(group, Occasion.ROUND_END, end.weights(), end.before)
            refuse_diverged(roll, what)
            clock.lap("gather")
            decision = self._decide(end, roll)
            clock.lap("controller")
            divergence = None
            if group.seat.size > 1:
                divergence = converge(group, end.weights(), roll, measure=roll.writer is not None)
            clock.lap("converge")
        record = None
        if roll.writer == group.seat.replica:
            record = self._round_record(k, end, roll, decision, divergence or [0.0], clock.seconds)
        self.factors, self.decaying, self.controller_state = decision.factors, decision.decaying, decision.state
        self.meter.reset()
        if record is not None:
            self._write(record)
        self._round_began = time.perf_counter()

    def converge_now(
        self, occasion: Occasion, first: Callable[[], Weights], weights: Callable[[], Weights], t: int
    ) -> None:
        """Average now, nothing else. Collective. ``first`` gives the weights if the replicas have not met yet."""
        self.connect(first, t)
        group = self._group
        if group is None or group.seat.size == 1:
            return
        what = f"{occasion.name.lower()}() at step {t}"
        with arriving(what):
            found = weights()
            roll = self._roll_call(group, occasion, found, t)
            refuse_diverged(roll, what)
            converge(group, found, roll, measure=False)

    def _roll_call(self, group: ReplicaGroup, occasion: Occasion, weights: Weights, t: int) -> RollCall:
        solo = group.seat.size == 1
        return call(
            group,
            occasion,
            {} if solo else self._agreed(t),
            Weights([], []) if solo else weights,  # nobody to compare with: do not read them
            self.meter,
            expect_equal=self.settings.spread == 0,
            journal=self.sink is not None,
        )

    def _agreed(self, t: int) -> dict[str, float]:
        """Numbers that must be equal on all replicas; always the same keys, since rows must have one length."""
        rule = self.controller if isinstance(self.controller, Published) else None
        return {
            "step": float(t),
            "parameter groups": float(self.knobs),
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
        unmoved = _Decision(None, self.factors, self.decaying, self.controller_state)
        if self.controller is None or start is None or end.after < start:
            return unmoved
        update = self._consult(end, roll)
        state = update.state if update is not None else self.controller_state
        moves = update.moves if update is not None else [0.0] * self.knobs
        if self.settings.decay == "schedule":
            return _Decision(update, scaled(self.factors, moves), self.decaying, state)
        begun = any(self.decaying.starts)
        decaying = self.decaying if begun else Decaying.begin(end.schedule(end.after))
        rounds_left = self.settings.rounds.left_from(start)
        return _Decision(update, self.factors, decaying.after_round(moves, end.floors(), rounds_left), state)

    def _consult(self, end: RoundEnd, roll: RollCall) -> Update | None:
        """What the controller says, or None without a signal: no losses, or only one replica to look at."""
        live = roll.live
        if self.controller is None or not roll.has_losses or sum(live) < 2:
            return None
        signals = [loss for loss, is_live in zip(roll.losses, live, strict=True) if is_live]
        offsets = [
            [rho - 1.0 for rho in row] for row, is_live in zip(self.assigned(end.before), live, strict=True) if is_live
        ]
        update = self.controller.update(self.controller_state, signals, offsets)
        if len(update.moves) != self.knobs or not all(math.isfinite(move) for move in update.moves):
            raise ArgumentError(
                f"a controller must return one finite move per knob, here {self.knobs}, but {self.controller!r} "
                f"returned {update.moves} for the signals {signals}; correct its update()"
            )
        return update

    def _decays_at(self, t: int) -> bool:
        start = self.settings.auto_lr_start
        return self.settings.decay == "exponential" and start is not None and t >= start and any(self.decaying.starts)

    # -- journal --------------------------------------------------------------------------------------------------

    def _round_record(
        self,
        k: int,
        end: RoundEnd,
        roll: RollCall,
        decision: _Decision,
        divergence: list[float],
        seconds: dict[str, float],
    ) -> dict[str, Any]:
        base = self.base(end.schedule(end.before), end.before)
        update = decision.update
        return round_record(
            k=k,
            step=end.after,
            roll=roll,
            base=[float(value) for value in base],
            assigned=self.assigned(end.before),
            weights=update.weights if update is not None else None,
            deltas=update.deltas if update is not None else None,
            controller_state=decision.state,
            factors=decision.factors,
            new_base=self._base_after(end, decision),
            divergence=divergence,
            seconds=seconds,
        )

    def _base_after(self, end: RoundEnd, decision: _Decision) -> list[float]:
        if self.settings.decay == "exponential" and any(decision.decaying.starts):
            return decision.decaying.bases
        return [m * value for m, value in zip(decision.factors, end.schedule(end.after), strict=True)]

    def _write(self, record: Mapping[str, Any]) -> None:
        """Write a record. A journal that cannot be written is given up: training on one rank alone must not stop."""
        assert self.sink is not None  # the roll call chose this replica because it has one
        try:
            self._open_journal()
            self.sink.write(record)
        except OSError as error:
            _log.warning("the journal %r cannot be written and is given up: %s", self.sink, error)
            self.sink = None

    def _open_journal(self) -> None:
        """Before the first line of this process: a header, or the news that the run goes on."""
        if self._journal_opened or self.sink is None:
            return
        if self._resumed_at is None or not getattr(self.sink, "begun", False):
            self.sink.write(header_record(self.arguments, self.seat.size, self.knobs))
        if self._resumed_at is not None:
            mid_round = self._is_inside_round(self._resumed_at)
            self.sink.write(resume_record(self._resumed_at, self.seat.size, mid_round))
        self._journal_opened = True

    def _is_inside_round(self, t: int) -> bool:
        return t > 0 and not self.settings.rounds.ends_at(t)

    # -- state ----------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Plain numbers, lists and strings; the same on every replica, with keys that never change."""
        controller = self.controller
        return {
            "version": STATE_VERSION,
            **self.settings.state(),
            "factors": list(self.factors),
            "starts": list(self.decaying.starts),
            "bases": list(self.decaying.bases),
            "controller": type(controller).__name__ if controller is not None else None,
            # Lists of pairs, not dicts: torch.distributed.checkpoint would make keys of their names.
            "controller_arguments": _pairs(dataclasses.asdict(controller) if isinstance(controller, Published) else {}),
            "controller_state": _pairs(self.controller_state._asdict() if self.controller_state is not None else {}),
        }

    def load(self, state: Mapping[str, Any], total_steps: int, t: int) -> None:
        """Go on from :meth:`state` at step ``t``. Checks everything before it changes anything."""
        if state.get("version") != STATE_VERSION:
            raise ArgumentError(
                f"the checkpoint's hdet state has version {state.get('version')!r}, this hdet reads {STATE_VERSION}; "
                "load it with the hdet that wrote it"
            )
        if len(state["factors"]) != self.knobs:
            raise ArgumentError(
                f"the checkpoint has {len(state['factors'])} parameter groups, but this optimizer has {self.knobs}; "
                "build the optimizer with the groups it was saved with"
            )
        settings = Settings.from_state(state, total_steps)
        controller = self._controller_for(state)
        self.settings, self.controller, self._assigned = settings, controller, None
        if controller is None:
            self.controller_state = None
        else:
            self.controller_state = controller.init(self.knobs)._replace(**dict(state["controller_state"]))
        self.factors = list(state["factors"])
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
        self._journal_opened, self._resumed_at, self.just_loaded = False, t, True
        if self.seat.size > 1 and self._is_inside_round(t):
            k, end = self.settings.rounds.index(t), self.settings.rounds.next_end(t)
            warnings.warn(
                f"resumed inside round {k}, at step {t}: its multipliers and its end at step {end} are kept, its loss "
                "sums start empty, and all replicas go on from the loaded weights",
                ResumeWarning,
                stacklevel=3,
            )

    def _controller_for(self, state: Mapping[str, Any]) -> Controller | None:
        name = state["controller"]
        if name is None:
            return None
        if name == Published.__name__:
            return Published(**dict(state["controller_arguments"]))
        if type(self.controller).__name__ == name:
            return self.controller
        raise ArgumentError(
            f"the checkpoint was written with auto_lr a {name}, but here it is {self.controller!r}; "
            f"build the scheduler with auto_lr={name}(...) before loading"
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Engine) and self.state() == other.state() and self.sink == other.sink

    __hash__ = None  # type: ignore[assignment]  # equal by value and, like a list, not meant as a key

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, watches_optimizer=False, set_aside=frozenset())

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and deepcopy: everything but the connection to the other replicas, which is made anew.

        A process group cannot be pickled: the copy looks for the default group.
        """
        return {**vars(self), "_user_group": None, "_group": None, "_assigned": None, "parameter_ids": None}


class _Assignment(NamedTuple):
    """The multipliers of a round."""

    steps: range
    """Steps for which they are known to hold."""
    seat: Seat
    everybody: list[list[float]]
    """``everybody[replica][knob]``"""
    mine: list[float]


class _Decision(NamedTuple):
    """Where the base values go at the end of a round."""

    update: Update | None
    factors: list[float]
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


def _pairs(values: Mapping[str, Any]) -> list[list[Any]]:
    return [[name, list(value) if isinstance(value, list) else value] for name, value in values.items()]


def _times(value: float | Tensor, factor: float) -> float | Tensor:
    return value if factor == 1.0 else value * factor


def _like(value: float | Tensor, number: float) -> float | Tensor:
    """``number`` as the type that ``value`` has."""
    return torch.full_like(value, number) if isinstance(value, Tensor) else number
