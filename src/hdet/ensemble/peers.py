"""Peers: what replicas of torchft say of themselves at a meeting, and the state that one sends to one that comes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch.distributed as dist

from hdet.copies import write_
from hdet.ensemble.steering import Steering
from hdet.journal.file import mapped
from hdet.ranks.agreement import Agreement, check_equal
from hdet.ranks.weights import ReplicaTensors, fingerprint_of_words


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


def mean_over_ranks(ranks: int, loss: float, signal: float | None) -> tuple[float, float | None]:
    """A replica's loss and signal: the mean over its ranks."""
    if ranks == 1:
        return loss, signal
    rows: list[Any] = [None] * ranks
    dist.all_gather_object(rows, (loss, signal))
    losses, signals = zip(*rows, strict=True)
    return sum(losses) / ranks, None if signal is None else sum(signals) / ranks


def of_members(roll: Agreement, rows: Sequence[int | None]) -> Agreement:
    """An agreement of some of the members alone, by their rows; None stands for a replica that is gone: not live."""
    return roll._replace(
        losses=[math.nan if i is None else roll.losses[i] for i in rows],
        signals=[math.nan if i is None else roll.signals[i] for i in rows],
        finite=[i is not None and roll.finite[i] for i in rows],
    )


@dataclass(eq=False)
class PeerState:
    """All that replicas which come and go have in common, seen from one of them.

    Args:
        steering: the values, and what moves them.
        replica_tensors: which tensors make up the replica.
        arguments: must be equal on all replicas, as texts.
        name: this replica's, for messages.
    """

    steering: Steering
    replica_tensors: ReplicaTensors
    arguments: Mapping[str, str]
    name: str
    scheduler: Any = field(default=None, init=False)
    """Its state goes to a replica that comes, and a peer's state is loaded into it."""
    history: float = field(default=0.0, init=False)
    """A fingerprint of all meetings so far."""
    members: Sequence[str] = field(default=(), init=False)
    """The names of the replicas that were in the last meeting, in the order of their places."""
    healed_at: int | None = field(default=None, init=False)
    """The step of the peer whose state was loaded in this quorum."""
    has_trained: bool = field(default=False, init=False)
    """Whether this replica has trained in the round."""

    def fingerprint(self, *words: str) -> float:
        """A number for all meetings so far, for what was learned (to nine digits, since machines may round apart), and
        for some words."""
        learned = {"spreads": [spec.spread for spec in self.steering.specs], **self.steering.state()}
        rounded = mapped(learned, lambda value: f"{value:.9g}" if isinstance(value, float) else value)
        return fingerprint_of_words([repr(self.history), repr(self.members), repr(rounded), *words])

    def remember(self, members: Sequence[str]) -> None:
        """A meeting counts: these replicas were in it."""
        self.history, self.members = self.fingerprint(*members), list(members)
        self.has_trained = True

    def sent(self) -> dict[str, Any]:
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

    def load(self, state: Mapping[str, Any]) -> None:
        """Take the state that a peer had when it came to the meeting. Raises before anything is changed."""
        cure = f"Rank 1 is this replica, {self.name!r}: give it the arguments of the others."
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

    def __getstate__(self) -> dict[str, Any]:
        """A copy has a scheduler of its own, with which it has not joined."""
        return {**vars(self), "scheduler": None, "has_trained": False}
