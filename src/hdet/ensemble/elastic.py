"""Replicas that come and go, on torchft: a round ends with a meeting of the replicas that are there.

A round is described by the places that were dealt when it began. Replicas that are gone at its end are left out of it
like those that are not finite. Places of the next round are dealt over the members of the meeting.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from hdet.ensemble.bases import Bases
from hdet.ensemble.controller import Update
from hdet.ensemble.converge import converge, refuse_diverged
from hdet.ensemble.members import Dealt, Member, among, as_dealt, mean_over_ranks
from hdet.ensemble.probe import ProbeBatch
from hdet.ensemble.replicas import Replicas, is_finite
from hdet.ensemble.signals import ProbeLoss, Signal
from hdet.ensemble.steering import Ending, Steering
from hdet.errors import ArgumentError, ShardedParametersError
from hdet.journal.file import mapped
from hdet.journal.writer import Clock, JournalWriter
from hdet.parameters import copies_of, write_
from hdet.ranks.agreement import Agreement, Occasion, Shown, call, check_equal, in_text
from hdet.ranks.group import ReplicaIndex, Solo
from hdet.ranks.managed import ManagedGroup
from hdet.ranks.rank_group import RankGroup
from hdet.ranks.shards import is_distributed
from hdet.ranks.torchft import FailedTry, Torchft
from hdet.ranks.weights import ReplicaTensors, Weights, fingerprint_of_words

_log = logging.getLogger("hdet")
_KEY = "hdet"


def replicas_in(
    group: Any,
    steering: Steering,
    replica_tensors: ReplicaTensors,
    alike: Mapping[str, str],
    journal_writer: JournalWriter,
    *,
    signal: Signal | None = None,
    resets_state: bool = False,
) -> Replicas:
    """The replicas of a ``group=``: those of torchft come and go, others stay together to the end."""
    if not isinstance(group, Torchft):
        return Replicas(steering, replica_tensors, RankGroup(group, alike), journal_writer, signal, resets_state)
    probe = signal.fn if isinstance(signal, ProbeLoss) else None
    if isinstance(probe, ProbeBatch) and not (isinstance(probe.loader, (list, tuple)) or callable(probe.loader)):
        raise ArgumentError(
            "replicas that come and go must find the batch of a round by themselves, but the ProbeBatch has a loader; "
            "give it a list of batches or batch_fn(round)"
        )
    dealt = Dealt(None, alike)
    return ElasticReplicas(steering, replica_tensors, dealt, journal_writer, signal, resets_state, torchft=group)


class Outcome(NamedTuple):
    """What a meeting has made of a round; it counts once it is committed."""

    end: Ending
    roll: Agreement
    """Of the places that were dealt."""
    live: bool
    """Whether this replica has counted, or has not trained."""
    decided: tuple[Bases, Update | None]
    divergence: list[float] | None


class Kept(NamedTuple):
    """What replicas have in common beside the scheduler's state."""

    chain: float
    """A fingerprint of all meetings so far."""
    names: list[str]
    """Of those to whom places were dealt."""


class ElasticReplicas(Replicas):
    """The replicas of torchft, seen from one of them.

    Args:
        torchft: the user's ``group=``.
        parts: as in :class:`Replicas`.
    """

    rank_group: Dealt

    def __init__(self, *parts: Any, torchft: Torchft) -> None:
        super().__init__(*parts)
        self.torchft = torchft
        self._arguments = {**in_text(self.journal_writer.arguments), **self.rank_group.alike}
        self._kept = Kept(0.0, [])
        self._trained = False
        self._healed_at: int | None = None
        """The step of a peer whose state was loaded in this quorum."""
        self._scheduler: Any = None

    # -- coming ---------------------------------------------------------------------------------------------------

    def join(self, scheduler: Any, schedule: Callable[[int], list[float]], t: int) -> int:
        """Meet the others for the first time. Gives the steps that they are ahead of the state that was loaded: 0 or 1.

        Args:
            scheduler: whose state goes to those who come, and is loaded here.
            schedule: the plain schedule of each knob at a step.
            t: the step.
        """
        optimizer: Optimizer = scheduler.optimizer
        if self.rank_group.place is not None:
            raise ArgumentError("join() was called before; call it once, before the loop")
        weights = self._replica_tensors.first_weights(optimizer, needs_model=True)
        if any(map(is_distributed, weights.tensors)):
            raise ShardedParametersError(
                "the weights are sharded (DTensor), but replicas that come and go must hold a whole model on each "
                "rank; use hdet.arms(mesh, dim) without torchft, or DistributedDataParallel inside a replica"
            )
        self._check_ranks()
        self._scheduler = scheduler
        try:
            self.torchft.manager.register_state_dict_fn(_KEY, self._load_peer, self._for_peers)
        except AssertionError:
            raise ArgumentError(
                "the manager serves another scheduler already, whose state it sends to those who come; make one "
                "manager for each scheduler"
            ) from None
        self.journal_writer.lock(Solo(), writes=True)
        is_ahead = self._meet_others(Ending(optimizer, (t, t + 1), schedule), Shown(), Clock())
        self.journal_writer.begin_round()
        return int(is_ahead)

    def _check_ranks(self) -> None:
        """Of several ranks that are one replica, one writes the journal, and all have one process group."""
        ranks = self.torchft.ranks
        if ranks > 1 and not (dist.is_available() and dist.is_initialized() and dist.get_world_size() == ranks):
            raise ArgumentError(
                f"the manager says that a replica has {ranks} ranks, but torch.distributed does not have a process "
                "group of them, over which their losses are averaged; call init_process_group in each replica"
            )
        if ranks > 1 and not self._replica_tensors.with_state:
            raise ArgumentError(
                f"ranks of one replica need the same moments, but torchft brings each of its {ranks} ranks those of "
                'another peer; use optimizer_state="average"'
            )
        if ranks > 1 and dist.get_rank() > 0:
            self.journal_writer.give_up()

    def _for_peers(self) -> dict[str, Any]:
        """What a newcomer needs. The tensors themselves: no replica changes them before the newcomer has them."""
        optimizer, model = self._scheduler.optimizer, self._replica_tensors.model
        tensors = self._replica_tensors.weights(optimizer)
        return {
            "arguments": dict(self._arguments),
            "kept": tuple(self._kept),
            "weights": None if model is not None else [t.detach() for t in (*tensors.parameters, *tensors.still)],
            "model": model.state_dict() if model is not None else None,
            "optimizer": optimizer.state_dict(),
            "scheduler": self._scheduler.state_dict(),
        }

    def _load_peer(self, state: Mapping[str, Any]) -> None:
        """Be what the peer was when it came to the meeting. Raises before anything is changed."""
        cure = f"Rank 1 is this replica, {self.torchft.name!r}: give it the arguments of the others."
        check_equal([state["arguments"], self._arguments], cure)
        model, optimizer = self._replica_tensors.model, self._scheduler.optimizer
        if model is not None:
            model.load_state_dict(state["model"])
        else:
            tensors = self._replica_tensors.weights(optimizer)
            own = [*tensors.parameters, *tensors.still]
            write_(own, [value.to(tensor) for tensor, value in zip(own, state["weights"], strict=True)])
        optimizer.load_state_dict(state["optimizer"])
        self._scheduler.load_state_dict(state["scheduler"])
        self._kept = Kept(*state["kept"])
        self._trained = False

    def load(self, state: Mapping[str, Any], total_steps: int | None, t: int) -> None:
        super().load(state, total_steps, t)
        self._healed_at = t

    # -- the meeting ----------------------------------------------------------------------------------------------

    def _end_round(self, end: Ending, what: str) -> None:
        """Meet, and go on as those who are there have agreed."""
        clock = Clock()
        signal = self._read_signal(end)
        clock.lap("probe")
        loss, signal = mean_over_ranks(self.torchft.ranks, self.losses.mean(), signal)
        shown = Shown(loss, self.losses.count > 0, signal, self.journal_writer.is_kept)
        self._meet_others(end, shown, clock)

    def _meet_others(self, end: Ending, shown: Shown, clock: Clock) -> bool:
        """Quorum, exchange, mean, commit: until a try is committed. Of one that is not, nothing is left.

        Returns:
            whether a round has ended: not before the first one.
        """
        ended, deadline = time.perf_counter(), time.monotonic() + self.torchft.timeout
        while True:
            self._healed_at = None
            replica_index = ReplicaIndex(*self.torchft.quorum(deadline))
            if self._healed_at is not None:
                end = end._replace(span=(self._healed_at, self._healed_at + 1))
            clock.lap("quorum")
            tensors = self._replica_tensors.weights(end.optimizer).tensors
            kept = copies_of(tensors) if replica_index.size > 1 else []
            failure, members, outcome = None, list[Member](), None
            try:
                group = ManagedGroup(
                    self.torchft.manager, replica_index, tensors[0].device if tensors else torch.device("cpu")
                )
                members, outcome = self._try(end, shown, group, clock)
                group.gather([1.0])  # all have the mean: fewer of us will commit while others cannot
            except FailedTry as error:
                failure = error
                _log.warning("replica %r: a meeting failed, and is tried again: %s", self.torchft.name, error)
            if self.torchft.commit(failure) and failure is None:
                self._commit(members, replica_index, outcome, clock, ended)
                return outcome is not None
            if kept:
                write_(tensors, kept)

    def _try(self, end: Ending, shown: Shown, group: ManagedGroup, clock: Clock) -> tuple[list[Member], Outcome | None]:
        """The members, and what they make of the round; None if no replica has trained yet.

        Changes weights and, if they are averaged, optimizer state.
        """
        chain = self._link(str(end.span[0]))
        mine = Member(self._trained, self.rank_group.replica_index.replica, shown.given, chain, self.torchft.name)
        members = group.gather_objects(mine)
        trained = [member for member in members if member.trained]
        weights, before = self._replica_tensors.weights(end.optimizer), end.span[0]
        if not trained:
            if self.torchft.ranks > 1:  # each rank has loaded the weights of another replica than the rank beside it
                for tensor in weights.tensors:
                    dist.broadcast(tensor, src=0)
            given = {**self._arguments, "what was loaded": str(chain)}
            call(group, Occasion.FIRST_STEP, before, weights, Shown(), expect_equal=False, arguments=given)
            return members, None
        self._keep_together(members, trained, chain)
        if not self._trained:
            shown = Shown(given=trained[0].given, journal=self.journal_writer.is_kept)
        equal = not self.steering.has_spread
        roll = call(group, Occasion.ROUND_END, before, weights, shown, expect_equal=equal)
        what = f"round {self.steering.rounds.index(before)}, at step {end.span[1]}"
        counted = roll._replace(finite=[f and m.trained for f, m in zip(roll.finite, members, strict=True)])
        if not any(counted.live):
            refuse_diverged(counted, what)
        dealt = as_dealt(counted, members, len(self._kept.names))
        refuse_diverged(among(roll, [i for i, member in enumerate(members) if member.trained]), what)
        clock.lap("gather")
        own = ReplicaIndex(self.rank_group.replica_index.replica if self._trained else 0, len(self._kept.names))
        decided = self.steering.decide(end, dealt, own)
        clock.lap("controller")
        far = self._average(group, weights, counted, members)
        clock.lap("converge")
        live = counted.live[group.rank] or not self._trained
        return members, Outcome(end, dealt, live, decided, far)

    def _keep_together(self, members: Sequence[Member], trained: Sequence[Member], chain: float) -> None:
        """Have those heal that were apart from the others: if they met without these, they hold another state."""
        usual = Counter(member.chain for member in trained).most_common(1)[0][0]
        odd = [member.name for member in members if member.chain != usual]
        if odd:
            if chain != usual:
                self.torchft.request_state()
            raise FailedTry(f"{', '.join(odd)} met apart from the others, and will load their state")

    def _average(
        self, group: ManagedGroup, weights: Weights, counted: Agreement, members: Sequence[Member]
    ) -> list[float] | None:
        """Average what differs. Gives the distance from the mean of each place that was dealt."""
        if group.replica_index.size == 1:
            return None
        far = converge(group, group, weights, counted, measure=counted.writer is not None)
        if far is None:
            return None
        places = {member.place: far[i] for i, member in enumerate(members) if member.trained}
        return [places.get(place, 0.0) for place in range(len(self._kept.names))]

    def _link(self, *words: str) -> float:
        """A fingerprint of all meetings so far and of what was learned, to nine digits: machines may round apart."""
        learned = mapped(self.state(), lambda value: f"{value:.9g}" if isinstance(value, float) else value)
        return fingerprint_of_words([repr(self._kept), repr(learned), *words])

    def _commit(
        self, members: list[Member], replica_index: ReplicaIndex, outcome: Outcome | None, clock: Clock, ended: float
    ) -> None:
        """The meeting counts: write it down, move the base values, take the place that is dealt."""
        dealt, record = self._kept.names, None
        if outcome is not None:
            end, roll, live, decided, divergence = outcome
            if self.journal_writer.is_kept:
                first, here = ReplicaIndex(0, len(dealt)), {member.place for member in members if member.trained}
                record = self.steering.record(end, roll, first, *decided, divergence, clock.seconds)
                record |= {"names": dealt, "absent": [r for r in range(len(dealt)) if r not in here]}
                record["joined"] = [member.name for member in members if not member.trained]
            self._settle(end, decided[0], record, ended, keeps_state=live or is_finite(end.optimizer))
        names = [member.name for member in members]
        self._kept = Kept(self._link(*names), names)
        self.rank_group.place, self._trained = replica_index, True

    # -- what has no quorum ---------------------------------------------------------------------------------------

    def converge(self, optimizer: Optimizer, t: int, occasion: Occasion = Occasion.CONVERGE) -> None:
        """Nothing where a round has ended, since replicas are equal there. Refused elsewhere."""
        if self.steering.rounds.is_inside(t):
            self._refuse(f"{occasion.name.lower()}()", t)

    @contextmanager
    def consensus(self, optimizer: Optimizer, t: int) -> Iterator[None]:
        """As :meth:`converge`."""
        self.converge(optimizer, t, Occasion.CONSENSUS)
        yield

    def compare(self, optimizer: Optimizer, metrics: float, t: int) -> None:
        """Refused: metrics may come at any step, and must be equal on all replicas."""
        self._refuse("step(metrics=...)", t)

    def _refuse(self, what: str, t: int) -> NoReturn:
        raise ArgumentError(
            f"replicas of torchft meet only where a round ends, but got {what} at step {t}; evaluate and save at step "
            f"{self.steering.rounds.next_end(t)}, where all replicas are equal, and use a schedule without metrics"
        )

    def __getstate__(self) -> dict[str, Any]:
        """A manager cannot be copied: the copy has not joined."""
        return {**super().__getstate__(), "torchft": None, "_scheduler": None, "_trained": False}
