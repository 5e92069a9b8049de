"""The run: one replica's share, the same for one replica and for many.

A face (:class:`hdet.OneCycleLR`, :class:`hdet.Ensemble`) counts steps, computes a schedule and asks for this replica's
values. The run never holds the face or the optimizer.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from hdet.checks import users_level
from hdet.copies import put_back
from hdet.distributed.group import Group, Seat, Solo, arriving
from hdet.distributed.meeting import Meeting
from hdet.distributed.resharding import resharded
from hdet.distributed.rollcall import Occasion, Shown
from hdet.distributed.weights import NO_WEIGHTS
from hdet.engine.trained.way import TrainedWay
from hdet.engine.way import RoundEnd
from hdet.errors import ResumeWarning
from hdet.journal import Sink
from hdet.journal.chronicle import Chronicle
from hdet.rates import Rate
from hdet.rollback.losses import Losses
from hdet.state_rules import check_run, run_state

__all__ = ["Run"]


class Run:
    """A way, the replicas it is gone with, and the journal about it.

    Args:
        way: how the replicas differ.
        group: the user's process group or arms; None: the default group, once there is one.
        sink: where the journal goes, or None.
        arguments: the user's arguments, for the journal's header.
        alike: those that the way does not know and that must be equal on all ranks, in words.
    """

    def __init__(
        self,
        way: TrainedWay,
        group: Group,
        sink: Sink | None,
        arguments: Mapping[str, Any],
        alike: Mapping[str, str],
    ) -> None:
        self.way = way
        self.losses = Losses()
        self.chronicle = Chronicle(sink, arguments)
        self.meeting = Meeting(group, alike)
        self.is_just_loaded = False
        """Between loading a checkpoint and the next step: an optimizer loaded now brings another replica's values."""

    # -- values ---------------------------------------------------------------------------------------------------

    @property
    def seat(self) -> Seat:
        """This replica's place."""
        return self.meeting.seat

    @property
    def knobs(self) -> list[str]:
        """Their names."""
        return [spec.name for spec in self.way.specs]

    @property
    def total_steps(self) -> int | None:
        """The length of the run, if it is known."""
        return self.way.total_steps

    def rates(self, schedule: Sequence[Rate], t: int) -> list[Rate]:
        """This replica's values of scheduled knobs at step ``t``."""
        return self.way.rates(schedule, t, self.seat)

    # -- the loop -------------------------------------------------------------------------------------------------

    def begin(self, optimizer: Optimizer) -> None:
        """The optimizer is known: no step has been made yet."""
        self.way.begin(optimizer)
        self.meeting.count_steps(optimizer)

    def observe(self, loss: float | Tensor) -> None:
        """Count a loss towards the round."""
        self.losses.add(loss)

    def step(
        self,
        optimizer: Optimizer,
        before: int,
        after: int,
        loss: float | Tensor | None,
        schedule: Callable[[int], list[float]],
        floors: Callable[[], list[float]],
    ) -> None:
        """A step of training was made, and the schedule goes on. Where a round ends, that is a collective.

        Args:
            optimizer: the optimizer.
            before: the step at which it was made.
            after: the one to come.
            loss: of that step, if it is known.
            schedule: the plain schedule of each knob at a step; anything for knobs that have none.
            floors: the schedule's lowest value of each knob.
        """
        self.meeting.step(optimizer, before)
        if loss is not None:
            self.losses.add(loss)
        if self.is_just_loaded:
            self.is_just_loaded = False
            self._tell_what_was_lost(before)
        self.connect(optimizer, before)
        if self.seat.size == 1:
            self.chronicle.claim(Solo(), writes=True)
        self.way.after_step(optimizer, after, self.meeting)
        if self.way.rounds.ends_at(after):
            self._end_round(RoundEnd(before, after, optimizer, schedule, floors, self.losses, self.chronicle.is_kept))

    def _end_round(self, end: RoundEnd) -> None:
        ended = time.perf_counter()
        with arriving(f"the end of a round, at step {end.after}"):
            record = self.way.end_round(end, self.meeting)
        self.losses.reset()
        self.meeting.begin_round()
        if record is not None:
            self.chronicle.write(record, self.knobs, ended)
        if end.after == self.way.total_steps:
            self.chronicle.close()
        self.chronicle.begin_round()

    # -- meeting the other replicas ---------------------------------------------------------------------------------

    def connect(self, optimizer: Optimizer, t: int) -> None:
        """Once torch.distributed is initialised: check that the replicas agree. Collective the first time."""
        if not self.meeting.is_due:
            return
        self.chronicle.begin_round()
        if self.seat.size == 1:
            self.meeting.begin(Solo())
            if dist.get_rank() > 0:  # one arm of several ranks: one of them writes the journal
                self.chronicle.give_up()
            return
        weights = self.way.first_weights(optimizer)
        with arriving("the first step, where the replicas meet"):
            group, roll = self.meeting.first(t, self.way.terms(), weights, keeps_journal=self.chronicle.is_kept)
            self.way.met(group, roll)
            if roll.writer is not None:
                self.chronicle.claim(group, writes=roll.writer == group.rank)
        self.meeting.begin(group)

    def converge(self, optimizer: Optimizer, t: int, occasion: Occasion = Occasion.CONVERGE) -> None:
        """Average now, nothing else: the round goes on. Collective."""
        self.connect(optimizer, t)
        if self.seat.size > 1:
            self.way.converge(optimizer, t, self.meeting, occasion)

    @contextmanager
    def consensus(self, optimizer: Optimizer, t: int) -> Iterator[None]:
        """The replicas' one model inside, this replica's own weights back afterwards. Collective.

        One copy of what the replicas do not share.
        """
        if self.seat.size == 1:
            yield
            return
        self.meeting.refuse_nested()
        self.connect(optimizer, t)
        tensors = self.way.weights(optimizer).tensors
        with resharded(self.way.model), put_back(tensors), self.meeting.consensus():
            self.converge(optimizer, t, Occasion.CONSENSUS)
            yield

    def compare(self, metrics: float, t: int) -> None:
        """Raise unless all ranks give the same metrics. Collective."""
        if self.seat.size == 1:
            return
        with arriving(f"comparing metrics at step {t}"):
            terms = self.way.terms()
            self.meeting.roll_call(Occasion.METRICS, t, terms, NO_WEIGHTS, Shown(signal=metrics), expect_equal=False)

    # -- state ----------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Plain numbers, lists and strings; the same on every replica, with keys that never change."""
        envelope = run_state("replicas", self.knobs, [spec.spread for spec in self.way.specs])
        return {**envelope, **self.way.state()}

    def load(
        self,
        state: Mapping[str, Any],
        total_steps: int | None,
        t: int,
        tensors: Sequence[Sequence[Tensor]] = (),
    ) -> None:
        """Go on from :meth:`state` at step ``t``, which :meth:`check` has seen."""
        self.way.load(state, tensors, total_steps)
        self._resume(t)

    def check(self, state: Mapping[str, Any], tensors: Sequence[Sequence[Tensor]] = ()) -> None:
        """Raise unless :meth:`load` can go on from a state. Changes nothing."""
        check_run(state, "replicas", self.knobs)
        self.way.check(state, tensors)

    def _tell_what_was_lost(self, t: int) -> None:
        """At the first step after a checkpoint: by then all of it is loaded."""
        lost = self.way.lost(t, self.seat)
        if lost is not None and self.seat.replica == 0:
            warnings.warn(lost, ResumeWarning, stacklevel=users_level())

    def adopt(self, total_steps: int, t: int) -> None:
        """Go on from a checkpoint of torch's own scheduler: only the counters are known."""
        self.way.adopt(total_steps, t)
        self._resume(t)

    def _resume(self, t: int) -> None:
        """The counter was set to ``t`` by a checkpoint: losses of the round so far are not in it."""
        self.losses.reset()
        self.meeting.resume()
        self.is_just_loaded = True
        self.chronicle.resume(t, mid_round=t > 0 and not self.way.rounds.ends_at(t))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Run) and self.state() == other.state() and self.chronicle.sink == other.chronicle.sink

    __hash__ = None  # type: ignore[assignment]  # equal by value and, like a list, not meant as a key
