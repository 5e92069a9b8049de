"""The search: one model trains, and its learning rate is found meanwhile. The file to read first.

A hook sees every step of the optimizer before it is made, and samples its gradients (:mod:`hdet.auto.measure`). Where a
round ends, the ranks show each other what they have seen, the rule decides (:mod:`hdet.auto.rule`), and its decision is
carried out on the weights (:mod:`hdet.rollback.snapshots`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.algorithm.knob import KnobSpec
from hdet.auto.hooks import StepHook
from hdet.auto.measure import Measure, Measured
from hdet.auto.rounds import is_sampled, next_end
from hdet.auto.rule import Action, Decision, Evidence, Phase, Rule, Snapshot
from hdet.auto.saving import check_saved, loaded, saved
from hdet.auto.telling import NO_LOSSES, record_of, warning_of
from hdet.copies import copies_of
from hdet.distributed.average import average_
from hdet.distributed.group import ReplicaGroup, Seat, arriving
from hdet.distributed.host import to_host
from hdet.distributed.meeting import Meeting
from hdet.distributed.partitions import is_continued, refresh, refuse_partitions
from hdet.distributed.resharding import reshard, reshard_all
from hdet.distributed.rollcall import Occasion, RollCall, Shown, fingerprints_of
from hdet.distributed.weights import NO_WEIGHTS, Body, Weights, nan_buffers
from hdet.engine.checkpoint import STATE_WORDS
from hdet.engine.clock import Clock
from hdet.engine.way import RoundEnd, RoundReport, terms
from hdet.errors import DisagreementError, DivergedError
from hdet.parameters import direction, trained_parameters
from hdet.rates import Rate, stands_still
from hdet.rollback.losses import merged
from hdet.rollback.ruin import BLOCKS, Block, Course
from hdet.rollback.snapshots import START, Snapshots
from hdet.state_rules import check_state, count, flag, number, pairs

__all__ = ["Search"]

_NOT_SEARCHED = (
    "what is written into them does not reach the model. Leave lr_scheduler out of deepspeed.initialize, and call "
    "hdet.integrations.deepspeed.auto(engine, total_steps=...) after it"
)
_TABLE = 2 * BLOCKS
"""Numbers of a table of losses."""


class _Gathered(NamedTuple):
    """What the ranks have shown each other at the end of a round; equal on all of them."""

    roll: RollCall
    sound: bool
    """Whether all weights are finite, and no buffer is NaN."""
    blocks: tuple[Block, ...]
    """The losses."""
    measured: Measured


class Search:
    """The search of one run, seen from one rank.

    Gradients are shared, so all ranks hold the same weights, and decide alike. Buffers are averaged over ranks: each
    rank's batch norms have seen other batches.

    Rounds count the optimizer's steps. Where a step is left out, as a GradScaler does, and where the scheduler is
    stepped more often, as Accelerate does, only the schedule moves.

    Memory while it searches: the origin and the sum of gradients in fp32, a snapshot on the device and one on the host.

    Args:
        rule: what is decided.
        specs: a knob for each parameter group: its rate.
        groups: numbers of the parameter groups whose rate is searched; others are left alone.
        model: its buffers are averaged, and go back with the weights; FSDP2's modules are told of written shards.
        go_back: whether snapshots are kept to go back to.
    """

    name: Literal["search"] = "search"

    def __init__(
        self,
        rule: Rule,
        specs: Sequence[KnobSpec],
        groups: Collection[int],
        model: nn.Module | None,
        *,
        go_back: bool = True,
    ) -> None:
        self.rule = rule
        self.found = rule.begin()
        """What was found so far."""
        self.specs = list(specs)
        self.model = model
        self.go_back = go_back
        self._body = Body(model)
        self._groups = set(groups)
        self._hook = StepHook()
        self._measure = Measure(groups)
        self._snapshots = Snapshots()
        self._sampled_last = False
        """Whether the step that was seen last was sampled."""
        self._made = 0
        """Steps that the optimizer has made ..."""
        self._begun = 0
        """... and had made when this round began."""
        self._ended = 0
        """Rounds that have ended."""
        self._highest = 0.0
        """The schedule's highest value so far, of the leading group."""
        self._falling = False
        """Whether the schedule has fallen so far that nothing is raised any more."""
        self._finished = False
        self._has_losses = False
        """Whether a loss was given in any round. If not, gradients are judged in their place."""
        self._has_told = False
        """Whether people know that no loss was given."""
        self._awaits_replay = False
        self._weights_before: list[Tensor] = []
        """Of the step to come, where it is replayed from a graph and sampled afterwards."""
        self._begins_anew = False
        """Whether the search goes on from a checkpoint without what it held in tensors."""

    # -- values -------------------------------------------------------------------------------------------------------

    @property
    def total_steps(self) -> int | None:
        return self.rule.total_steps

    @property
    def learned(self) -> list[float]:
        return [self.found.found] * len(self.specs)

    @property
    def holds_rise(self) -> bool:
        return self.found.phase is not Phase.KEPT

    @property
    def drifts_apart(self) -> bool:
        return bool(self._body.buffers())

    def base(self, schedule: Sequence[Rate], t: int) -> list[Rate]:
        """m r(t) times the schedule."""
        factor = self.found.factor(t, self.rule.constants)
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
            [self.name, self.rule.searches, self.go_back],
            controller=None,
            total_steps=self.total_steps,
            sync_every=None,
            seed=0,
            start=None,
        )

    def grow(self, more: Sequence[KnobSpec]) -> None:
        """Further groups have the common factor."""
        self._groups |= set(range(len(self.specs), len(self.specs) + len(more)))
        self._measure.groups = set(self._groups)
        self.specs += more

    # -- before and after a step --------------------------------------------------------------------------------------

    def begin(self, optimizer: Optimizer) -> None:
        refuse_partitions(optimizer, _NOT_SEARCHED)
        self._body.remember(optimizer)
        self._body.set_aside(nan_buffers(self.model))  # what was never a number does not become none
        self._hook.begin(optimizer, self, Search._before_step)

    def take_over(self) -> None:
        """What was measured and kept so far belongs to another run or another scheduler."""
        self._measure = Measure(self._groups)
        self._snapshots = Snapshots()
        self._made = self._begun = 0
        self._awaits_replay = False

    @property
    def _looks(self) -> bool:
        """Whether steps are of interest: the first one, and all until the schedule falls."""
        phase = self.found.phase
        return not self._finished and (phase is Phase.FIRST or (phase is Phase.SEARCHING and not self._falling))

    @property
    def progress(self) -> int:
        """Steps of the round so far."""
        return self._made - self._begun

    @property
    def _samples(self) -> bool:
        """Whether the gradient of the step to come is sampled."""
        constants = self.rule.constants
        length = next_end(self._begun, constants) - self._begun
        return is_sampled(self.progress, length, constants)

    def _before_step(self, optimizer: Optimizer) -> None:
        """The hook: a step is about to be made, or a further part of one."""
        self._snapshots.wait()
        if stands_still(optimizer):
            return
        if is_continued(optimizer):
            if self._looks and self._sampled_last:
                (self._measure.look_part if self.found.phase is Phase.FIRST else self._measure.sample_part)(optimizer)
            return
        if self._looks:
            self._see(optimizer)
        self._made += 1

    def _set_out(self, optimizer: Optimizer) -> None:
        """Before a step: where it begins is remembered. Layers may have been frozen or thawed since."""
        if self._measure.begins_here(optimizer):
            self._measure.begin_anew()
        if self.found.phase is Phase.FIRST and START not in self._snapshots.present(optimizer):
            self._snapshots.keep(START, optimizer, self.model)
        self._measure.set_origin(optimizer)

    def _see(self, optimizer: Optimizer, weights: Sequence[Tensor] = ()) -> None:
        """Look at the gradients of a step. ``weights``: at which they were taken, if not those of now."""
        self._sampled_last = self.found.phase is Phase.FIRST or self._samples
        if not self._sampled_last:
            self._measure.pass_by(optimizer)
            return
        self._set_out(optimizer)
        if self.found.phase is Phase.FIRST:
            self._measure.look(optimizer)
        else:
            self._measure.sample(optimizer, weights)

    def after_step(self, optimizer: Optimizer, t: int, meeting: Meeting) -> None:
        """The schedule goes to ``t``."""
        self._hook.begin(optimizer, self, Search._before_step)  # a copy has no hook yet
        self._hook.step_is_over()
        self._finished = t >= (self.total_steps or math.inf)
        if t <= 0:  # SequentialLR sets the first rates
            self.take_over()
        elif self._hook.captured:
            self._after_replay(optimizer)
        elif self._looks and self._made == 0:
            self._set_out(optimizer)  # weights that move from here on without a step are moved by a graph

    def _after_replay(self, optimizer: Optimizer) -> None:
        """A step was replayed from a graph, and nobody was told: its gradients are still there."""
        if self._looks and self._awaits_replay:
            self._see(optimizer, self._weights_before)
        self._made += 1
        self._await_replay(optimizer)

    def _await_replay(self, optimizer: Optimizer) -> None:
        """Remember what the next step begins from."""
        self._awaits_replay, self._weights_before = self._looks, []
        if self._looks:
            self._set_out(optimizer)
            if self.found.phase is Phase.SEARCHING and self._samples:
                self._weights_before = copies_of(self._measure.searched(optimizer))

    # -- the end of a round -------------------------------------------------------------------------------------------

    def round_ends(self, t: int) -> bool:
        """By the optimizer's steps; the schedule's last two steps end rounds too, and each until a first was made."""
        last = self.total_steps
        if last is not None and last - 1 <= t:
            return 0 < t <= last
        return self._made >= next_end(self._begun, self.rule.constants) or (self._made == 0 and t > 0)

    def inside_round(self, t: int) -> bool:
        return self.progress > 0

    def end_round(self, end: RoundEnd, meeting: Meeting) -> RoundReport:
        """Show and see, decide, act.

        Cost: one synchronisation of host and device, two small gathers; with buffers a third, and an all-reduce of
        those.
        """
        clock, before, then = Clock(), self.found, end.schedule(end.before)
        if meeting.group.seat.size > 1 and self.drifts_apart:  # before snapshots are made: all ranks' are equal
            self.converge(end.optimizer, end.before, meeting, Occasion.BUFFERS)
        gathered = self._gather(end, meeting)
        clock.lap("gather")
        evidence = self._evidence(end, gathered)
        present = self._snapshots.present(end.optimizer)
        decision = self.rule.after_round(self.rule.remembering(self.found, present), evidence)
        self._falling = evidence.shape < self.rule.constants.falling
        self._act(decision, end, gathered)
        clock.lap("controller")
        record = None
        if gathered.roll.writer == meeting.group.rank:
            record = record_of(self._ended, end, gathered.roll, evidence, before, then, decision, self._lead, clock)
        self._ended += 1
        return RoundReport(record, warning_of(decision, end.after) or self._missing_losses(end.after))

    @property
    def _lead(self) -> int:
        """The group whose rate stands for all."""
        return min(self._groups)

    def _gather(self, end: RoundEnd, meeting: Meeting) -> _Gathered:
        """What all ranks have seen. Collective."""
        group, optimizer, alone = meeting.group, end.optimizer, meeting.group.seat.size == 1
        weights = _what_trains(optimizer)
        finite, buffers = weights.all_finite().float(), self._no_buffer_is_nan(weights.device).float()
        bits = [] if alone else fingerprints_of(weights, expect_equal=True)
        scalars = self._measure.scalars(optimizer) if self._looks else []
        values = to_host([finite, buffers, *scalars, *end.losses.on_device(), *bits])
        head = [values[0], *(values[-2:] if bits else (0, 0))]
        sound, own = values[1], values[2 : 2 + len(scalars)]
        end.losses.take(values[2 + len(scalars) : len(values) - len(bits)])
        roll = RollCall.alone()._replace(finite=[bool(head[0])])
        with arriving(f"the end of a round, at step {end.after}"):
            if not alone or end.keeps_journal:
                shown = Shown(journal=end.keeps_journal)
                terms = self.terms()
                roll = meeting.roll_call(
                    Occasion.ROUND_END, end.before, terms, weights, shown, expect_equal=True, values=head
                )
            if not roll.moving_equal and all(roll.finite):
                raise DisagreementError(
                    f"the ranks hold different weights at step {end.after}, but a search is for one model: wrap it in "
                    "DistributedDataParallel, shard it over a mesh of all ranks, or give a number as max_lr, with "
                    "which replicas may differ"
                )
            row = [sound, *end.losses.table(self.progress), end.losses.mean(), *self._measure.row(own)]
            rows = group.gather(row, weights.device)
        tables, losses = [row[1 : 1 + _TABLE] for row in rows], [row[1 + _TABLE] for row in rows]
        measured = self._measure.measured([row[2 + _TABLE :] for row in rows]) if scalars else Measured()
        given = any(number for table in tables for number in table[::2])
        roll = roll._replace(losses=losses, signals=losses, has_losses=given)
        is_sound = all(roll.finite) and all(row[0] for row in rows)
        return _Gathered(roll, is_sound, merged(tables, self.progress), measured)

    def _no_buffer_is_nan(self, device: torch.device) -> Tensor:
        found = [~buffer.isnan().any().to(device) for buffer in self._body.buffers()]
        return torch.stack(found).all() if found else torch.ones((), dtype=torch.bool, device=device)

    def _evidence(self, end: RoundEnd, gathered: _Gathered) -> Evidence:
        measured = gathered.measured
        if self.progress == 0 and measured.moved > 0:  # a graph was captured before anybody watched
            self._hook.captured = True
            self._measure.begin_anew()
        return Evidence(
            span=(end.before, end.after),
            steps=self.progress,
            blocks=self._judged(gathered, end.optimizer),
            peak=end.peak(),
            shape=self._shape(end),
            moved=measured.moved if gathered.sound else math.inf,
            reach=_level(measured.reach, end.schedule(end.before)[self._lead]),
            straightness=measured.straightness,
            gradients=() if measured.lost else measured.gradients,
            rates=measured.rates,
            stretch=measured.stretch,
            made=self._made,
        )

    def _judged(self, gathered: _Gathered, optimizer: Optimizer) -> tuple[Block, ...]:
        """The losses, lower is better; where none is ever given, the logarithms of the gradients' sizes."""
        sign = direction(optimizer.param_groups[g] for g in self._groups)
        if gathered.blocks and not self._has_losses:
            self._has_losses = True
            self.found = self.found._replace(course=Course())  # gradients were judged until now
        if self._has_losses:
            return tuple(Block(sign * mean, steps) for mean, steps in gathered.blocks) if sign else ()
        sizes = gathered.measured.gradients if self.found.phase is Phase.SEARCHING else ()
        return tuple(Block(math.log(size) if 0 < size < math.inf else math.nan, 1) for size in sizes if size != 0)

    def _shape(self, end: RoundEnd) -> float:
        """The schedule of the leading group, relative to its highest value so far; 1 until the climb ends."""
        before, now = end.schedule(end.before)[self._lead], end.schedule(end.after)[self._lead]
        self._highest = max(self._highest, before, now)
        climbs = end.after <= end.peak()  # also where a schedule falls from its first step on
        return 1.0 if climbs or not self._highest else now / self._highest

    def _act(self, decision: Decision, end: RoundEnd, gathered: _Gathered) -> None:
        """Do with the weights what was decided, and begin the next round."""
        optimizer, slot = end.optimizer, decision.slot
        if decision.action is Action.KEEP and slot is not None and self.go_back and not self._finished:
            self._snapshots.keep(slot, optimizer, self.model)
        elif decision.action is Action.ROLL_BACK and slot is not None:
            self._restore(slot, optimizer)
        elif decision.action is Action.RESTART:
            self._restore(START, optimizer)
        elif decision.action is Action.GO_ON and not gathered.sound:
            raise DivergedError(
                f"the weights are not finite at step {end.after}, and none are kept to go back to; load an earlier "
                f"checkpoint{'' if self.go_back else ', or leave go_back=False out'}"
            )
        self.found = decision.state
        kept = set() if self._finished else {one.slot for one in self.found.snapshots}
        self._snapshots.keep_only(kept | {START} if self.found.phase is Phase.FIRST else kept)
        self._begun = self._made
        self._measure.begin_round()
        if decision.anew or gathered.measured.lost or not self._looks:
            self._measure.begin_anew()
        if self._hook.captured:
            self._snapshots.wait()  # nobody will call us before the next step
            self._await_replay(optimizer)

    def _restore(self, slot: int, optimizer: Optimizer) -> None:
        self._snapshots.restore_(slot, optimizer, self.model)
        refresh(optimizer)
        if self.model is None:
            reshard_all()
        else:
            reshard(self.model)

    def _missing_losses(self, t: int) -> str | None:
        """Said once, where the search goes on without a loss."""
        if self._has_losses or self._has_told or self.found.phase is not Phase.SEARCHING or self._ended < 2:
            return None
        self._has_told = True
        return NO_LOSSES.format(step=t)

    # -- meeting the other ranks --------------------------------------------------------------------------------------

    def first_weights(self, optimizer: Optimizer) -> Weights:
        self._body.first_weights(optimizer, needs_model=False)  # raises for what cannot be trained so
        return _what_trains(optimizer)._replace(buffers=self._body.buffers())

    def met(self, group: ReplicaGroup, roll: RollCall) -> None:
        """Nothing is to be made ready."""

    def weights(self, optimizer: Optimizer) -> Weights:
        """Buffers, which may differ between ranks until DDP's next forward pass. What trains is equal."""
        return NO_WEIGHTS._replace(buffers=self._body.buffers())

    def converge(self, optimizer: Optimizer, t: int, meeting: Meeting, occasion: Occasion) -> None:
        """Average the buffers, where they differ. A rank whose buffers are not finite gets the others' mean."""
        group, weights = meeting.group, self.weights(optimizer)
        with arriving(f"averaging the buffers at step {t}"):
            roll = meeting.roll_call(occasion, t, self.terms(), weights, Shown(), expect_equal=True)
            if any(roll.finite) and not roll.moving_equal:
                average_(weights.buffers, group, roll.finite)

    # -- state --------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        return {
            "searches": self.rule.searches,
            "search": saved(self.found),
            "made": self._made,
            "begun": self._begun,
            "ended": self._ended,
            "highest": self._highest,
            "falling": self._falling,
            "has_losses": self._has_losses,
        }

    def tensors(self) -> list[list[Tensor]]:
        return []

    def check(self, state: Mapping[str, Any], tensors: Sequence[Sequence[Tensor]], total_steps: int | None) -> None:
        counts = dict.fromkeys(("made", "begun", "ended"), count(0))
        flags = dict.fromkeys(("searches", "falling", "has_losses"), flag)
        check_state(state, {**flags, "search": pairs, **counts, "highest": number}, STATE_WORDS)
        check_saved(state["search"])

    def load(self, state: Mapping[str, Any], tensors: Sequence[Sequence[Tensor]], total_steps: int | None) -> None:
        """Without :meth:`load_search`: on from an origin of its own, and there is nothing to go back to yet."""
        found = loaded(state["search"])
        self.rule = dataclasses.replace(self.rule, total_steps=total_steps, searches=state["searches"])
        self.take_over()
        self.found, self._begins_anew = found, found.phase is Phase.SEARCHING
        self._made, self._begun, self._ended = state["made"], state["begun"], state["ended"]
        self._highest, self._falling, self._has_losses = state["highest"], state["falling"], state["has_losses"]

    def search(self, optimizer: Optimizer) -> dict[str, Any]:
        return {
            "kept": [list(one) for one in self.found.snapshots],
            "measure": self._measure.saved(optimizer),
            "snapshots": self._snapshots.saved(optimizer),
        }

    def check_search(self, search: Mapping[str, Any], optimizer: Optimizer) -> None:
        """By reading it as a load does, and forgetting it."""
        self._read(search, optimizer)

    def load_search(self, search: Mapping[str, Any], optimizer: Optimizer) -> None:
        kept, self._measure, self._snapshots = self._read(search, optimizer)
        self.found = self.found._replace(snapshots=kept)
        self._begins_anew = False

    def _read(self, search: Mapping[str, Any], optimizer: Optimizer) -> tuple[tuple[Snapshot, ...], Measure, Snapshots]:
        kept = tuple(Snapshot(int(step), int(slot)) for step, slot in search["kept"])
        measure = Measure.loaded(search["measure"], self._groups, optimizer)
        return kept, measure, Snapshots.loaded(search["snapshots"], optimizer)

    def lost(self, t: int, seat: Seat) -> str | None:
        """A search that goes on: its snapshots and what was measured, unless they were loaded too."""
        begins_anew, self._begins_anew = self._begins_anew, False
        if not begins_anew or t >= (self.total_steps or math.inf):
            return None
        lost = "the weights to go back to" + ("" if self._falling else ", the way measured so far")
        return (
            f"resumed at step {t} with the rate found so far, but without {lost}: the rounds from here on make them "
            "anew; hdet.save keeps them, or search_state_dict() beside state_dict()"
        )

    def adopt(self, total_steps: int, t: int) -> None:
        """From the rate of torch's checkpoint, without a search."""
        self.rule = dataclasses.replace(self.rule, total_steps=total_steps)
        if t > 0:
            self.found = self.rule.kept()

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and deepcopy: a copy has other tensors, so what was measured and kept of them is left out."""
        own = {"_hook": StepHook(), "_measure": Measure(self._groups), "_snapshots": Snapshots(), "_weights_before": []}
        return {**vars(self), **own, "_awaits_replay": False}


def _what_trains(optimizer: Optimizer) -> Weights:
    return NO_WEIGHTS._replace(parameters=trained_parameters(optimizer))


def _level(rate: float, guess: float) -> float:
    """log m of a rate that the gradients ask for; -inf where they say nothing."""
    return math.log(rate / guess) if rate > 0 and guess > 0 else -math.inf
