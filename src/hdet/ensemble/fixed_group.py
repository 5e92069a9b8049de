"""A fixed group: replicas that stay together from the first step to the last."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch.optim import Optimizer

from hdet.copies import put_back
from hdet.ensemble.converge import converge, is_finite, refuse_diverged
from hdet.ensemble.steering import Ending, Outcome, Steering
from hdet.errors import ShardedParametersError
from hdet.journal.writer import Clock, JournalWriter, connect_ranks
from hdet.ranks.agreement import Agreement, Occasion, RankReport
from hdet.ranks.group import ReplicaGroup, ReplicaIndex, arriving, connect_alike
from hdet.ranks.rank_group import RankGroup
from hdet.ranks.shards import resharded
from hdet.ranks.weights import NO_WEIGHTS, ReplicaTensors, Weights
from hdet.rollback.losses import Losses


@dataclass(eq=False)
class FixedGroup:
    """The replicas of a process group, seen from one of them. If one is lost, the others raise an error.

    Args:
        rank_group: the ranks.
        steering: the values, and what moves them.
        replica_tensors: which tensors make up the replica.
        journal_writer: the journal.
    """

    rank_group: RankGroup
    steering: Steering
    replica_tensors: ReplicaTensors
    journal_writer: JournalWriter
    alike: ReplicaGroup | None = field(default=None, init=False)
    """If weights are sharded: of each replica the ranks that hold the same parts as this one."""

    @property
    def replica_index(self) -> ReplicaIndex:
        """This replica's place."""
        return self.rank_group.replica_index

    def check_step(self, optimizer: Optimizer, t: int) -> None:
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
        self.alike = connect_alike(group, roll.held)

    # -- what the replicas do together ----------------------------------------------------------------------------

    def end_round(self, end: Ending, losses: Losses, signal: float | None, clock: Clock) -> Outcome:
        """Gather, decide and average. Collective.

        Args:
            end: the round.
            losses: those that this rank has observed in it.
            signal: the probe's loss; None: the mean of the losses is compared.
            clock: measures the phases.
        """
        group, place = self.rank_group.group, self.rank_group.group.replica_index
        weights = self.replica_tensors.weights(end.optimizer) if place.size > 1 else NO_WEIGHTS
        roll, keeps_journal = Agreement.alone(), self.journal_writer.is_kept
        if place.size > 1 or keeps_journal:
            own = RankReport(losses.mean(), losses.count > 0, signal, keeps_journal)
            equal = not self.steering.has_spread
            roll = self.rank_group.agree(Occasion.ROUND_END, end.span[0], weights, own, expect_equal=equal)
        refuse_diverged(roll, self.steering.name_of(end))
        clock.lap("gather")
        decision = self.steering.decide(end, roll, place)
        clock.lap("controller")
        divergence = None
        if place.size > 1:
            divergence = converge(group, self.alike or group, weights, roll, measure=roll.writer is not None)
        clock.lap("converge")
        # If a replica was left out, none of its ranks has seen the moments of all of its shards.
        keeps_state = roll.live[place.replica] or (self.alike is None and is_finite(end.optimizer))
        return Outcome(decision, divergence, keeps_state, writes=roll.writer == group.rank, told={})

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
            refuse_diverged(roll, what)
            converge(group, self.alike or group, weights, roll, measure=False)

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

    def __getstate__(self) -> dict[str, Any]:
        """A process group cannot be copied: a copy makes that of its shards again."""
        return {**vars(self), "alike": None}
