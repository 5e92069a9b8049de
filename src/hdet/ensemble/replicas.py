"""The replicas of a run: each trains at values of its own; when a round ends they are averaged and compared.

Read this file first. :mod:`hdet.ensemble.steering` has the values and moves them. A scheduler counts steps, computes
the plain schedule and asks for this replica's values.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from hdet.checks import users_level
from hdet.copies import put_back
from hdet.ensemble.converge import converge, is_finite, refuse_diverged
from hdet.ensemble.knob import rate_knobs
from hdet.ensemble.signals import ProbeLoss, RoundMean, Signal, TrainLoss
from hdet.ensemble.steering import Ending, Outcome, Steering
from hdet.errors import ResumeWarning, ShardedParametersError
from hdet.frameworks import warn_unless_by_steps
from hdet.journal.writer import Clock, JournalWriter, connect_ranks
from hdet.optimizer import Rate
from hdet.ranks.agreement import Agreement, Occasion, RankGroup, RankReport
from hdet.ranks.group import ReplicaGroup, ReplicaIndex, Solo, arriving, connect_alike
from hdet.ranks.shards import refuse_partitions, resharded
from hdet.ranks.weights import NO_WEIGHTS, ReplicaTensors, Weights
from hdet.rollback.losses import Losses
from hdet.state import EqualByState, check_run, run_state

_KIND = "replicas"
_NOT_AVERAGED = "averaging them would overwrite each rank's part of the model with a mean of unrelated parts"


@dataclass(eq=False)
class Replicas(EqualByState):
    """The replicas of one run, seen from one of them. It never holds the scheduler or the optimizer.

    They stay together from the first step to the last: if one is lost, the others raise an error. Those of torchft
    come and go: :class:`hdet.ensemble.elastic_replicas.ElasticReplicas`.

    Args:
        rank_group: the ranks.
        steering: the values, and what moves them.
        replica_tensors: which tensors make up the replica.
        journal_writer: the journal.
        signal: what replicas are compared by.
        resets_state: whether the optimizer's state is cleared at the end of every round.
    """

    rank_group: RankGroup
    steering: Steering
    replica_tensors: ReplicaTensors
    journal_writer: JournalWriter
    signal: Signal = field(default_factory=TrainLoss)
    resets_state: bool = False
    losses: Losses = field(default_factory=Losses, init=False)
    is_just_loaded: bool = field(default=False, init=False)
    """Between loading a checkpoint and the next step: an optimizer loaded now brings another replica's values."""
    _mean: RoundMean = field(default_factory=RoundMean, init=False)
    """That of the round's weights, if the signal needs it."""
    _alike: ReplicaGroup | None = field(default=None, init=False)
    """If weights are sharded: of each replica the ranks that hold the same parts as this one."""

    # -- values ---------------------------------------------------------------------------------------------------

    @property
    def replica_index(self) -> ReplicaIndex:
        """This replica's place."""
        return self.rank_group.replica_index

    @property
    def knobs(self) -> list[str]:
        """Their names."""
        return [spec.name for spec in self.steering.specs]

    @property
    def total_steps(self) -> int | None:
        """The length of the run, if it is known."""
        return self.steering.rounds.total_steps

    def rates(self, schedule: Sequence[Rate], t: int) -> list[Rate]:
        """This replica's values of scheduled knobs at step ``t``."""
        return self.steering.rates(schedule, t, self.replica_index)

    def multipliers(self, t: int) -> list[float]:
        """rho of this replica for each knob."""
        return list(self.steering.standing(t, self.replica_index).rho)

    def grow(self, new: Collection[int], knobs: Sequence[str]) -> None:
        """Spread the rates of parameter groups that were added, by their numbers. ``knobs``: the names of all rates."""
        spread = max((spec.spread for spec in self.steering.specs), default=0.0)
        self.steering.grow(rate_knobs([knobs[g] for g in new], spread))

    # -- a step ---------------------------------------------------------------------------------------------------

    def begin(self, optimizer: Optimizer) -> None:
        """The optimizer is known: no step has been made yet."""
        refuse_partitions(optimizer, "replicas", _NOT_AVERAGED)
        self.replica_tensors.remember(optimizer)

    def step(self, optimizer: Optimizer, before: int, after: int, loss: float | Tensor | None) -> bool:
        """A step of training was made at ``before``, and ``after`` comes next; ``loss`` is that of the step, if known.

        Returns whether a round ends with it: then call :meth:`end_round`.
        """
        self._check_step(optimizer, before)
        if before == 0 and self.replica_index.replica == 0:
            warn_unless_by_steps()
        if loss is not None:
            self.losses.add(loss)
        if self.is_just_loaded:  # everything is loaded by now
            self.is_just_loaded = False
            self._warn_inside_a_round(before)
        if not self.journal_writer.is_locked and self.replica_index.size == 1:
            self.journal_writer.lock(Solo(), writes=True)
        rounds = self.steering.settings.rounds
        if self.signal.wants_mean:
            start, end = rounds.span(after)
            if self._mean.is_due(after - start, end - start):
                self._mean.add(self.replica_tensors.weights(optimizer).parameters)
        return rounds.ends_at(after)

    def _warn_inside_a_round(self, t: int) -> None:
        """Warn that several replicas which were resumed at step ``t`` do not know the beginning of their round."""
        rounds = self.steering.rounds
        if self.replica_index.size > 1 and self.replica_index.replica == 0 and rounds.is_inside(t):
            warnings.warn(
                f"resumed inside round {rounds.index(t)}, at step {t}: its multipliers and its end at step "
                f"{rounds.next_end(t)} are kept, its loss sums start empty, and all replicas go on from the loaded "
                "weights",
                ResumeWarning,
                stacklevel=users_level(),
            )

    def end_round(self, optimizer: Optimizer, before: int, after: int, schedule: Callable[[int], list[float]]) -> None:
        """Compare the replicas, average them and move the base values. Collective.

        Cost: one gather, which synchronises host and device, and one all-reduce of the weights; with a journal a second
        gather. An error before the mean changes nothing.

        Args:
            optimizer: the optimizer.
            before, after: as in :meth:`step`.
            schedule: gives the plain rate of each knob at either step; any number for knobs without one. A function,
                because loading a peer's state (torchft) changes the step, and most schedules can be asked only once.
        """
        end = Ending(optimizer, (before, after), schedule)
        with arriving(self.steering.name_of(end)):
            ended, clock = time.perf_counter(), Clock()
            signal = None
            if isinstance(self.signal, ProbeLoss):
                parameters, k = self.replica_tensors.weights(optimizer).parameters, self.steering.rounds.index(before)
                signal = self.signal.value(k, self.rank_group.group, parameters, self._mean.of(parameters))
            clock.lap("probe")
            self._settle(self._meet(end, signal, clock), ended, clock)

    def _settle(self, outcome: Outcome, ended: float, clock: Clock) -> None:
        """Write the round down, move the base values, and begin the next round. ``ended``: when training stopped."""
        if outcome.writes:
            self.journal_writer.write(self.steering.record_of(outcome, clock.seconds), self.knobs, ended)
        self.steering.bases, end = outcome.bases, outcome.end
        if self.resets_state or not outcome.keeps_state:
            end.optimizer.state.clear()
        self._mean = RoundMean()
        self.losses.reset()
        if end.span[1] == self.total_steps:
            self.journal_writer.close()
        self.journal_writer.begin_round()

    def _meet(self, end: Ending, signal: float | None, clock: Clock) -> Outcome:
        """Gather, decide and average. Collective.

        Args:
            end: the round.
            signal: the probe's loss; None: the mean of the losses is compared.
            clock: measures the phases.
        """
        group, index = self.rank_group.group, self.rank_group.group.replica_index
        weights = self.replica_tensors.weights(end.optimizer) if index.size > 1 else NO_WEIGHTS
        roll, keeps_journal = Agreement.alone(), self.journal_writer.is_kept
        if index.size > 1 or keeps_journal:
            own = RankReport(self.losses.mean(), self.losses.count > 0, signal, keeps_journal)
            equal = not self.steering.has_spread
            roll = self.rank_group.agree(Occasion.ROUND_END, end.span[0], weights, own, expect_equal=equal)
        refuse_diverged(roll, self.steering.name_of(end), group.rank)
        clock.lap("gather")
        bases, update = self.steering.decide(end, roll, index)
        clock.lap("controller")
        divergence = None
        if index.size > 1:
            divergence = converge(group, self._alike or group, weights, roll, measure=roll.writer is not None)
        clock.lap("converge")
        # If a replica was left out, none of its ranks has seen the moments of all of its shards.
        keeps_state = roll.live[index.replica] or (self._alike is None and is_finite(end.optimizer))
        return Outcome(end, roll, index, bases, update, divergence, keeps_state, writes=roll.writer == group.rank)

    # -- connecting the ranks -------------------------------------------------------------------------------------

    def _check_step(self, optimizer: Optimizer, t: int) -> None:
        """A step was made at ``t``. Raises inside :meth:`consensus`. Collective the first time."""
        self.rank_group.check_step(t)
        if self.rank_group.is_due:  # asked here too: a call less in every step
            self._connect(optimizer, t)

    def _connect(self, optimizer: Optimizer, t: int) -> None:
        """Once torch.distributed is initialised: check that the replicas agree. Collective the first time."""
        if self.rank_group.is_due:
            connect_ranks(
                self.rank_group, self.journal_writer, t, lambda: self._first_weights(optimizer), self._connect_alike
            )

    def _first_weights(self, optimizer: Optimizer) -> Weights:
        if any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__):
            warnings.warn(
                "with ZeroRedundancyOptimizer one rank updates each parameter for all, so replicas stay equal and "
                "there is no ensemble: each parameter trains at its owner's rate; use spread=0 or a plain optimizer",
                UserWarning,
                stacklevel=2,
            )
        return self.replica_tensors.first_weights(optimizer, needs_model=True)

    def _connect_alike(self, group: ReplicaGroup, roll: Agreement) -> None:
        """If weights are sharded: find the ranks that hold the same parts in other replicas. Collective."""
        if len(set(roll.held)) == 1:
            return
        if len({tuple(sorted(roll.held[rank] for rank in ranks)) for ranks in group.members}) > 1:
            raise ShardedParametersError(
                f"the weights are sharded (DTensor) over ranks of different replicas {group.members}: the mean over "
                "them would mix different parts. Replicas must hold a whole model each: use a mesh of two dimensions "
                'and group=hdet.arms(mesh, "replicate"), or find the rate without replicas, by hdet.auto(...)'
            )
        self._alike = connect_alike(group, roll.held)

    # -- between the ends of rounds -------------------------------------------------------------------------------

    def join(self, scheduler: Any, schedule: Callable[[int], list[float]], t: int) -> int:
        """Meet replicas that come and go for the first time; see :class:`ElasticReplicas`."""
        raise NotImplementedError

    def converge(self, optimizer: Optimizer, t: int, occasion: Occasion = Occasion.CONVERGE) -> None:
        """Average now, nothing else: the round goes on. Collective."""
        self._connect(optimizer, t)
        group, what = self.rank_group.group, f"{occasion.name.lower()}() at step {t}"
        if group.replica_index.size == 1:
            return
        # Right after a round replicas are equal, and are compared instead: a mean of three equal numbers would round.
        equal = not self.steering.has_spread or self.steering.rounds.ends_at(t)
        with arriving(what):
            weights = self.replica_tensors.weights(optimizer)
            roll = self.rank_group.agree(occasion, t, weights, RankReport(), expect_equal=equal)
            refuse_diverged(roll, what, group.rank)
            converge(group, self._alike or group, weights, roll, measure=False)

    @contextmanager
    def consensus(self, optimizer: Optimizer, t: int) -> Iterator[None]:
        """Inside, every replica holds the mean; afterwards each has its own weights again. Collective.

        Needs one copy of the tensors that the replicas do not share.
        """
        if self.replica_index.size == 1:
            yield
            return
        self._connect(optimizer, t)
        tensors = self.replica_tensors.weights(optimizer).tensors
        with self.rank_group.consensus(), resharded(self.replica_tensors.model), put_back(tensors):
            self.converge(optimizer, t, Occasion.CONSENSUS)
            yield

    def compare(self, optimizer: Optimizer, metrics: float, t: int) -> None:
        """Raise unless all ranks give the same metrics. Collective."""
        self._connect(optimizer, t)
        if self.replica_index.size > 1:
            with arriving(f"comparing metrics at step {t}"):
                report = RankReport(signal=metrics)
                self.rank_group.agree(Occasion.METRICS, t, NO_WEIGHTS, report, expect_equal=False)

    # -- state ----------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Plain numbers, lists and strings; the same on every replica, with keys that never change."""
        envelope = run_state(_KIND, self.knobs, [spec.spread for spec in self.steering.specs])
        return {**envelope, **self.steering.state()}

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise unless :meth:`load` can go on from a state. Changes nothing."""
        check_run(state, _KIND, self.knobs)
        self.steering.check(state)

    def load(self, state: Mapping[str, Any], total_steps: int | None, t: int) -> None:
        """Go on at step ``t`` from a state that :meth:`check` has accepted."""
        self.steering.load(state, total_steps)
        self._mean = RoundMean()
        self._resume(t, state)

    def adopt(self, total_steps: int, t: int) -> None:
        """Go on from a checkpoint of torch's own scheduler: only the counters are known."""
        self.steering.adopt(total_steps)
        self._resume(t, {})

    def _resume(self, t: int, state: Mapping[str, Any]) -> None:
        """The counter was set to ``t`` by a checkpoint, which does not have the losses of the round so far."""
        self.losses.reset()
        with_state = self.replica_tensors.with_state, self.resets_state
        self.rank_group.resume({**state, "signal": self.signal.kind, "with_state": repr(with_state)})
        self.is_just_loaded = True
        self.journal_writer.resume(t, mid_round=self.steering.rounds.is_inside(t))

    def __getstate__(self) -> dict[str, Any]:
        """A process group cannot be copied: a copy makes that of its shards again."""
        return {**vars(self), "_alike": None}
