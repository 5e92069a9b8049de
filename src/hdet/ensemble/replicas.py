"""The replicas of a run: each trains at values of its own; when a round ends they are averaged and compared.

Read this file first. :mod:`hdet.ensemble.steering` has the values and moves them. :mod:`hdet.ensemble.fixed_group` and
:mod:`hdet.ensemble.elastic_group` let the replicas meet. A scheduler counts steps, computes the plain schedule and asks
for this replica's values.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from hdet.checks import users_level
from hdet.ensemble.elastic_group import ElasticGroup, check_signal
from hdet.ensemble.fixed_group import FixedGroup
from hdet.ensemble.knob import rate_knobs
from hdet.ensemble.signals import ProbeLoss, RoundMean, Signal, TrainLoss
from hdet.ensemble.steering import Ending, Outcome, Steering
from hdet.errors import ResumeWarning
from hdet.frameworks import warn_unless_by_steps
from hdet.journal.writer import Clock, JournalWriter
from hdet.optimizer import Rate
from hdet.ranks.agreement import RankGroup
from hdet.ranks.group import Group, ReplicaIndex, Solo, arriving
from hdet.ranks.shards import refuse_partitions
from hdet.ranks.torchft import Torchft
from hdet.ranks.weights import ReplicaTensors
from hdet.rollback.losses import Losses
from hdet.state import EqualByState, check_run, run_state

_KIND = "replicas"
_NOT_AVERAGED = "averaging them would overwrite each rank's part of the model with a mean of unrelated parts"


class Replicas(EqualByState):
    """The replicas of one run, seen from one of them. It never holds the scheduler or the optimizer.

    Args:
        group: the user's ``group=``. Replicas of torchft come and go, all others stay together to the end.
        steering: the values, and what moves them.
        replica_tensors: which tensors make up the replica.
        alike: arguments that must be equal on all ranks, as texts.
        journal_writer: the journal.
        signal: what replicas are compared by.
        resets_state: whether the optimizer's state is cleared at the end of every round.
    """

    def __init__(
        self,
        group: Group,
        steering: Steering,
        replica_tensors: ReplicaTensors,
        alike: Mapping[str, str],
        journal_writer: JournalWriter,
        *,
        signal: Signal | None = None,
        resets_state: bool = False,
    ) -> None:
        self.steering = steering
        self.journal_writer = journal_writer
        self.losses = Losses()
        self.is_just_loaded = False
        """Between loading a checkpoint and the next step: an optimizer loaded now brings another replica's values."""
        self._signal: Signal = signal or TrainLoss()
        self.rank_group = RankGroup(group, alike)
        self.group: FixedGroup | ElasticGroup
        if isinstance(group, Torchft):
            check_signal(self._signal)
            self.group = ElasticGroup(group, steering, replica_tensors, alike, journal_writer)
        else:
            self.group = FixedGroup(self.rank_group, steering, replica_tensors, journal_writer)
        self._replica_tensors = replica_tensors
        self._resets_state = resets_state
        self._mean = RoundMean()

    # -- values ---------------------------------------------------------------------------------------------------

    @property
    def replica_index(self) -> ReplicaIndex:
        """This replica's place."""
        return self.group.replica_index

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
        return self.steering.rates(schedule, t, self.group.replica_index)

    def base(self, schedule: Sequence[Rate], t: int) -> list[Rate]:
        """The shared values, around which the replicas spread."""
        return self.steering.base(schedule, t)

    def multipliers(self, t: int, replica_index: ReplicaIndex) -> list[float]:
        """rho of a replica for each knob."""
        return list(self.steering.standing(t, replica_index).rho)

    def grow(self, new: Collection[int], knobs: Sequence[str]) -> None:
        """Spread the rates of parameter groups that were added, by their numbers. ``knobs``: the names of all rates."""
        spread = max((spec.spread for spec in self.steering.specs), default=0.0)
        self.steering.grow(rate_knobs([knobs[g] for g in new], spread))

    # -- a step ---------------------------------------------------------------------------------------------------

    def begin(self, optimizer: Optimizer) -> None:
        """The optimizer is known: no step has been made yet."""
        refuse_partitions(optimizer, "replicas", _NOT_AVERAGED)
        self._replica_tensors.remember(optimizer)

    def observe(self, loss: float | Tensor) -> None:
        """Count a loss towards the round."""
        self.losses.add(loss)

    def step(self, optimizer: Optimizer, before: int, after: int, loss: float | Tensor | None) -> bool:
        """A step of training was made at ``before``, and ``after`` comes next; ``loss`` is that of the step, if known.

        Returns whether a round ends with it: then call :meth:`end_round`.
        """
        self.group.check_step(optimizer, before)
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
        if self._signal.wants_mean:
            start, end = rounds.span(after)
            if self._mean.is_due(after - start, end - start):
                self._mean.add(self._replica_tensors.weights(optimizer).parameters)
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
            if isinstance(self._signal, ProbeLoss):
                parameters, k = self._replica_tensors.weights(optimizer).parameters, self.steering.rounds.index(before)
                signal = self._signal.value(k, self.rank_group.group, parameters, self._mean.of(parameters))
            clock.lap("probe")
            self._settle(self.group.end_round(end, self.losses, signal, clock), ended, clock)

    def _settle(self, outcome: Outcome, ended: float, clock: Clock) -> None:
        """Write the round down, move the base values, and begin the next round. ``ended``: when training stopped."""
        if outcome.writes:
            self.journal_writer.write(self.steering.record_of(outcome, clock.seconds), self.knobs, ended)
        self.steering.bases, end = outcome.decision.bases, outcome.decision.end
        if self._resets_state or not outcome.keeps_state:
            end.optimizer.state.clear()
        self._mean = RoundMean()
        self.losses.reset()
        if end.span[1] == self.total_steps:
            self.journal_writer.close()
        self.journal_writer.begin_round()

    # -- between the ends of rounds -------------------------------------------------------------------------------

    def join(self, scheduler: Any, schedule: Callable[[int], list[float]], t: int) -> int:
        """Meet the other replicas of torchft for the first time; see :meth:`ElasticGroup.join`. Collective.

        Returns how many steps the others are ahead of the state that was loaded: 0 or 1.
        """
        assert isinstance(self.group, ElasticGroup)  # Torchft.join has checked whose scheduler it is
        ended, clock = time.perf_counter(), Clock()
        outcome = self.group.join(scheduler, schedule, t, clock)
        if outcome is not None:
            self._settle(outcome, ended, clock)
        self.journal_writer.begin_round()
        return int(outcome is not None)

    def converge(self, optimizer: Optimizer, t: int) -> None:
        """Average now, nothing else: the round goes on. Collective."""
        self.group.converge(optimizer, t)

    def consensus(self, optimizer: Optimizer, t: int) -> AbstractContextManager[None]:
        """Inside, the replicas hold one model; afterwards each has its own weights again. Collective."""
        return self.group.consensus(optimizer, t)

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
        with_state = self._replica_tensors.with_state, self._resets_state
        self.rank_group.resume({**state, "signal": self._signal.kind, "with_state": repr(with_state)})
        self.is_just_loaded = True
        self.journal_writer.resume(t, mid_round=self.steering.rounds.is_inside(t))
