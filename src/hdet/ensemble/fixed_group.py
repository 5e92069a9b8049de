"""A fixed group: replicas that stay together from the first step to the last. And converge, their mean."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from hdet.copies import put_back
from hdet.ensemble.steering import Ending, Outcome, Steering
from hdet.errors import DivergedError, ShardedParametersError
from hdet.journal.writer import Clock, JournalWriter, connect_ranks
from hdet.ranks.agreement import Agreement, Occasion, RankGroup, RankReport
from hdet.ranks.average import average_
from hdet.ranks.group import ReplicaGroup, ReplicaIndex, arriving, connect_alike
from hdet.ranks.shards import counted_once, local, place, resharded
from hdet.ranks.weights import NO_WEIGHTS, ReplicaTensors, Weights, fingerprint_of_words
from hdet.rollback.losses import Losses

_log = logging.getLogger("hdet")


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
        group, index = self.rank_group.group, self.rank_group.group.replica_index
        weights = self.replica_tensors.weights(end.optimizer) if index.size > 1 else NO_WEIGHTS
        roll, keeps_journal = Agreement.alone(), self.journal_writer.is_kept
        if index.size > 1 or keeps_journal:
            own = RankReport(losses.mean(), losses.count > 0, signal, keeps_journal)
            equal = not self.steering.has_spread
            roll = self.rank_group.agree(Occasion.ROUND_END, end.span[0], weights, own, expect_equal=equal)
        refuse_diverged(roll, self.steering.name_of(end))
        clock.lap("gather")
        decision = self.steering.decide(end, roll, index)
        clock.lap("controller")
        divergence = None
        if index.size > 1:
            divergence = converge(group, self.alike or group, weights, roll, measure=roll.writer is not None)
        clock.lap("converge")
        # If a replica was left out, none of its ranks has seen the moments of all of its shards.
        keeps_state = roll.live[index.replica] or (self.alike is None and is_finite(end.optimizer))
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


def refuse_diverged(roll: Agreement, what: str) -> None:
    """Raise if no replica is live; otherwise say in the log who is left out."""
    if all(roll.live):
        return
    rows = enumerate(zip(roll.losses, roll.finite, strict=True))
    lines = "\n".join(f"  replica {r}: loss {loss}, weights {'' if fine else 'not '}finite" for r, (loss, fine) in rows)
    if not any(roll.live):
        raise DivergedError(
            f"training has diverged in {what}: no replica has a finite loss and finite weights. The weights were left "
            f"as they are.\n{lines}\nGo back to a checkpoint and lower max_lr, or clip gradients; if gradients are "
            "shared, one replica's NaN reaches all of them through the all-reduce."
        )
    _log.warning("%s: replicas left out of the mean because they are not finite:\n%s", what, lines)


def is_finite(optimizer: Optimizer) -> bool:
    """Whether the optimizer's state is finite: a replica that was left out may keep it only then."""
    values = (v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor))
    return all(bool(local(v).isfinite().all()) for v in values)


def converge(
    group: ReplicaGroup, alike: ReplicaGroup, weights: Weights, roll: Agreement, *, measure: bool
) -> list[float] | None:
    """Average what differs, in place. With ``measure`` also a second small gather.

    Args:
        group: all ranks of all replicas.
        alike: those that hold the same parts of the weights as this one; all of them if weights are not sharded.
        weights: this rank's.
        roll: what the replicas know of each other.
        measure: whether to measure how far the replicas were from their mean.

    Returns:
        ``divergence[r]`` = ||theta_r - mean|| / ||mean|| over the parameters, or None.
    """
    equal = roll.moving_equal and all(roll.live)
    still = [] if roll.still_equal and all(roll.live) else weights.still
    parameters = [] if equal else weights.parameters
    rest = still if equal else [*weights.buffers, *weights.state, *still]
    if not measure:
        average_([*parameters, *rest], alike, roll.live)
        return None
    distances: list[float] = []
    for part, own in _by_place(parameters).items():  # by themselves: running statistics would drown their distance
        distances.extend([part, *average_(own, alike, roll.live, measure=True)])
    average_(rest, alike, roll.live)
    if not distances:
        return [0.0] * group.replica_index.size
    rows = group.gather(distances, weights.device)
    return [_divergence([rows[rank] for rank in ranks]) for ranks in group.members]


def _by_place(parameters: Sequence[Tensor]) -> dict[float, list[Tensor]]:
    """Parameters by the part of them that this rank holds, as a number."""
    found: dict[float, list[Tensor]] = {}
    for p in parameters:
        found.setdefault(fingerprint_of_words([place(p)]), []).append(p)
    return found


def _divergence(rows: list[list[float]]) -> float:
    """Of one replica, from what its ranks have measured."""
    to_mean, of_mean = (math.hypot(*lengths) for lengths in counted_once(rows, 3) or ([], []))
    return to_mean / of_mean if of_mean else 0.0
