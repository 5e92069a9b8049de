"""The members of a meeting of replicas that come and go: what each first shows, and who had which place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from hdet.errors import ArgumentError
from hdet.ranks.agreement import Agreement
from hdet.ranks.group import ReplicaIndex, Solo
from hdet.ranks.rank_group import RankGroup


class Dealt(RankGroup):
    """The place that was dealt to this replica for the round; who is there shows at its end."""

    place: ReplicaIndex | None = None
    """None: not joined yet."""

    @property
    def replica_index(self) -> ReplicaIndex:
        return self.place or Solo.replica_index

    @property
    def is_due(self) -> bool:
        return False

    def check_step(self, t: int) -> None:
        if self.place is None:
            raise ArgumentError(
                f"step() was called at step {t} before the replica has joined; call group.join(scheduler) before the "
                "loop, where group is what hdet.torchft(manager) gave"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "place": None}


class Member(NamedTuple):
    """What each replica of a quorum first shows of itself."""

    trained: bool
    """Whether it has trained in the round. If not, it has just come, or lost what it had."""
    place: int
    """That was dealt to it for the round."""
    given: bool
    """Whether it has observed losses."""
    chain: float
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


def among(roll: Agreement, rows: Sequence[int]) -> Agreement:
    """What some of the members have agreed on."""
    return roll._replace(
        losses=[roll.losses[i] for i in rows],
        signals=[roll.signals[i] for i in rows],
        finite=[roll.finite[i] for i in rows],
    )


def as_dealt(roll: Agreement, members: Sequence[Member], places: int) -> Agreement:
    """What they have agreed on, in the order in which places were dealt; those who are gone are not live."""
    row = {member.place: i for i, member in enumerate(members) if member.trained}
    absent = len(members)
    padded = roll._replace(
        losses=[*roll.losses, float("nan")],
        signals=[*roll.signals, float("nan")],
        finite=[*roll.finite, False],
    )
    return among(padded, [row.get(place, absent) for place in range(places)])
