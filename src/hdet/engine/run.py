"""The run: one replica's share, the same for one replica and for many.

A face (:class:`hdet.OneCycleLR`, :class:`hdet.Ensemble`) counts steps, computes a schedule and asks for this replica's
values. How replicas differ is the business of a :class:`hdet.engine.way.Way`. The run never holds the face or the
optimizer.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar
from weakref import ref

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from hdet.checks import users_level
from hdet.copies import put_back
from hdet.distributed.agreement import check_arguments
from hdet.distributed.arms import Arms
from hdet.distributed.group import Group, ReplicaGroup, Seat, Solo, arriving
from hdet.distributed.meeting import Meeting
from hdet.distributed.presence import presence
from hdet.distributed.resharding import resharded
from hdet.distributed.rollcall import Occasion, Shown
from hdet.distributed.tally import Tally
from hdet.distributed.weights import NO_WEIGHTS
from hdet.engine.checkpoint import STATE_VERSION, STATE_WORDS
from hdet.engine.way import RoundEnd, Way
from hdet.errors import ArgumentError, JournalError, ResumeWarning, SearchWarning
from hdet.journal import Sink
from hdet.journal.chronicle import Chronicle
from hdet.rates import Rate
from hdet.rollback.losses import Losses
from hdet.state_rules import check_state, numbers, one_of, texts

__all__ = ["Run"]

Face = TypeVar("Face")


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
        way: Way,
        group: Group,
        sink: Sink | None,
        arguments: Mapping[str, Any],
        alike: Mapping[str, str],
    ) -> None:
        self.way = way
        self._alike = alike
        """Nothing once a checkpoint has replaced them."""
        self.losses = Losses()
        self.chronicle = Chronicle(sink, arguments)
        self._tally = Tally()
        everybody = isinstance(group, Arms) and way.name == "search"  # of one model, whose ranks decide together
        self.meeting = Meeting(None if everybody else group, self._tally)
        self._just_loaded = False
        """Between loading a checkpoint and the next step: an optimizer loaded now brings another replica's values."""
        self._watches_loading = False
        self.in_consensus = False
        """Whether this replica holds the replicas' mean."""
        self._has_doubted = False
        self._has_claimed = False
        """Whether the journal's files are known to be this run's alone."""
        self._round_began = time.perf_counter()

    # -- values ---------------------------------------------------------------------------------------------------

    @property
    def seat(self) -> Seat:
        """This replica's place."""
        return self.meeting.seat

    def rates(self, schedule: Sequence[Rate], t: int) -> list[Rate]:
        """This replica's values of scheduled knobs at step ``t``."""
        return self.way.rates(schedule, t, self.seat)

    @property
    def keeps_journal(self) -> bool:
        return self.chronicle.sink is not None

    def spread_out(self, base: Sequence[Rate], t: int) -> list[Rate]:
        """Base values of scheduled knobs, made this replica's."""
        multipliers = self.way.multipliers(t, self.seat)
        return [value if rho == 1.0 else value * rho for value, rho in zip(base, multipliers, strict=True)]

    # -- the loop -------------------------------------------------------------------------------------------------

    def begin(self, optimizer: Optimizer) -> None:
        """The optimizer is known: no step has been made yet."""
        self.way.begin(optimizer)
        self._count(optimizer)

    def _count(self, optimizer: Optimizer) -> None:
        """Have steps counted, where there is somebody to compare with."""
        if self.seat.size > 1:
            self._tally.watch(optimizer)

    def observe(self, loss: float | Tensor) -> None:
        """Count a loss towards the round."""
        self.losses.add(loss, self.way.progress)

    def doubt_epoch(self, epoch: int) -> None:
        """Say once that an integer was taken for an epoch, if losses were given before: it may have been one."""
        if self.losses.ever and not self._has_doubted:
            self._has_doubted = True
            warnings.warn(
                f"step({epoch}) sets the epoch to {epoch}, as in torch, though losses were given before; if it is "
                f"a loss, give step(float(loss)) or step(loss={epoch})",
                UserWarning,
                stacklevel=users_level(),
            )

    def after_step(self, optimizer: Optimizer, before: int, after: int, loss: float | Tensor | None = None) -> bool:
        """A step of training has been made, and the counter goes on. Whether a round ends there."""
        if self.in_consensus:
            raise ArgumentError(
                f"step() was called inside consensus(), at step {before}: the weights are put back afterwards, so "
                "training inside is lost; leave the `with` block first"
            )
        if self._tally.step() and self.seat.size > 1:
            self._tally.ask_why(optimizer)
        if loss is not None:
            self.losses.add(loss, max(self.way.progress - 1, 0))
        self._count(optimizer)  # a copy has no hook yet
        if self._just_loaded:
            self._just_loaded = False
            self._tell_what_was_lost(before)
        self.connect(optimizer, before)
        if not self._has_claimed and self.seat.size == 1:
            self._claim_journal(Solo(), writes=True)
        self.way.after_step(optimizer, after, self.meeting)
        return self.way.round_ends(after)

    def end_round(
        self,
        optimizer: Optimizer,
        before: int,
        after: int,
        schedule: Callable[[int], list[float]],
        floors: Callable[[], list[float]],
        peak: Callable[[], float],
    ) -> None:
        """Let the way end the round, of which the face knows this much, and write the journal. Collective."""
        began = time.perf_counter()
        end = RoundEnd(before, after, optimizer, schedule, floors, peak, self.losses, self.keeps_journal)
        with arriving(f"the end of a round, at step {end.after}"):
            report = self.way.end_round(end, self.meeting)
        self.losses.reset()
        self._tally.reset()
        if report.record is not None:
            report.record["seconds"] = {"train": began - self._round_began, **report.record["seconds"]}
            self.chronicle.write(report.record, len(report.record["replicas"]), [s.name for s in self.way.specs])
        if end.after == self.way.total_steps:
            self.chronicle.close()
        if report.warning is not None and self.meeting.group.rank == 0:
            warnings.warn(report.warning, SearchWarning, stacklevel=users_level())
        self._round_began = time.perf_counter()

    # -- meeting the other replicas ---------------------------------------------------------------------------------

    def connect(self, optimizer: Optimizer, t: int) -> None:
        """Once torch.distributed is initialised: check that the replicas agree. Collective the first time."""
        meeting = self.meeting
        if not meeting.is_due:
            return
        self._round_began = time.perf_counter()
        if meeting.seat.size == 1:
            meeting.begin(Solo())
            if dist.get_rank() > 0:  # one arm of several ranks: one of them writes the journal
                self.chronicle.give_up()
            return
        weights = self.way.first_weights(optimizer)
        with arriving("the first step, where the replicas meet"):
            presence().arrive(f"the first step, {t}")
            group = meeting.gathered()
            terms = self.way.terms()
            shown = Shown(journal=self.keeps_journal)
            roll = meeting.roll_call(Occasion.FIRST_STEP, t, terms, weights, shown, expect_equal=False, within=group)
            check_arguments(group, self._alike, weights.device)
            self.way.met(group, roll)
            if roll.writer is not None:
                self._claim_journal(group, writes=roll.writer == group.rank)
        meeting.begin(group)

    def _claim_journal(self, group: ReplicaGroup, *, writes: bool) -> None:
        """Raise on every rank if another run writes to the journal. Collective."""
        self._has_claimed = True
        error = self.chronicle.claim() if writes else None
        refused = [rank for rank, (row,) in enumerate(group.gather([float(error is not None)])) if row]
        if error is not None:
            raise error
        if refused:
            raise JournalError(f"rank {refused[0]} may not write the journal, since another run does; see its message")

    def converge(self, optimizer: Optimizer, t: int, occasion: Occasion = Occasion.CONVERGE) -> None:
        """Average now, nothing else: the round goes on. Collective."""
        self.connect(optimizer, t)
        if self.seat.size > 1 and self.way.drifts_apart:
            self.way.converge(optimizer, t, self.meeting, occasion)

    @contextmanager
    def consensus(self, optimizer: Optimizer, t: int) -> Iterator[None]:
        """The replicas' one model inside, this replica's own weights back afterwards. Collective.

        One copy of what the replicas do not share, where they drift apart at all.
        """
        if self.seat.size == 1 or not self.way.drifts_apart:
            yield
            return
        if self.in_consensus:
            raise ArgumentError("consensus() is entered already; leave the outer `with ...consensus():` first")
        self.connect(optimizer, t)
        with resharded(self.way.model), put_back(self.way.weights(optimizer).tensors):
            self.in_consensus = True
            try:
                self.converge(optimizer, t, Occasion.CONSENSUS)
                yield
            finally:
                self.in_consensus = False

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
        return {
            "version": STATE_VERSION,
            "way": self.way.name,
            "knobs": [spec.name for spec in self.way.specs],
            "spreads": [spec.spread for spec in self.way.specs],
            **self.way.state(),
        }

    def load(
        self,
        state: Mapping[str, Any],
        total_steps: int | None,
        t: int,
        tensors: Sequence[Sequence[Tensor]] = (),
    ) -> None:
        """Go on from :meth:`state` at step ``t``, which :meth:`check` has seen."""
        self._tell_another_length(total_steps)
        self.way.load(state, tensors, total_steps)
        self._resume(t)

    def check(
        self, state: Mapping[str, Any], total_steps: int | None, tensors: Sequence[Sequence[Tensor]] = ()
    ) -> None:
        """Raise unless :meth:`load` can go on from a state. Changes nothing."""
        version = state.get("version")
        if not isinstance(version, int) or version != STATE_VERSION:
            raise ArgumentError(
                f"{STATE_WORDS} has version {version!r}, this hdet reads {STATE_VERSION}; "
                "load it with the hdet that wrote it"
            )
        check_state(state, {"way": one_of("replicas", "search"), "knobs": texts}, STATE_WORDS)
        if state["way"] != self.way.name:
            raise ArgumentError(
                f'the checkpoint is of a run of the kind "{state["way"]}", but here it is "{self.way.name}" '
                '(max_lr="auto" is a search, a number is not); build the scheduler as it was when it was saved'
            )
        names = [spec.name for spec in self.way.specs]
        if list(state["knobs"]) != names:
            raise ArgumentError(
                f"the checkpoint has the knobs {list(state['knobs'])}, but here they are {names}; "
                "build the optimizer and the knobs as they were when it was saved"
            )
        check_state(state, {"spreads": numbers(len(names))}, STATE_WORDS)
        self.way.check(state, tensors, total_steps)

    def search(self, optimizer: Optimizer, t: int) -> dict[str, Any]:
        """What a search holds in tensors at step ``t``, and the losses of the round so far: this rank's.

        Nothing where nothing is searched.
        """
        found = self.way.search(optimizer)
        return {"version": STATE_VERSION, "step": t, "losses": [self.losses.saved()], **found} if found else {}

    def check_search(self, search: Mapping[str, Any], optimizer: Optimizer, t: int) -> None:
        """Raise unless :meth:`load_search` can go on with it at step ``t``. Changes nothing."""
        if search:
            with _fitting(search, t):
                self._losses_in(search)
                self.way.check_search(search, optimizer)

    def load_search(self, search: Mapping[str, Any], optimizer: Optimizer, t: int) -> None:
        """Go on with :meth:`search`, after :meth:`load`. Checks everything before it changes anything."""
        if search:
            with _fitting(search, t):
                losses = self._losses_in(search)
                self.way.load_search(search, optimizer)
                self.losses = losses

    def _losses_in(self, search: Mapping[str, Any]) -> Losses:
        """This rank's, of the round so far; where other ranks have saved, all of theirs."""
        rows, seat = search["losses"], self.seat
        own = [rows[seat.replica]] if len(rows) == seat.size else rows
        return Losses.loaded(row for one in own for row in one)

    def _tell_what_was_lost(self, t: int) -> None:
        """At the first step after a checkpoint: by then all of it is loaded."""
        lost = self.way.lost(t, self.seat)
        if lost is not None and self.seat.replica == 0:
            warnings.warn(lost, ResumeWarning, stacklevel=users_level())

    def adopt(self, total_steps: int, t: int) -> None:
        """Go on from a checkpoint of torch's own scheduler: only the counters are known."""
        self._tell_another_length(total_steps)
        self.way.adopt(total_steps, t)
        self._resume(t)

    def _tell_another_length(self, total_steps: int | None) -> None:
        """The checkpoint's length replaces the constructor's, as in torch: the run ends where the file says."""
        mine = self.way.total_steps
        if mine is not None and mine != total_steps and self.seat.replica == 0:
            theirs = "no known length" if total_steps is None else f"{total_steps} steps"
            warnings.warn(
                f"the checkpoint is of a run of {theirs}, but this scheduler was built with total_steps={mine}: the "
                "checkpoint's length counts, as in torch; build it with that, or load only the weights and begin a new "
                "run",
                ResumeWarning,
                stacklevel=users_level(),
            )

    def _resume(self, t: int) -> None:
        """The counter was set to ``t`` by a checkpoint: losses of the round so far are not in it."""
        self.losses.reset()
        self._alike = {}
        self._tally.reset()
        self._just_loaded = True
        self.chronicle.resume(t, mid_round=self.way.inside_round(t))

    def watch_loading(self, optimizer: Optimizer, face: Face, rewrite: Callable[[Face], None]) -> None:
        """Let ``rewrite`` write this replica's values again if the optimizer is loaded after the face.

        An optimizer's checkpoint brings rank 0's values. The hook holds the face weakly: no reference cycle.
        """
        if self._watches_loading:
            return
        held, run = ref(face), ref(self)

        def after_load(_: Optimizer) -> None:
            found, mine = held(), run()
            if found is not None and mine is not None and mine._just_loaded:
                rewrite(found)

        try:
            optimizer.register_load_state_dict_post_hook(after_load)
        except AttributeError:  # a framework's wrapper that has no hooks: the next step() writes the values
            return
        self._watches_loading = True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Run) and self.state() == other.state() and self.chronicle.sink == other.chronicle.sink

    __hash__ = None  # type: ignore[assignment]  # equal by value and, like a list, not meant as a key

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _watches_loading=False, _has_claimed=False)


@contextmanager
def _fitting(search: Mapping[str, Any], t: int) -> Iterator[None]:
    """Inside, a search is read that must be of step ``t``: whatever does not fit becomes one error."""
    try:
        version, step = search["version"], search["step"]
        if (version, step) != (STATE_VERSION, t):
            raise ValueError(f"it is of version {version} at step {step}, the scheduler {STATE_VERSION} at {t}")
        yield
    except (KeyError, TypeError, IndexError, AttributeError, ValueError, RuntimeError) as error:
        raise ArgumentError(
            f"the state of a search does not fit this scheduler ({type(error).__name__}: {error}); load the "
            "scheduler's own state first, of the same checkpoint, or leave the search out"
        ) from error
