"""The search: one model trains, and its learning rate is found meanwhile. The file to read first.

A *round* is some steps in a row: one step, then two each, later a fifth of the steps so far. Decisions are made at its
end. The *path* is the way of the weights since the first step or the last rollback; a *snapshot* is a copy of weights,
buffers and optimizer state. More words: ``README.md`` in this folder.

1. Before every step of the optimizer a hook calls :meth:`Search._before_step`: the gradients of up to eight steps of a
   round are sampled (:mod:`hdet.search.sampling`) and added to the sums along the path (:mod:`hdet.search.measure`).
2. After it the scheduler calls :meth:`Search.step` with the loss.
3. When a round ends, :meth:`Search._end_round` reads these sums and the losses off the device and makes the evidence of
   them (:meth:`Search._gather`; several ranks exchange theirs in :mod:`hdet.search.gathering`). It asks the rule
   (:mod:`hdet.search.rule`), which says how far the rate is raised and whether the weights go back. To change either,
   change the rule.
4. :meth:`Search._act` carries the decision out: keep a snapshot, roll back to one, or go on
   (:mod:`hdet.rollback.snapshots`).

With one rank, no bound of the user's, no journal and nothing to say, a round enters none of the code for these. One
exception: the buffers of a model are found by :mod:`hdet.search.gathering` even on one rank.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.checks import STATE_VERSION, STATE_WORDS, EqualByState, check_run, reading, run_state, warn_unless_by_steps
from hdet.errors import DivergedError, ResumeWarning
from hdet.events import Reason
from hdet.journal.writer import JournalWriter
from hdet.parameters import Rate, direction, end_step, stands_still, trained_parameters, with_added
from hdet.ranks.agreement import Occasion, fingerprints_of
from hdet.ranks.group import ReplicaIndex, Solo, arriving
from hdet.ranks.rank_group import RankGroup
from hdet.ranks.shards import refuse_partitions
from hdet.ranks.weights import NO_WEIGHTS, read
from hdet.rollback.judge import mean_of, merged, table_of
from hdet.rollback.losses import Losses
from hdet.rollback.policy import Action, Snapshot
from hdet.rollback.saving import plain, rows_of
from hdet.rollback.snapshots import START, Snapshots
from hdet.search import reporting
from hdet.search.bounds import NO_BOUNDS, Bounds, bounded, is_bound
from hdet.search.estimate import Measured
from hdet.search.gathering import Ranks
from hdet.search.measure import Measure
from hdet.search.memory import Memory
from hdet.search.progress import Progress
from hdet.search.reporting import Found
from hdet.search.rule import Decision, Evidence, Phase, Rule, State, next_end
from hdet.search.sampling import Sampler, Sampling, StepHook
from hdet.search.written import Written

_Rate = TypeVar("_Rate", float, Rate)
KIND = "search"
_QUIET = 3
"""Rounds without a raise after which a rate has settled in a run of unknown length, whose schedule does not fall. In
other runs, rates that had stayed as long were raised up to fifty times before the schedule fell (LOG, what a run
says)."""
_NOT_SEARCHED = (
    "what is written into them does not reach the model. Leave lr_scheduler out of deepspeed.initialize, and call "
    "hdet.integrations.deepspeed.auto(engine, total_steps=...) after it"
)
_FIRST = "load the scheduler's own state first, of the same checkpoint, or leave the search out"
_is_distributed: Callable[[], bool] = dist.is_initialized if dist.is_available() else lambda: False
"""Whether there may be other ranks: every step asks, since torch.distributed may be initialised later."""


class Search(EqualByState):
    """The search of one run, seen from one rank.

    Gradients are shared, so all ranks hold the same weights and make the same decisions. Buffers are averaged over
    ranks, because each rank's batch norms have seen other batches.

    Rounds count the optimizer's steps. If a step is left out, as a GradScaler does, or if the scheduler is stepped more
    often, as Accelerate does, only the schedule moves.

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
        bounds: what the rates never exceed.
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
        bounds: Bounds = NO_BOUNDS,
    ) -> None:
        self.rule = rule
        self.knobs = list(knobs)
        self.model = model
        self.rank_group = rank_group
        self.journal_writer = journal_writer
        self.losses = Losses()
        self.ranks = Ranks(rank_group, journal_writer, model)
        why = None if rule.searches and rule.long_enough else Reason.TOO_SHORT if rule.searches else Reason.NOT_SEARCHED
        self.memory = Memory(rule.begin(), lead=groups[0], stopped_for=why)
        self.written = Written()
        self.levels: list[dict[str, Any]] = []
        """What a OneCycle keeps in the optimizer's parameter groups, where a checkpoint may replace it."""
        self.is_just_loaded = False
        """Between loading a checkpoint and the next step."""
        self._rollback = rollback
        self._bounds = bounds
        self._is_bounded = bounds.lowest < math.inf
        self._has_journal = journal_writer.is_kept  # asked once: the end of a round without one does not enter it
        self._groups = list(groups)
        self._hook = StepHook()
        self._sampler = Sampler(groups, rule.constants)
        self._snapshots = Snapshots()
        self._is_finished = False
        self._has_asked = False
        """Whether the log has said that no loss was given."""
        self._lacks_tensors = False
        """Whether the search goes on from a checkpoint without what it held in tensors."""
        self._optimizer: Optimizer | None = None
        """The one that trains, once it is known."""

    # -- values -------------------------------------------------------------------------------------------------------

    @property
    def found(self) -> State:
        """The state of the rule."""
        return self.memory.found

    @property
    def total_steps(self) -> int | None:
        """The length of the run in steps; None: unknown."""
        return self.rule.total_steps

    @property
    def replica_index(self) -> ReplicaIndex:
        """This rank's place."""
        return self.rank_group.replica_index

    @property
    def holds_rise(self) -> bool:
        """Whether the schedule's rising phase is held at its peak, since the search climbs by itself."""
        return self.found.phase is not Phase.STOPPED

    def rates(self, schedule: Sequence[_Rate], t: int) -> list[_Rate]:
        """m r(t) times the schedule, within the bounds; each keeps its type.

        Until the schedule's peak r(t) grows, so that the rate climbs even if m stays (:meth:`State.rise`).
        """
        factor = self.found.factor(t, self.rule.constants)
        if not self._is_bounded:
            return [value * factor for value in schedule]
        factor = min(factor, self._bounds.factor(schedule, self.memory.peaks))
        return self._bounds.held([value * factor for value in schedule])

    base = rates
    """The rates of all ranks: they are equal."""

    def multipliers(self, t: int, replica_index: ReplicaIndex) -> list[float]:
        """A rank's rates over the base rates: 1."""
        return [1.0] * len(self.knobs)

    def held(self, rates: Sequence[_Rate]) -> list[_Rate]:
        """Rates of a checkpoint, which may have had other bounds."""
        factor = min(self._bounds.factor(rates), 1.0)
        return self._bounds.held([rate * factor for rate in rates])

    def grow(self, new: Collection[int], knobs: Sequence[str]) -> None:
        """Parameter groups were added to the optimizer: they have the common factor.

        Args:
            new: their numbers among all groups, which may move those of others.
            knobs: a name for each group, as they are now.
        """
        known = [g for g in range(len(knobs)) if g not in new]
        self._groups = [*(known[g] for g in self._groups), *new]
        self._sampler.measure.groups = list(self._groups)
        self.memory.lead = self._groups[0]
        if self.memory.peaks:
            self.memory.peaks = with_added(self.memory.peaks, dict.fromkeys(new, 0.0))
        self._bounds = self._bounds.grown(new)
        self.knobs = list(knobs)

    # -- a step -------------------------------------------------------------------------------------------------------

    def begin(self, optimizer: Optimizer) -> None:
        """The optimizer is known: no step has been made yet."""
        refuse_partitions(optimizer, _NOT_SEARCHED)  # DeepSpeed's, in place of the model's parameters
        self._optimizer = optimizer
        self._hook.begin(optimizer, self, Search._before_step)
        self._snapshots.watch(optimizer)
        self.ranks.begin(optimizer)

    def take_over(self) -> None:
        """Forget what was measured and kept: it belongs to another run or another scheduler, as in SequentialLR."""
        self._sampler.forget()
        self._snapshots = Snapshots()

    def observe(self, loss: float | Tensor) -> None:
        """Count a loss towards the round."""
        self.losses.add(loss, self._steps)

    @property
    def _steps(self) -> int:
        """Steps that the optimizer has made in this round."""
        return self._sampler.made - self._sampler.begun

    @property
    def _sampling(self) -> Sampling:
        """Steps are sampled until the schedule falls."""
        if self._is_finished or self.found.phase is Phase.STOPPED:
            return Sampling.NONE
        if self.found.phase is Phase.FIRST:
            return Sampling.FIRST
        return Sampling.NONE if self.memory.is_falling else Sampling.SOME

    def _before_step(self, optimizer: Optimizer) -> None:
        """The hook: a step is about to be made, or a further part of one that the optimizer makes in parts, as ZeRO."""
        self._snapshots.wait()
        if not stands_still(optimizer):  # a step at the rate 0, as torch.distributed.checkpoint makes, does not count
            if not self._sampler.is_heard:  # of several steps between two of the scheduler, the first
                self.written.hold(optimizer.param_groups, is_loaded=self.is_just_loaded)
            self._keep_start(optimizer)
            self._sampler.before_step(optimizer, self._sampling)

    def _keep_start(self, optimizer: Optimizer) -> None:
        if self._sampling is Sampling.FIRST and START not in self._snapshots.present(optimizer):
            self._snapshots.keep(START, optimizer, self.model)

    def step(
        self,
        optimizer: Optimizer,
        before: int,
        after: int,
        loss: float | Tensor | None,
        schedule: Callable[[int], list[float]],
        peak: Callable[[], float],
    ) -> None:
        """A step of training was made, and the schedule goes on. Collective if a round ends.

        Args:
            optimizer: the optimizer.
            before: the step at which it was made.
            after: the one to come.
            loss: of that step, if it is known.
            schedule: the plain schedule of each parameter group at a step.
            peak: the step at which its rising phase ends.
        """
        if self.rank_group.in_consensus:
            self.rank_group.check_step(before)  # raises
        if before == 0 and self.replica_index.replica == 0:
            warn_unless_by_steps()
        if loss is not None:
            self._take_loss(loss)
        if self.is_just_loaded:
            self._tell_what_is_missing(before)
        if _is_distributed():
            self.ranks.connect(optimizer, before)
        if not self.journal_writer.is_locked and self.replica_index.size == 1:
            self.journal_writer.lock(Solo(), writes=True)  # a group of one rank
        self._hook.inside = False
        self._snapshots.watch(optimizer)
        end_step(optimizer)  # tells several optimizers that hdet.auto sees as one, its parts
        self._is_finished = after >= (self.total_steps or math.inf)
        if after <= 0:  # SequentialLR sets the first rates
            self.take_over()
        elif self._hook.captured:
            if not self._sampler.is_heard:
                self._sampler.after_replay(optimizer, self._sampling)
            self._await_replay(optimizer)
        elif self._sampler.made == 0 and self._sampling is not Sampling.NONE:
            self._keep_start(optimizer)
            self._sampler.set_out(optimizer)  # weights that move from here on without a step are moved by a graph
        self._sampler.is_heard = False
        if self._round_ends(after):
            self._end_round(optimizer, (before, after), schedule, peak())

    def _take_loss(self, loss: float | Tensor) -> None:
        """Add the loss of the last step, which was counted already, unless it was replayed from a graph.

        Accelerate gives it once for each process. If the round has ended in between, it does not count for the next.
        """
        steps, is_heard = self._steps, self._sampler.is_heard
        is_replayed = self._hook.captured and not is_heard
        if is_replayed or is_heard or steps > 0 or self._sampler.made == 0:
            self.losses.add(loss, max(steps - (not is_replayed), 0))

    def _await_replay(self, optimizer: Optimizer) -> None:
        """Prepare for a step that is replayed from a graph: no hook is called before it."""
        self._snapshots.wait()
        self._keep_start(optimizer)
        self._sampler.await_replay(optimizer, self._sampling)

    # -- the end of a round -------------------------------------------------------------------------------------------

    def _round_ends(self, t: int) -> bool:
        """Whether a round ends: by the optimizer's steps, at the schedule's last two, and at the first ones."""
        last = self.total_steps
        if last is not None and last - 1 <= t:
            return 0 < t <= last
        made, begun = self._sampler.made, self._sampler.begun
        if made == begun:
            return made == 0 and t > 0
        return self.found.phase is Phase.FIRST or made >= next_end(begun, self.rule.constants)

    def _end_round(
        self, optimizer: Optimizer, span: tuple[int, int], schedule: Callable[[int], list[float]], peak: float
    ) -> None:
        """Gather, decide, act, and report.

        Cost: one synchronisation of host and device, two small gathers; with buffers a third, and an all-reduce of
        those.
        """
        began, memory, journal = time.perf_counter(), self.memory, self.journal_writer
        then, now = schedule(span[0]), schedule(span[1])
        rates = self.rates(then, span[0])
        is_alone = not _is_distributed() or self.rank_group.group.replica_index.size == 1
        # arriving: the error of a failed collective names the ranks that are missing
        with nullcontext() if is_alone else arriving(f"the end of a round, at step {span[1]}"):
            evidence, writes = self._gather(optimizer, span, is_alone)
        gathered = time.perf_counter()
        sign = direction([optimizer.param_groups[g] for g in self._groups])
        evidence, progress = self._take_in(evidence, sign, then, now, peak)
        decision = self._decide(optimizer, evidence, now)
        has_peaked = memory.has_peaked or span[1] >= peak
        peaks_now, memory.has_peaked = has_peaked and not memory.has_peaked, has_peaked
        memory.is_falling = evidence.shape < self.rule.constants.fall_start
        self._act(decision, evidence, progress, optimizer)
        ends = span[1] == self.total_steps
        memory.rests = memory.is_bound or (ends if self.total_steps else has_peaked and memory.quiet >= _QUIET)
        self.losses.reset()
        if writes:
            # named as in the journal of a replica ensemble: its controller decides, here the rule does
            seconds = {"gather": gathered - began, "controller": time.perf_counter() - gathered}
            now = schedule(span[1])  # another one, if the search has stopped
            both = (rates, self.rates(now, span[1])), (then, now)
            record = reporting.record_of(memory, evidence, decision, *both, seconds)
            journal.write({**record, "total_steps": self.total_steps}, self.knobs, began)
        if ends and self._has_journal:
            journal.close()
        memory.rounds += 1
        if decision.why is not None or decision.rolled_back_to is not None or not memory.has_losses:
            self._warn_of(decision, span[1])
        self._tell(span[1], sign, ends=ends, peaks_now=peaks_now)
        if self._has_journal:
            journal.begin_round()

    def _gather(self, optimizer: Optimizer, span: tuple[int, int], is_alone: bool) -> tuple[Evidence, bool]:
        """Read everything off the device at once, and gather it from all ranks. Collective.

        Returns:
            what all ranks have seen, and whether this rank writes the journal.
        """
        measure = None if self._sampling is Sampling.NONE else self._sampler.measure
        if not is_alone:
            self.ranks.average_buffers(span[0], Occasion.BUFFERS)  # before snapshots are made: all ranks' are equal
        weights, steps = NO_WEIGHTS._replace(parameters=trained_parameters(optimizer)), self._steps
        buffers = self.ranks.buffers if self.model is not None else []
        own = read(
            {
                "finite": [weights.all_finite().float()],
                "nan": [buffer.isnan().any().float() for buffer in buffers],
                "measured": measure.scalars(optimizer) if measure is not None else [],
                "losses": self.losses.on_device(),
                "fingerprints": [] if is_alone else fingerprints_of(weights, expect_equal=True),
            }
        )
        losses = self.losses.read(own["losses"])
        row: dict[str, list[float]] = {
            "sound": [not any(own["nan"])],
            "table": table_of(losses, steps),
            "mean": [mean_of([loss for _, loss in losses])],
            "measured": measure.row(own["measured"]) if measure is not None else [],
        }
        rows, is_finite, writes = [row], bool(own["finite"][0]), self._has_journal and self.journal_writer.is_kept
        if not is_alone:
            rows, agreed = self.ranks.exchange(span, weights, row, [*own["finite"], *own["fingerprints"]])
            is_finite, writes = all(agreed.finite), agreed.writer == self.rank_group.group.rank
        blocks = merged([one["table"] for one in rows], steps)
        evidence = Evidence(
            span=span,
            steps=steps,
            blocks=blocks,
            measured=measure.measured([one["measured"] for one in rows]) if measure is not None else Measured(),
            is_finite=is_finite and all(one["sound"][0] for one in rows),
            losses=tuple([one["mean"][0] for one in rows]) if blocks else (),
        )
        return evidence, writes

    def _take_in(
        self, seen: Evidence, sign: float, then: Sequence[float], now: Sequence[float], peak: float
    ) -> tuple[Evidence, Progress]:
        """What the rule gets to know, and the losses so far with those of this round.

        Args:
            seen: what all ranks have seen.
            sign: what losses are multiplied by, so that lower is better: -1 for ``maximize=True``.
            then, now: the schedule at the step that was just made, and at the one to come.
            peak: the step at which its rising phase ends.
        """
        memory, measured, end = self.memory, seen.measured, seen.span[1]
        if seen.steps == 0 and measured.moved > 0:  # a graph was captured before the hook was set
            self._hook.captured = True
            self._sampler.measure.begin_path()
        blocks = memory.signed(seen.blocks, measured.gradients, sign)
        progress = memory.progress.after(blocks, end) if memory.has_losses else memory.progress
        evidence = seen._replace(
            blocks=blocks,
            peak=peak,
            shape=memory.shape(then, now, climbs=end <= peak),
            measured=measured._replace(
                moved=measured.moved if seen.is_finite else math.inf,
                gradients=() if measured.is_broken else measured.gradients,
            ),
            log_guess=math.log(then[memory.lead]) if then[memory.lead] > 0 else 0.0,
            estimated_log_factor=_log_ratio(measured.estimated_rate, then[memory.lead]),
            made=self._sampler.made,
            has_losses=memory.has_losses,
            has_fallen=progress.is_below,
            has_gained=progress.has_gained,
            undone=progress.undone,
        )
        return evidence, progress

    def _decide(self, optimizer: Optimizer, evidence: Evidence, schedule: Sequence[float]) -> Decision:
        """Ask the rule, within the bounds that the user gave."""
        known = self.rule.remembering(self.found, self._snapshots.present(optimizer))
        if not self._is_bounded:
            self.memory.is_bound = False  # in a checkpoint it may have been
            return self.rule.after_round(known, evidence)
        most = self._bounds.factor(schedule, self.memory.peaks)
        decision = self.rule.after_round(bounded(known, most), evidence._replace(highest=math.log(most)))
        decision = decision._replace(state=bounded(decision.state, most))
        self.memory.is_bound = is_bound(decision.state, most)
        return decision

    def _act(self, decision: Decision, evidence: Evidence, progress: Progress, optimizer: Optimizer) -> None:
        """Do with the weights what was decided, remember it, and begin the next round."""
        slot = decision.slot
        if decision.action is Action.KEEP and slot is not None and self._rollback and not self._is_finished:
            self._snapshots.keep(slot, optimizer, self.model)
        elif decision.action is Action.ROLL_BACK and slot is not None:
            self._snapshots.roll_back_(slot, optimizer, self.model)
        elif decision.action is Action.RESTART:
            self._snapshots.roll_back_(START, optimizer, self.model)
        elif decision.action is Action.GO_ON and not evidence.is_finite:
            raise DivergedError(
                f"the weights are NaN or infinite at step {evidence.span[1]}, and there is no snapshot to roll back "
                f"to; load an earlier checkpoint{'' if self._rollback else ', or leave rollback=False out'}"
            )
        self.memory.note(decision, evidence, progress)
        kept = set() if self._is_finished else {one.slot for one in self.found.snapshots}
        self._snapshots.keep_only(kept | {START} if self.found.phase is Phase.FIRST else kept)
        self._sampler.begun = self._sampler.made
        self._sampler.measure.begin_round()
        if decision.resets_path or evidence.measured.is_broken or self._sampling is Sampling.NONE:
            self._sampler.measure.begin_path()
        if self._hook.captured:
            self._await_replay(optimizer)

    def _warn_of(self, decision: Decision, t: int) -> None:
        """Warn of what was decided, and log once that there are no losses; on the first rank."""
        if self.replica_index.replica != 0:
            return
        reporting.warn_of(decision, t)
        is_time = self.found.phase is Phase.SEARCHING and self._sampler.made > self.rule.constants.min_round
        is_told = decision.why is not None or decision.rolled_back_to is not None
        if is_time and not (self.memory.has_losses or is_told or self._has_asked):
            self._has_asked = True
            reporting.log_missing_losses(t)

    def _tell(self, t: int, sign: float, *, ends: bool, peaks_now: bool) -> None:
        """Report, if the rate has settled, if the schedule has just reached its peak, or if the run ends."""
        memory = self.memory
        settles = not memory.has_settled and memory.status[0] == "settled"
        memory.has_settled |= settles
        if not (ends or peaks_now or settles) or self.replica_index.replica != 0:
            return
        told = memory.told
        if (ends or peaks_now) and self.rule.searches and memory.progress.is_known:
            reporting.warn_of_losses(memory.progress, t, sign, ends=ends)
        if ends and self.holds_rise:
            # a schedule of the user's own has no peak to be given
            reporting.log_end(told, has_peak="schedule" not in self.journal_writer.arguments)
        elif settles:
            reporting.log_settled(told, t)

    def _tell_what_is_missing(self, t: int) -> None:
        """At the first step since a checkpoint was loaded: by now all of it is."""
        lacks_tensors, self.is_just_loaded, self._lacks_tensors = self._lacks_tensors, False, False
        if lacks_tensors and t < (self.total_steps or math.inf) and self.replica_index.replica == 0:
            reporting.warn(reporting.resumed_words(t, is_falling=self.memory.is_falling), ResumeWarning)

    # -- the other ranks ----------------------------------------------------------------------------------------------

    def converge(self, optimizer: Optimizer, t: int) -> None:
        """Average the buffers now, and nothing else: weights are equal already. Collective."""
        self.ranks.connect(optimizer, t)
        self.ranks.average_buffers(t, Occasion.CONVERGE)

    def consensus(self, optimizer: Optimizer, t: int) -> AbstractContextManager[None]:
        """Inside, buffers are averaged; afterwards they are this rank's own again. Collective."""
        return self.ranks.consensus(optimizer, t)

    # -- checkpoints, and runs whose length changes -------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Plain numbers, lists and strings; the same on every rank, with keys that never change."""
        counts = {"made": self._sampler.made, "begun": self._sampler.begun}
        envelope = run_state(KIND, self.knobs, [0.0] * len(self.knobs))
        return {**envelope, "searches": self.rule.searches, **self.memory.saved(), **counts}

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise unless :meth:`load` can go on from it. Changes nothing."""
        check_run(state, KIND, self.knobs)
        with reading(STATE_WORDS):
            _read(state)

    @staticmethod
    def found_in(state: Mapping[str, Any]) -> Found:
        """What was found, in a state that :meth:`check` accepts."""
        return _read(state)[0].told

    def load(self, state: Mapping[str, Any], total_steps: int | None, t: int) -> None:
        """Go on at step ``t`` from a state that :meth:`check` accepts.

        Without :meth:`load_tensors` a new path begins, and there is no snapshot yet.
        """
        memory, searches, made, begun = _read(state)
        self.rule = dataclasses.replace(self.rule, total_steps=total_steps, searches=searches)
        self.take_over()
        self.memory, self._sampler.made, self._sampler.begun = memory, made, begun
        self.memory.lead = self._groups[0]
        self._lacks_tensors = self.found.phase is Phase.SEARCHING
        self._resume(t, state)

    def adopt(self, total_steps: int, t: int) -> None:
        """Go on from a checkpoint of torch's own scheduler: from its rate, without a search."""
        self.rule = dataclasses.replace(self.rule, total_steps=total_steps)
        if t > 0:
            self.memory.found, self.memory.stopped_for = self.rule.stopped(), Reason.ADOPTED
        self._resume(t, {})

    def finish(self, optimizer: Optimizer, t: int, steps: int, share: float) -> None:
        """The schedule falls from ``t`` on, over ``steps`` steps, and from the rate as it is. Collective.

        ``share``: the schedule over its peak, if it rises. Raises if ranks disagree, before anything is changed.
        """
        self.ranks.agree_to_finish(optimizer, t, steps)
        self.replan(t + steps, t - 1, share * self.found.rise(t, self.rule.constants))

    def replan(self, total_steps: int | None, peak: float, share: float = 1.0) -> None:
        """The run has another length, and its schedule another peak; see :meth:`State.peaking`."""
        self.rule = dataclasses.replace(self.rule, total_steps=total_steps)
        self.memory.found = self.found.peaking(peak, share)

    def _resume(self, t: int, state: Mapping[str, Any]) -> None:
        """A checkpoint has set the counter to ``t``. The losses of the round so far are not in it."""
        self.losses.reset()
        self.rank_group.resume({**state, "rollback": self._rollback, "highest": self._bounds.lowest})
        self.is_just_loaded, self._is_finished = True, False
        self.journal_writer.resume(t, mid_round=self._steps > 0)

    def tensors(self, optimizer: Optimizer, t: int) -> dict[str, Any]:
        """What the search holds in tensors at step ``t``, and this rank's losses of the round so far."""
        return {
            "version": STATE_VERSION,
            "step": t,
            "losses": [self.losses.saved()],
            "kept": plain(self.found.snapshots),
            "measure": self._sampler.measure.saved(optimizer),
            "snapshots": self._snapshots.saved(optimizer),
        }

    def load_tensors(self, search: Mapping[str, Any], optimizer: Optimizer, t: int) -> None:
        """Go on with :meth:`tensors`, after :meth:`load`. Checks everything before it changes anything."""
        with reading("the state of a search", _FIRST):
            version, step = search["version"], search["step"]
            if (version, step) != (STATE_VERSION, t):
                raise ValueError(f"it is of version {version} at step {step}, the scheduler {STATE_VERSION} at {t}")
            losses = Losses.loaded(rows_of(search["losses"], self.replica_index))
            kept = tuple(Snapshot(int(made), int(slot)) for made, slot in search["kept"])
            measure = Measure.loaded(search["measure"], self._groups, optimizer)
            snapshots = Snapshots.loaded(search["snapshots"], optimizer)
        self.losses, self._sampler.measure, self._snapshots = losses, measure, snapshots
        self.memory.found = self.found._replace(snapshots=kept)
        self._lacks_tensors = False

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and deepcopy: a copy has other tensors, so what is kept of them goes by their parameters' places.

        The copy of the optimizer has no hooks.
        """
        state, optimizer = {**vars(self), "_hook": StepHook()}, self._optimizer
        if optimizer is None:
            return state
        return {
            **state,
            "_snapshots": self._snapshots.saved(optimizer),
            "measure": self._sampler.measure.saved(optimizer),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        optimizer, measure = state["_optimizer"], state.pop("measure", None)
        vars(self).update(state)
        if optimizer is not None:
            self._snapshots = Snapshots.loaded(state["_snapshots"], optimizer)
            self._sampler.measure = Measure.loaded(measure, self._groups, optimizer)
            self._hook.begin(optimizer, self, Search._before_step)
            self._snapshots.watch(optimizer)


def _read(state: Mapping[str, Any]) -> tuple[Memory, bool, int, int]:
    """What is remembered, whether it searches, and the steps made: in all, and before this round."""
    return Memory.loaded(state), bool(state["searches"]), int(state["made"]), int(state["begun"])


def _log_ratio(rate: float, guess: float) -> float:
    """log m of an estimated rate; -inf if that is 0."""
    return math.log(rate / guess) if rate > 0 and guess > 0 else -math.inf
