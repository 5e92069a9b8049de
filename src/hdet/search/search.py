"""The search: one model trains, and its learning rate is found meanwhile. The file to read first.

A *round* is some steps in a row: one step, then two each, later a fifth of the steps so far. Decisions are made at its
end. The *path* is the way of the weights since the first step or the last rollback; a *snapshot* is a copy of weights,
buffers and optimizer state. More words: ``README.md`` in this folder.

1. Before every step of the optimizer a hook is called (:mod:`hdet.search.steps`): the gradients of up to eight steps of
   a round are sampled and added to the sums along the path (:mod:`hdet.search.measure`).
2. After it the scheduler calls :meth:`Search.step` with the loss.
3. When a round ends, :meth:`Search.end_round` reads these sums and the losses off the device and makes the evidence of
   them (:meth:`Ranks.gather <hdet.search.gathering.Ranks.gather>`; several ranks exchange theirs). It asks the rule
   (:mod:`hdet.rule.decision`), which says how far the rate is raised and whether the weights go back. To change either,
   change the rule.
4. :meth:`Search._act` carries the decision out: keep a snapshot, roll back to one, or go on
   (:mod:`hdet.rollback.snapshots`).

With one rank, no bound of the user's, no journal and nothing to say, a round enters none of the code for these.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.errors import DivergedError, ResumeWarning
from hdet.frameworks import warn_unless_by_steps
from hdet.journal.writer import JournalWriter
from hdet.optimizer import Rate, direction, with_added
from hdet.ranks.agreement import RankGroup
from hdet.ranks.group import Solo, arriving
from hdet.ranks.shards import refuse_partitions
from hdet.rollback.losses import Losses
from hdet.rollback.snapshots import START, Snapshots
from hdet.rule.constants import Constants, Limits
from hdet.rule.decision import Decision, Evidence, Rule, next_end
from hdet.rule.enums import Action, Phase, Reason
from hdet.rule.found import Found
from hdet.rule.judge import Snapshot
from hdet.rule.state import State
from hdet.search import reporting
from hdet.search.bounds import Bounds
from hdet.search.gathering import Ranks
from hdet.search.measure import Measure
from hdet.search.memory import Memory
from hdet.search.steps import Sampling, Steps
from hdet.state import (
    STATE_VERSION,
    STATE_WORDS,
    EqualByState,
    check_run,
    check_version,
    in_pairs,
    numbers_from,
    plain,
    reading,
    run_state,
    written,
)

_Rate = TypeVar("_Rate", float, Rate)
KIND = "search"
_FIRST = "load the scheduler's own state first, of the same checkpoint, or leave the search out"
_is_distributed: Callable[[], bool] = dist.is_initialized if dist.is_available() else lambda: False
"""Whether there may be other ranks: every step asks, since torch.distributed may be initialised later."""


class Course(NamedTuple):
    """The schedule at a round's end, as it was at the step that was made and will be at the one to come."""

    held: tuple[list[float], list[float]]
    """With its peak in place of its rising phase, which is how the search uses it: it climbs by itself."""
    free: tuple[list[float], list[float]]
    """As it is, which counts once the search has stopped."""
    climb_end: float
    """The step at which the search's own climb ends."""


class Search(EqualByState):
    """The search of one run, seen from one rank.

    Gradients are shared, so all ranks hold the same weights and make the same decisions. Buffers are averaged over
    ranks, because each rank's batch norms have seen other batches.

    Rounds count the optimizer's steps. If a step is left out, as a GradScaler does, or if the scheduler is stepped more
    often, only the schedule moves.

    Memory while it searches: the first weights of the path and the sum of gradients in fp32, and two snapshots of
    weights, buffers and optimizer state, one on the device and one on the host. Until the first step is measured there
    is one snapshot, of the start.

    Args:
        rule: what is decided.
        knobs: a name for each parameter group.
        groups: numbers of the parameter groups whose rate is searched, the leading one first; others are left alone.
        model: its buffers are averaged, and rolled back with the weights; FSDP2's modules are told of written shards.
        rank_group: the ranks.
        journal_writer: the journal, a file with one line of JSON per round, or other *sinks* that take its records.
        rollback: whether snapshots are kept after the first step. The one from before it (``START``) is kept anyway:
            a first step that was too long, or was mostly lost in rounding, is made again from there.
        bounds: what the rates never exceed; None: nothing is bounded.
    """

    def __init__(
        self,
        rule: Rule,
        knobs: Sequence[str],
        groups: Sequence[int],
        model: nn.Module | None,
        rank_group: RankGroup,
        journal_writer: JournalWriter,
        *,
        rollback: bool = True,
        bounds: Bounds | None = None,
    ) -> None:
        self.rule = rule
        self.knobs = list(knobs)
        self.model = model
        self.rank_group = rank_group
        self.journal_writer = journal_writer
        self.losses = Losses()
        self.ranks = Ranks(rank_group, journal_writer, model)
        why = None if rule.long_enough else Reason.TOO_SHORT
        self.memory = Memory(rule.begin(), lead=groups[0], stopped_for=why)
        self.steps = Steps(groups, rule.constants, model)
        self._rollback = rollback
        self._bounds = bounds
        self._has_journal = journal_writer.is_kept  # asked once: the end of a round without one does not enter it
        self._is_finished = False
        self.steps.sampling = self._sampling
        self._has_asked = False
        """Whether the log has said that no loss was given."""
        self._lacks_tensors = False
        """Whether the search goes on from a checkpoint without what it held in tensors."""

    # -- values -------------------------------------------------------------------------------------------------------

    @property
    def learned(self) -> State:
        """The state of the rule."""
        return self.memory.learned

    @property
    def _groups(self) -> list[int]:
        """The numbers of the groups that are searched, the leading one first."""
        return self.steps.measure.groups

    @property
    def holds_rise(self) -> bool:
        """Whether the schedule's rising phase is held at its peak, since the search climbs by itself."""
        return self.learned.phase is not Phase.STOPPED

    def rates(self, schedule: Sequence[_Rate], t: int) -> list[_Rate]:
        """m r(t) times the schedule, within the bounds; each keeps its type.

        Until the schedule's peak, and for a tenth of the run at least, r(t) grows, so that the rate climbs even if m
        stays (:meth:`State.rise`).
        """
        factor = self.learned.factor(t, self.rule.constants)
        if self._bounds is None:
            return [value * factor for value in schedule]
        factor = min(factor, self._bounds.factor(schedule, self.memory.peaks))
        return self._bounds.held([value * factor for value in schedule])

    def grow(self, new: Collection[int], knobs: Sequence[str]) -> None:
        """Parameter groups were added to the optimizer: they have the common factor.

        Args:
            new: their numbers among all groups, which may move those of others.
            knobs: a name for each group, as they are now.
        """
        known = [g for g in range(len(knobs)) if g not in new]
        self.steps.measure.groups = [*(known[g] for g in self._groups), *new]
        self.memory.lead = self._groups[0]
        if self.memory.peaks:
            self.memory.peaks = with_added(self.memory.peaks, dict.fromkeys(new, 0.0))
        if self._bounds is not None:
            self._bounds = self._bounds.grown(new)
        self.knobs = list(knobs)

    # -- a step -------------------------------------------------------------------------------------------------------

    def begin(self, optimizer: Optimizer) -> None:
        """The optimizer is known: no step has been made yet."""
        refuse_partitions(optimizer, "search", "what is written into them does not reach the model")
        self.steps.begin(optimizer)
        self.ranks.begin(optimizer)

    def observe(self, loss: float | Tensor) -> None:
        """Count a loss towards the round."""
        self.losses.add(loss, self.steps.in_round)

    @property
    def _sampling(self) -> Sampling:
        """Steps are sampled until the schedule has fallen below 0.9 of its peak (``fall_start``)."""
        if self._is_finished or self.learned.phase is Phase.STOPPED:
            return Sampling.NONE
        if self.learned.phase is Phase.FIRST:
            return Sampling.FIRST
        return Sampling.NONE if self.memory.is_falling else Sampling.SOME

    def step(self, optimizer: Optimizer, before: int, after: int, loss: float | Tensor | None) -> bool:
        """A step of training was made, and the schedule goes on.

        Args:
            optimizer: the optimizer.
            before: the step at which it was made.
            after: the one to come.
            loss: of that step, if it is known.

        Returns:
            whether a round ends here: then call :meth:`end_round`.
        """
        if self.rank_group.in_consensus:
            self.rank_group.check_step(before)  # raises
        if before == 0 and self.rank_group.replica_index.replica == 0:
            warn_unless_by_steps()
        if loss is not None:
            self._take_loss(loss)
        if self.steps.is_loaded:
            self._tell_what_is_missing(before)
        if _is_distributed():
            self.ranks.connect(optimizer, before)
        if not self.journal_writer.is_locked and self.rank_group.replica_index.size == 1:
            self.journal_writer.lock(Solo(), writes=True)  # a group of one rank
        self._is_finished = after >= (self.rule.total_steps or math.inf)
        self.steps.sampling = self._sampling
        self.steps.end_step(optimizer)
        return self._round_ends(after)

    def _take_loss(self, loss: float | Tensor) -> None:
        """Add the loss of the last step, which was counted already, unless it was replayed from a graph.

        A framework may give it once for each process. If the round has ended since, it does not count for the next.
        """
        steps = self.steps
        is_replayed = steps.captured and not steps.is_heard
        if is_replayed or steps.is_heard or steps.in_round > 0 or steps.made == 0:
            self.losses.add(loss, max(steps.in_round - (not is_replayed), 0))

    # -- the end of a round -------------------------------------------------------------------------------------------

    def _round_ends(self, t: int) -> bool:
        """Whether a round ends at step ``t``: at each of the schedule's last two steps, at every step until the first
        one is measured, and when the round has all its steps."""
        last = self.rule.total_steps
        if last is not None and last - 1 <= t:
            return 0 < t <= last
        made, in_round = self.steps.made, self.steps.in_round
        if in_round == 0:
            return made == 0 and t > 0
        return self.learned.phase is Phase.FIRST or made >= next_end(made - in_round, self.rule.constants)

    def end_round(self, optimizer: Optimizer, t: int, course: Course) -> None:
        """Gather, decide, act, and report. Collective.

        Cost: one synchronisation of host and device, two small gathers; with buffers a third, and an all-reduce of
        those.

        Args:
            optimizer: the optimizer.
            t: the step to come.
            course: the schedule at the step before it and there.
        """
        began, memory, journal = time.perf_counter(), self.memory, self.journal_writer
        then, now = course.held if self.holds_rise else course.free
        rates = self.rates(then, t - 1) if self._has_journal else []
        is_alone = not _is_distributed() or self.rank_group.group.replica_index.size == 1
        # arriving: the error of a failed collective names the ranks that are missing
        with nullcontext() if is_alone else arriving(f"the end of a round, at step {t}"):
            seen, writes = self.ranks.gather(optimizer, t, self.steps, self.losses, is_alone=is_alone)
        gathered = time.perf_counter()
        if seen.steps == 0 and seen.measured.moved > 0:  # a graph was captured before the hook was set
            self.steps.notice_graph()
        if self.steps.measure.has_other_parameters:  # how far the first step moved the weights says nothing any more
            memory.learned = self.learned._replace(pace=math.nan)
        sign = direction([optimizer.param_groups[g] for g in self._groups])
        evidence = memory.take_in(seen._replace(peak=course.climb_end), then, now, sign)
        decision = self._decide(optimizer, evidence, now)
        peaks_now, ends = not memory.has_peaked and t >= course.climb_end, t == self.rule.total_steps
        self._act(decision, evidence, optimizer)
        self.losses.reset()
        if writes and self._has_journal and journal.is_kept:
            # named as in the journal of a replica ensemble: its controller decides, here the rule does
            seconds = {"gather": gathered - began, "controller": time.perf_counter() - gathered}
            now = (course.held if self.holds_rise else course.free)[1]  # the search may have stopped
            both = (rates, self.rates(now, t)), (then, now)
            record = reporting.record_of(memory, evidence, decision, *both, seconds)
            journal.write({**record, "total_steps": self.rule.total_steps}, self.knobs, began)
        if ends and self._has_journal:
            journal.close()
        memory.rounds += 1
        self._tell(decision, t, sign, ends=ends, peaks_now=peaks_now)
        if self._has_journal:
            journal.begin_round()

    def _decide(self, optimizer: Optimizer, evidence: Evidence, schedule: Sequence[float]) -> Decision:
        """Ask the rule, within the bounds that the user gave."""
        known = self.rule.remembering(self.learned, self.steps.snapshots.present(optimizer))
        self.memory.is_bound = False
        if self._bounds is None:
            return self.rule.after_round(known, evidence)
        highest = math.log(self._bounds.factor(schedule, self.memory.peaks))
        decision = self.rule.after_round(known.bounded(highest), evidence._replace(highest=highest))
        decision = decision._replace(state=decision.state.bounded(highest))
        self.memory.is_bound = decision.state.is_bound(highest)
        return decision

    def _act(self, decision: Decision, evidence: Evidence, optimizer: Optimizer) -> None:
        """Do with the weights what was decided, remember it, and begin the next round."""
        slot = decision.slot
        if decision.action is Action.KEEP and slot is not None and self._rollback and not self._is_finished:
            self.steps.snapshots.keep(slot, optimizer, self.model)
        elif decision.action is Action.ROLL_BACK and slot is not None:
            self.steps.snapshots.roll_back_(slot, optimizer, self.model)
        elif decision.action is Action.RESTART:
            self.steps.snapshots.roll_back_(START, optimizer, self.model)
        elif decision.action is Action.CANNOT_ROLL_BACK and not evidence.is_finite:
            raise DivergedError(
                f"the weights are NaN or infinite at step {evidence.end}, and there is no snapshot to roll back "
                f"to; load an earlier checkpoint{'' if self._rollback else ', or leave rollback=False out'}"
            )
        self.memory.note(self.rule, decision, evidence)
        kept = set() if self._is_finished else {one.slot for one in self.learned.snapshots}
        self.steps.snapshots.keep_only(kept | {START} if self.learned.phase is Phase.FIRST else kept)
        self.steps.sampling = self._sampling
        self.steps.begin_round(optimizer, resets_path=decision.resets_path or evidence.measured.is_broken)

    def _tell(self, decision: Decision, t: int, sign: float, *, ends: bool, peaks_now: bool) -> None:
        """Tell people, on the first rank, what was decided, that no loss is given, and what has been found.

        The latter once the rate has settled, when the schedule has just reached its peak, and when the run ends.
        """
        memory = self.memory
        settles = not memory.has_settled and memory.status[0] == "settled"
        memory.has_settled |= settles
        is_special = decision.why is not None or decision.rolled_back_to is not None
        is_time = self.learned.phase is Phase.SEARCHING and self.steps.made > self.rule.constants.min_round
        asks = is_time and not (memory.has_losses or is_special or self._has_asked)
        self._has_asked |= asks
        if not (is_special or asks or ends or peaks_now or settles) or self.rank_group.replica_index.replica != 0:
            return
        if is_special:
            reporting.warn_of(decision, t, has_model=self.model is not None)
        if asks:
            reporting.log_missing_losses(t)
        if (ends or peaks_now) and memory.progress.is_known:
            reporting.warn_of_losses(memory.progress, t, sign, ends=ends)
        if ends and self.holds_rise:
            # a schedule of the user's own has no peak to be given
            reporting.log_end(memory.told, has_peak=self.journal_writer.arguments.get("schedule") == "trapezoid")
        elif settles:
            reporting.log_settled(memory.told, t)

    def _tell_what_is_missing(self, t: int) -> None:
        """Warn at the first step after loading, when everything that will be loaded has been."""
        lacks_tensors, self.steps.is_loaded, self._lacks_tensors = self._lacks_tensors, False, False
        if lacks_tensors and t < (self.rule.total_steps or math.inf) and self.rank_group.replica_index.replica == 0:
            reporting.warn(reporting.resumed_words(t, is_falling=self.memory.is_falling), ResumeWarning)

    # -- checkpoints, and runs whose length changes -------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Plain numbers, lists and strings; the same on every rank, with keys that never change."""
        made = self.steps.made
        envelope = run_state(KIND, self.knobs, [0.0] * len(self.knobs))
        numbers = {"constants": in_pairs(self.rule.constants._asdict()), "limits": in_pairs(self.rule.limits._asdict())}
        return {**envelope, **numbers, **self.memory.saved(), "made": made, "begun": made - self.steps.in_round}

    def check(self, state: Mapping[str, Any]) -> Found:
        """Raise unless :meth:`load` can go on from it. Changes nothing.

        Returns:
            what was found in the run that was saved.
        """
        check_run(state, KIND, self.knobs)
        with reading(STATE_WORDS):
            return _read(state).memory.told

    def load(self, state: Mapping[str, Any], total_steps: int | None, t: int) -> None:
        """Go on at step ``t`` from a state that :meth:`check` accepts, with the constants that its search began with.

        Without :meth:`load_tensors` a new path begins, and there is no snapshot yet.
        """
        memory, constants, limits, made, begun = _read(state)
        self.rule = dataclasses.replace(self.rule, total_steps=total_steps, constants=constants, limits=limits)
        self.steps.restart(made, made - begun, constants)
        self.memory = memory
        self.memory.lead = self._groups[0]
        self._lacks_tensors = self.learned.phase is Phase.SEARCHING
        self.losses.reset()  # those of the round so far are not in it
        highest = math.inf if self._bounds is None else self._bounds.lowest
        self.rank_group.resume({**state, "rollback": self._rollback, "highest": highest})
        self.steps.is_loaded, self._is_finished = True, False
        self.steps.sampling = self._sampling
        self.journal_writer.resume(t, mid_round=self.steps.in_round > 0)

    def finish(self, optimizer: Optimizer, t: int, steps: int, share: float) -> None:
        """The schedule falls from ``t`` on, over ``steps`` steps, and from the rate as it is. Collective.

        ``share``: the schedule over its peak, if it rises. Raises if ranks disagree, before anything is changed.
        """
        self.ranks.agree_to_finish(optimizer, t, steps)
        self.replan(t + steps, t - 1, share * self.learned.rise(t, self.rule.constants))

    def replan(self, total_steps: int | None, peak: float, share: float = 1.0) -> None:
        """The run has another length, and its schedule another peak; see :meth:`State.peaking`."""
        self.rule = dataclasses.replace(self.rule, total_steps=total_steps)
        self.memory.learned = self.learned.peaking(peak, share)

    def tensors(self, optimizer: Optimizer, t: int) -> dict[str, Any]:
        """What the search holds in tensors at step ``t``, and this rank's losses of the round so far."""
        return {
            **written(STATE_VERSION),
            "step": t,
            "losses": [self.losses.saved()],
            "kept": plain(self.learned.snapshots),
            "measure": self.steps.measure.saved(optimizer),
            "snapshots": self.steps.snapshots.saved(optimizer),
        }

    def load_tensors(self, search: Mapping[str, Any], optimizer: Optimizer, t: int) -> None:
        """Go on with :meth:`tensors`, after :meth:`load`. Checks everything before it changes anything."""
        with reading("the state of a search", _FIRST):
            check_version("the state of a search", search, STATE_VERSION)
            if search["step"] != t:
                raise ValueError(f"it is of step {search['step']}, the scheduler is at {t}")
            losses = Losses.loaded(self.rank_group.replica_index.own(search["losses"]))
            kept = tuple(Snapshot(int(made), int(slot)) for made, slot in search["kept"])
            measure = Measure.loaded(search["measure"], self._groups, optimizer)
            snapshots = Snapshots.loaded(search["snapshots"], optimizer)
        self.losses, self.steps.measure, self.steps.snapshots = losses, measure, snapshots
        self.memory.learned = self.learned._replace(snapshots=kept)
        self._lacks_tensors = False


class _Saved(NamedTuple):
    """What a state says."""

    memory: Memory
    constants: Constants
    limits: Limits
    """Those of the library when the search began, which an upgrade may have changed since."""
    made: int
    """Steps, in all."""
    begun: int
    """Before this round."""


def _read(state: Mapping[str, Any]) -> _Saved:
    """Raises for constants that this rule does not have, and for those that it has and the state has not."""
    writer = state.get("hdet")
    constants, limits = (
        numbers_from(Constants, state["constants"], writer),
        numbers_from(Limits, state["limits"], writer),
    )
    return _Saved(Memory.loaded(state), constants, limits, int(state["made"]), int(state["begun"]))
