"""Elastic replicas: they come and go, on torchft. A round ends with a meeting of those that are there.

A round keeps the places that its replicas got when it began. At its end, a replica that is gone is left out, as one
whose weights are not finite. The members of the meeting get the places of the next round.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, NoReturn

import torch.distributed as dist
from torch.optim import Optimizer

from hdet.checks import must_be
from hdet.copies import copies_of, write_
from hdet.ensemble.converge import converge, is_finite, refuse_diverged
from hdet.ensemble.replicas import Replicas
from hdet.ensemble.signals import ProbeBatch, ProbeLoss, Signal
from hdet.ensemble.steering import Ending, Outcome
from hdet.errors import ArgumentError, ShardedParametersError
from hdet.journal.file import mapped
from hdet.journal.writer import Clock
from hdet.ranks.agreement import Agreement, Occasion, RankReport, agree, check_equal, in_text
from hdet.ranks.average import average_
from hdet.ranks.group import ManagedGroup, ReplicaGroup, ReplicaIndex, Solo, connect
from hdet.ranks.shards import is_distributed
from hdet.ranks.torchft import FailedTry, Torchft
from hdet.ranks.weights import ReplicaTensors, Weights, fingerprint_of_words

_log = logging.getLogger("hdet")


class Member(NamedTuple):
    """What a replica first tells the others of its quorum."""

    has_trained: bool
    """Whether it has trained in the round. If not, it has just come, or has loaded a peer's state."""
    place: int
    """Its place in the round."""
    has_loss: bool
    """Whether it has observed losses."""
    history: float
    """A fingerprint of all meetings so far, of the step and of what was learned."""
    name: str


@dataclass(eq=False)
class ElasticReplicas(Replicas):
    """The replicas of torchft, seen from one of them. The user's ``group=`` is that of its ``rank_group``."""

    arguments: Mapping[str, str] = field(init=False)
    """Must be equal on all replicas, as texts."""
    scheduler: Any = field(default=None, init=False)
    """Its state goes to a replica that comes, and a peer's state is loaded into it. None before this one has joined."""
    place: ReplicaIndex | None = field(default=None, init=False)
    """This replica's place in the round; None before it has joined."""
    history: float = field(default=0.0, init=False)
    """A fingerprint of all meetings so far."""
    members: Sequence[str] = field(default=(), init=False)
    """The names of the replicas that were in the last meeting, in the order of their places."""
    healed_at: int | None = field(default=None, init=False)
    """The step of the peer whose state was loaded in this quorum."""
    has_trained: bool = field(default=False, init=False)
    """Whether this replica has trained in the round."""

    def __post_init__(self) -> None:
        check_signal(self.signal)
        self.arguments = {**in_text(self.journal_writer.arguments), **self.rank_group.alike}

    @property
    def torchft(self) -> Torchft:
        """The user's ``group=``."""
        group = self.rank_group.user_group
        assert isinstance(group, Torchft)
        return group

    @property
    def replica_index(self) -> ReplicaIndex:
        """This replica's place."""
        return self.place or Solo.replica_index

    def _beside(self) -> ReplicaGroup:
        """The ranks that are one replica of torchft's, which is this one's. A collective of them the first time."""
        return connect(None) if self.torchft.ranks > 1 else Solo()

    def _check_step(self, optimizer: Optimizer, t: int) -> None:
        """Raise unless the replica has joined before the first step."""
        if self.place is None:
            raise ArgumentError(
                f"step() was called at step {t} before the replica has joined; call group.join(scheduler) before the "
                "loop, where group is what hdet.torchft(manager) gave"
            )

    # -- coming ---------------------------------------------------------------------------------------------------

    def join(self, scheduler: Any, schedule: Callable[[int], list[float]], t: int) -> int:
        """Meet the others for the first time, at step ``t``. Collective.

        The state of ``scheduler`` goes to replicas that come later, and a state that a peer sends is loaded into it.
        Returns how many steps the others are ahead of that state: 1 if they have ended a round in this meeting, else 0.
        """
        optimizer: Optimizer = scheduler.optimizer
        ended, clock = time.perf_counter(), Clock()
        if self.place is not None:
            raise ArgumentError("join() was called before; call it once, before the loop")
        weights = self.replica_tensors.first_weights(optimizer, needs_model=True)
        if any(map(is_distributed, weights.tensors)):
            raise ShardedParametersError(
                "the weights are sharded (DTensor), but replicas that come and go must hold a whole model on each "
                "rank; use hdet.arms(mesh, dim) without torchft, or DistributedDataParallel inside a replica"
            )
        check_ranks(self.torchft.ranks, self.replica_tensors)
        if self.torchft.ranks > 1 and dist.get_rank() > 0:  # of several ranks that are one replica, the first writes
            self.journal_writer.give_up()
        self.scheduler = scheduler
        try:
            self.torchft.manager.register_state_dict_fn("hdet", self._heal, self._sent)
        except AssertionError:
            raise ArgumentError(
                "the manager serves another scheduler already, whose state it sends to those who come; make one "
                "manager for each scheduler"
            ) from None
        self.journal_writer.lock(Solo(), writes=True)
        outcome = self._meet_in_quorum(Ending(optimizer, (t, t + 1), schedule), RankReport(), clock)
        if outcome is not None:
            self._settle(outcome, ended, clock)
        self.journal_writer.begin_round()
        return int(outcome is not None)

    # -- the meeting ----------------------------------------------------------------------------------------------

    def _meet(self, end: Ending, signal: float | None, clock: Clock) -> Outcome:
        """Meet, and go on as the members have agreed. Arguments as in :meth:`Replicas._meet`."""
        device = self.replica_tensors.weights(end.optimizer).device
        rows = self._beside().gather([self.losses.mean(), math.nan if signal is None else signal], device)
        loss, probed = (sum(column) / len(column) for column in zip(*rows, strict=True))
        own = RankReport(loss, self.losses.count > 0, None if signal is None else probed, self.journal_writer.is_kept)
        outcome = self._meet_in_quorum(end, own, clock)
        assert outcome is not None  # this replica has trained
        return outcome

    def _meet_in_quorum(self, end: Ending, own: RankReport, clock: Clock) -> Outcome | None:
        """Quorum, exchange, mean, commit. Tries until a try is committed; a try that is not leaves nothing behind.

        Returns:
            the round that has ended; None if no replica has trained before.
        """
        deadline = time.monotonic() + self.torchft.timeout
        while True:
            self.healed_at = None
            place = ReplicaIndex(*self.torchft.quorum(deadline))
            if self.healed_at is not None:
                end = end._replace(span=(self.healed_at, self.healed_at + 1))
            clock.lap("quorum")
            weights = self.replica_tensors.weights(end.optimizer)
            copies = copies_of(weights.tensors) if place.size > 1 else []
            failure, members, outcome = None, list[Member](), None
            try:
                group = ManagedGroup(self.torchft.manager, place, weights.device)
                members, outcome = self._try(end, own, group, clock)
                group.gather([1.0])  # after this all have the mean, so that no replica commits while another cannot
            except FailedTry as error:
                failure = error
                _log.warning("replica %r: a meeting failed, and is tried again: %s", self.torchft.name, error)
            if self.torchft.commit(failure) and failure is None:
                self._remember([member.name for member in members])
                self.place = place
                return outcome
            if copies:
                write_(weights.tensors, copies)

    def _try(
        self, end: Ending, own: RankReport, group: ManagedGroup, clock: Clock
    ) -> tuple[list[Member], Outcome | None]:
        """The members, and what they make of the round, if a replica has trained; it counts once that is committed.

        Changes weights and, if they are averaged, optimizer state.
        """
        before, places = end.span[0], len(self.members)
        history = self._fingerprint(str(before))
        mine = Member(self.has_trained, self.replica_index.replica, own.has_loss, history, self.torchft.name)
        members = group.gather_objects(mine)
        trained = [member for member in members if member.has_trained]
        weights = self.replica_tensors.weights(end.optimizer)
        if not trained:
            self._agree_to_begin(group, before, weights, history)
            return members, None
        usual = Counter(member.history for member in trained).most_common(1)[0][0]
        odd = [member for member in members if member.history != usual]
        if odd:
            if mine in odd:
                self.torchft.request_state()
            raise FailedTry(f"{', '.join(m.name for m in odd)} met apart from the others, and will load their state")
        if not self.has_trained:
            own = RankReport(has_loss=trained[0].has_loss, keeps_journal=self.journal_writer.is_kept)
        equal = not self.steering.has_spread
        roll = agree(group, Occasion.ROUND_END, before, weights, own, expect_equal=equal)
        counted = replace(roll, finite=[f and m.has_trained for f, m in zip(roll.finite, members, strict=True)])
        what = self.steering.name_of(end)
        if not any(counted.live):
            refuse_diverged(counted, what, group.rank)
        of_trained = of_members(roll, [i for i, member in enumerate(members) if member.has_trained])
        refuse_diverged(of_trained, what, group.rank)
        clock.lap("gather")
        row = {member.place: i for i, member in enumerate(members) if member.has_trained}
        rows = [row.get(place) for place in range(places)]
        place = ReplicaIndex(mine.place if mine.has_trained else 0, places)
        of_places = of_members(counted, rows)
        bases, update = self.steering.decide(end, of_places, place)
        clock.lap("controller")
        divergence = None
        if group.replica_index.size > 1:
            distances = converge(group, group, weights, counted, measure=counted.writer is not None)
            divergence = None if distances is None else [0.0 if i is None else distances[i] for i in rows]
        clock.lap("converge")
        keeps_state = counted.live[group.rank] or not self.has_trained or is_finite(end.optimizer)
        absent = [place for place, i in enumerate(rows) if i is None]
        joined = [member.name for member in members if not member.has_trained]
        told = {"names": list(self.members), "absent": absent, "joined": joined}
        writes = self.journal_writer.is_kept
        return members, Outcome(end, of_places, place, bases, update, divergence, keeps_state, writes, told)

    def _agree_to_begin(self, group: ManagedGroup, t: int, weights: Weights, history: float) -> None:
        """No replica has trained: raise unless all have the same arguments and have loaded the same state."""
        beside = self._beside()
        if beside.replica_index.size > 1:  # each has loaded the weights of another replica: those of the first count
            average_(weights.tensors, beside, [rank == 0 for rank in range(beside.replica_index.size)])
        given = {**self.arguments, "what was loaded": str(history)}
        agree(group, Occasion.FIRST_STEP, t, weights, RankReport(), expect_equal=False, arguments=given)

    # -- what replicas that come and go have in common -------------------------------------------------------------

    def _fingerprint(self, *words: str) -> float:
        """A number for all meetings so far, for what was learned (to nine digits, since machines may round apart), and
        for some words."""
        learned = {"spreads": [spec.spread for spec in self.steering.specs], **self.steering.state()}
        rounded = mapped(learned, lambda value: f"{value:.9g}" if isinstance(value, float) else value)
        return fingerprint_of_words([repr(self.history), repr(self.members), repr(rounded), *words])

    def _remember(self, members: Sequence[str]) -> None:
        """A meeting counts: these replicas were in it."""
        self.history, self.members = self._fingerprint(*members), list(members)
        self.has_trained = True

    def _sent(self) -> dict[str, Any]:
        """What a newcomer needs. The tensors themselves: no replica changes them before the newcomer has them."""
        optimizer, model = self.scheduler.optimizer, self.replica_tensors.model
        weights = self.replica_tensors.weights(optimizer)
        return {
            "arguments": dict(self.arguments),
            "meetings": (self.history, self.members),
            "weights": None if model is not None else [t.detach() for t in (*weights.parameters, *weights.still)],
            "model": model.state_dict() if model is not None else None,
            "optimizer": optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
        }

    def _heal(self, state: Mapping[str, Any]) -> None:
        """Take the state that a peer had when it came to the meeting.

        Raises before anything is changed if the replicas were given other arguments.
        """
        cure = f"Rank 1 is this replica, {self.torchft.name!r}: give it the arguments of the others."
        check_equal([state["arguments"], self.arguments], cure)
        model, optimizer = self.replica_tensors.model, self.scheduler.optimizer
        if model is not None:
            model.load_state_dict(state["model"])
        else:
            weights = self.replica_tensors.weights(optimizer)
            own = [*weights.parameters, *weights.still]
            write_(own, [value.to(tensor) for tensor, value in zip(own, state["weights"], strict=True)])
        optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.history, self.members = state["meetings"]
        self.healed_at, self.has_trained = self.scheduler.last_epoch, False

    # -- what has no quorum ---------------------------------------------------------------------------------------

    def converge(self, optimizer: Optimizer, t: int, occasion: Occasion = Occasion.CONVERGE) -> None:
        """Do nothing right after a round, when replicas are equal. Inside a round it is refused."""
        if self.steering.rounds.is_inside(t):
            self._refuse(f"{occasion.name.lower()}()", t)

    @contextmanager
    def consensus(self, optimizer: Optimizer, t: int) -> Iterator[None]:
        """Do nothing right after a round, as :meth:`converge`."""
        self.converge(optimizer, t, Occasion.CONSENSUS)
        yield

    def compare(self, optimizer: Optimizer, metrics: float, t: int) -> None:
        """Refuse: metrics may come at any step, and must be equal on all replicas."""
        self._refuse("step(metrics=...)", t)

    def _refuse(self, what: str, t: int) -> NoReturn:
        raise ArgumentError(
            f"replicas of torchft meet only where a round ends, but got {what} at step {t}; evaluate and save at step "
            f"{self.steering.rounds.next_end(t)}, where all replicas are equal, and use a schedule without metrics"
        )

    def __getstate__(self) -> dict[str, Any]:
        """A manager cannot be copied: the copy, which has a scheduler of its own, has not joined."""
        return {**super().__getstate__(), "scheduler": None, "place": None, "has_trained": False}


def check_signal(signal: Signal) -> None:
    """Raise for a probe whose batches come from one rank: replicas that come and go find them by themselves."""
    if isinstance(signal, ProbeLoss) and isinstance(signal.fn, ProbeBatch):
        loader, cure = signal.fn.loader, "replicas that come and go must find the batch of a round by themselves"
        fits = isinstance(loader, (list, tuple)) or callable(loader)
        must_be("a list of batches or batch_fn(round) with torchft", fits, cure, loader=loader)


def check_ranks(ranks: int, replica_tensors: ReplicaTensors) -> None:
    """Raise unless several ranks can be one replica: they need a process group of their own, and equal moments."""
    has_group = dist.is_available() and dist.is_initialized() and dist.get_world_size() == ranks
    if ranks > 1 and not (has_group and replica_tensors.with_state):
        raise ArgumentError(
            f"the manager says that a replica has {ranks} ranks: they need a process group, over which losses are "
            "averaged, and averaged moments, since torchft brings each rank those of another peer; call "
            'init_process_group in each replica, and use optimizer_state="average"'
        )


def of_members(roll: Agreement, rows: Sequence[int | None]) -> Agreement:
    """An agreement of some of the members alone, by their rows; None stands for a replica that is gone: not live."""
    return replace(
        roll,
        losses=[math.nan if i is None else roll.losses[i] for i in rows],
        signals=[math.nan if i is None else roll.signals[i] for i in rows],
        finite=[i is not None and roll.finite[i] for i in rows],
    )
