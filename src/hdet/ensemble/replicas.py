"""The replicas: each trains at values of its own; at the end of a round they are averaged and compared.

The file to read first. :mod:`hdet.ensemble.steering` has the values and what moves them, :mod:`hdet.ensemble.converge`
the averaging. A scheduler counts steps, computes a schedule and asks for this replica's values.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from hdet.checks import EqualByState, check_run, run_state, users_level, warn_unless_by_steps
from hdet.ensemble.bases import Bases
from hdet.ensemble.converge import converge, refuse_diverged
from hdet.ensemble.knob import rate_knobs
from hdet.ensemble.signals import RoundMean, Signal, TrainLoss
from hdet.ensemble.steering import Ending, Steering
from hdet.errors import ResumeWarning, ShardedParametersError
from hdet.journal.writer import Clock, JournalWriter, connect_ranks
from hdet.parameters import Rate, put_back
from hdet.ranks.agreement import Agreement, Occasion, Shown
from hdet.ranks.group import ReplicaGroup, ReplicaIndex, Solo, arriving, connect_alike
from hdet.ranks.rank_group import RankGroup
from hdet.ranks.shards import local, refuse_partitions, resharded
from hdet.ranks.weights import NO_WEIGHTS, ReplicaTensors, Weights, warn_without_ensemble
from hdet.rollback.losses import Losses

_KIND = "replicas"
_NOT_AVERAGED = (
    "averaging them over the ranks would overwrite each rank's part of the model with a mean of unrelated parts. Train "
    "replicas with ZeRO stage 0 in fp32, or have the rate found: hdet.integrations.deepspeed.auto(engine, ...)"
)


class Replicas(EqualByState):
    """The replicas of one run, seen from one of them. It never holds the scheduler or the optimizer.

    Args:
        steering: the values, and what moves them.
        replica_tensors: which tensors make up the replica.
        rank_group: the others.
        journal_writer: the journal.
        signal: what replicas are compared by.
        resets_state: whether the optimizer's state is cleared at the end of every round.
    """

    def __init__(
        self,
        steering: Steering,
        replica_tensors: ReplicaTensors,
        rank_group: RankGroup,
        journal_writer: JournalWriter,
        signal: Signal | None = None,
        resets_state: bool = False,
    ) -> None:
        self.steering = steering
        self.rank_group = rank_group
        self.journal_writer = journal_writer
        self.losses = Losses()
        self.is_just_loaded = False
        """Between loading a checkpoint and the next step: an optimizer loaded now brings another replica's values."""
        self._replica_tensors = replica_tensors
        self._signal: Signal = signal or TrainLoss()
        self._resets_state = resets_state
        self._mean = RoundMean()
        self._alike: ReplicaGroup | None = None
        """Where weights are sharded: of each replica the ranks that hold the same parts as this one."""

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
        return self.steering.rates(schedule, t, self.rank_group.replica_index)

    def base(self, schedule: Sequence[Rate], t: int) -> list[Rate]:
        """The shared values, around which the replicas spread."""
        return self.steering.base(schedule, t)

    def multipliers(self, t: int, replica_index: ReplicaIndex) -> list[float]:
        """rho of a replica for each knob."""
        return list(self.steering.standing(t, replica_index).rho)

    def grow(self, new: Collection[int], knobs: Sequence[str]) -> None:
        """Parameter groups were added to the optimizer: their rates spread as far as the others'.

        Args:
            new: their numbers among all groups.
            knobs: a name for each group, as they are now.
        """
        spread = max((spec.spread for spec in self.steering.specs), default=0.0)
        self.steering.grow(rate_knobs([knobs[g] for g in new], spread))

    # -- a step ---------------------------------------------------------------------------------------------------

    def begin(self, optimizer: Optimizer) -> None:
        """The optimizer is known: no step has been made yet."""
        refuse_partitions(optimizer, _NOT_AVERAGED)
        self._replica_tensors.remember(optimizer)

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
        peak: Callable[[], float] | None = None,
    ) -> None:
        """A step of training was made, and the schedule goes on. The end of a round is a collective.

        Args:
            optimizer: the optimizer.
            before: the step at which it was made.
            after: the one to come.
            loss: of that step, if it is known.
            schedule: the plain schedule of each knob at a step; anything for knobs that have none.
            peak: not used: replicas follow the schedule's rise as it is.
        """
        self.rank_group.check_step(before)
        if before == 0 and self.replica_index.replica == 0:
            warn_unless_by_steps()
        if loss is not None:
            self.losses.add(loss)
        if self.is_just_loaded:
            self._first_step_since_loading(before)
        if self.rank_group.is_due:  # asked here too: a call less in every step
            self._meet(optimizer, before)
        if not self.journal_writer.is_locked and self.replica_index.size == 1:
            self.journal_writer.lock(Solo(), writes=True)
        if self._signal.wants_mean:
            start, end = self.steering.rounds.span(after)
            if self._mean.is_due(after - start, end - start):
                self._mean.add(self._replica_tensors.weights(optimizer).parameters)
        if self.steering.settings.rounds.ends_at(after):
            with arriving(what := f"round {self.steering.rounds.index(before)}, at step {after}"):
                self._end_round(Ending(optimizer, (before, after), schedule), what)

    # -- the end of a round ---------------------------------------------------------------------------------------

    def _end_round(self, end: Ending, what: str) -> None:
        """Gather, decide, average, move the base values. An error before the mean changes nothing.

        Cost: one gather, which synchronises host and device, and one all-reduce of the weights; with a journal a second
        gather. ``what``: the round, for messages.
        """
        ended, clock, group = time.perf_counter(), Clock(), self.rank_group.group
        signal = self._read_signal(end)
        clock.lap("probe")
        roll = self._roll_call(end, signal)
        refuse_diverged(roll, what)
        clock.lap("gather")
        decided = self.steering.decide(end, roll, self.replica_index)
        clock.lap("controller")
        divergence, record = None, None
        if group.replica_index.size > 1:
            measured, weights = roll.writer is not None, self._replica_tensors.weights(end.optimizer)
            divergence = converge(group, self._alike or group, weights, roll, measure=measured)
        clock.lap("converge")
        if roll.writer == group.rank:
            record = self.steering.record(end, roll, self.replica_index, *decided, divergence, clock.seconds)
        # Of a replica that was left out, no rank has seen the moments of all shards.
        keeps = roll.live[group.replica_index.replica] or (self._alike is None and is_finite(end.optimizer))
        self._settle(end, decided[0], record, ended, keeps_state=keeps)

    def _settle(
        self, end: Ending, bases: Bases, record: dict[str, Any] | None, ended: float, *, keeps_state: bool
    ) -> None:
        """The round is over: write it down, move the base values, and begin the next one."""
        if record is not None:
            self.journal_writer.write(record, self.knobs, ended)
        self.steering.bases = bases
        if self._resets_state or not keeps_state:
            end.optimizer.state.clear()
        self._mean.reset()
        self.losses.reset()
        if end.span[1] == self.total_steps:
            self.journal_writer.close()
        self.journal_writer.begin_round()

    def _read_signal(self, end: Ending) -> float | None:
        """The probe's loss; None: the losses that were observed are compared."""
        if isinstance(self._signal, TrainLoss):
            return None
        parameters, k = self._replica_tensors.weights(end.optimizer).parameters, self.steering.rounds.index(end.span[0])
        return float(self._signal.value(k, self.rank_group.group, parameters, self._mean.of(parameters)))

    def _roll_call(self, end: Ending, signal: float | None) -> Agreement:
        keeps = self.journal_writer.is_kept
        if self.rank_group.group.replica_index.size == 1 and not keeps:
            return Agreement.alone()
        shown = Shown(self.losses.mean(), self.losses.count > 0, signal, keeps)
        weights, equal = self._replica_tensors.weights(end.optimizer), not self.steering.has_spread
        return self.rank_group.agree(Occasion.ROUND_END, end.span[0], weights, shown, expect_equal=equal)

    # -- the other replicas ---------------------------------------------------------------------------------------

    def _meet(self, optimizer: Optimizer, t: int) -> None:
        """Once torch.distributed is initialised: check that the replicas agree. Collective the first time."""
        if self.rank_group.is_due:
            connect_ranks(
                self.rank_group, self.journal_writer, t, lambda: self._first_weights(optimizer), self._begin_together
            )

    def _first_weights(self, optimizer: Optimizer) -> Weights:
        warn_without_ensemble(optimizer)
        return self._replica_tensors.first_weights(optimizer, needs_model=True)

    def _begin_together(self, group: ReplicaGroup, roll: Agreement) -> None:
        """For shards: who holds the same ones in other replicas."""
        if len(set(roll.held)) == 1:
            return
        if len({tuple(sorted(roll.held[rank] for rank in ranks)) for ranks in group.members}) > 1:
            raise ShardedParametersError(
                f"the weights are sharded (DTensor) over ranks of different replicas {group.members}: the mean over "
                "them would mix different parts. Replicas must hold a whole model each: use a mesh of two dimensions "
                'and group=hdet.arms(mesh, "replicate"), or find the rate without replicas, by max_lr="auto"'
            )
        self._alike = connect_alike(group, roll.held)

    def converge(self, optimizer: Optimizer, t: int, occasion: Occasion = Occasion.CONVERGE) -> None:
        """Average now, nothing else: the round goes on. Collective."""
        self._meet(optimizer, t)
        group, what = self.rank_group.group, f"{occasion.name.lower()}() at step {t}"
        if group.replica_index.size == 1:
            return
        # Right after a round replicas are equal, and are compared instead: a mean of three equal numbers would round.
        equal = not self.steering.has_spread or self.steering.rounds.ends_at(t)
        with arriving(what):
            weights = self._replica_tensors.weights(optimizer)
            roll = self.rank_group.agree(occasion, t, weights, Shown(), expect_equal=equal)
            refuse_diverged(roll, what)
            converge(group, self._alike or group, weights, roll, measure=False)

    @contextmanager
    def consensus(self, optimizer: Optimizer, t: int) -> Iterator[None]:
        """The replicas' one model inside, this replica's own weights back afterwards. Collective.

        One copy of what the replicas do not share.
        """
        if self.replica_index.size == 1:
            yield
            return
        self._meet(optimizer, t)
        tensors = self._replica_tensors.weights(optimizer).tensors
        with self.rank_group.consensus(), resharded(self._replica_tensors.model), put_back(tensors):
            self.converge(optimizer, t, Occasion.CONSENSUS)
            yield

    def compare(self, optimizer: Optimizer, metrics: float, t: int) -> None:
        """Raise unless all ranks give the same metrics. Collective."""
        self._meet(optimizer, t)
        if self.replica_index.size > 1:
            with arriving(f"comparing metrics at step {t}"):
                shown = Shown(signal=metrics)
                self.rank_group.agree(Occasion.METRICS, t, NO_WEIGHTS, shown, expect_equal=False)

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
        """Go on at step ``t`` from what :meth:`check` has seen."""
        self.steering.load(state, total_steps)
        self._mean.reset()
        self._resume(t, state)

    def adopt(self, total_steps: int, t: int) -> None:
        """Go on from a checkpoint of torch's own scheduler: only the counters are known."""
        self.steering.adopt(total_steps)
        self._resume(t, {})

    def _resume(self, t: int, state: Mapping[str, Any]) -> None:
        """The counter was set to ``t`` by a checkpoint: losses of the round so far are not in it."""
        self.losses.reset()
        with_state = self._replica_tensors.with_state, self._resets_state
        own = {"signal": self._signal.kind, "with_state": repr(with_state)}
        self.rank_group.resume({**state, **own})
        self.is_just_loaded = True
        self.journal_writer.resume(t, mid_round=self.steering.rounds.is_inside(t))

    def _first_step_since_loading(self, t: int) -> None:
        """Everything is loaded by now: warn of what several replicas no longer know of a round that is not over."""
        self.is_just_loaded, replica_index, rounds = False, self.replica_index, self.steering.rounds
        if replica_index.size > 1 and replica_index.replica == 0 and rounds.is_inside(t):
            warnings.warn(
                f"resumed inside round {rounds.index(t)}, at step {t}: its multipliers and its end at step "
                f"{rounds.next_end(t)} are kept, its loss sums start empty, and all replicas go on from the loaded "
                "weights",
                ResumeWarning,
                stacklevel=users_level(),
            )

    def __getstate__(self) -> dict[str, Any]:
        """A process group cannot be copied: a copy makes that of shards again."""
        return {**vars(self), "_alike": None}


def is_finite(optimizer: Optimizer) -> bool:
    """A replica that was left out may keep its moments only if they are finite."""
    values = (v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor))
    return all(bool(local(v).isfinite().all()) for v in values)
