"""The members of a meeting of replicas that come and go: what each first says of itself, and which place it had."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from hdet.ranks.agreement import Agreement


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


def odd_members(members: Sequence[Member], trained: Sequence[Member]) -> list[Member]:
    """Members that met apart from the others before: their history is not that of most who have trained."""
    usual = Counter(member.history for member in trained).most_common(1)[0][0]
    return [member for member in members if member.history != usual]


def of_members(roll: Agreement, rows: Sequence[int | None]) -> Agreement:
    """An agreement of some of the members alone, by their rows; None stands for a replica that is gone."""
    return roll._replace(
        losses=[math.nan if i is None else roll.losses[i] for i in rows],
        signals=[math.nan if i is None else roll.signals[i] for i in rows],
        finite=[i is not None and roll.finite[i] for i in rows],
    )


def in_places(roll: Agreement, members: Sequence[Member], places: int) -> Agreement:
    """An agreement of the members by their places in the round. A replica that is gone is not live."""
    row = {member.place: i for i, member in enumerate(members) if member.has_trained}
    return of_members(roll, [row.get(place) for place in range(places)])


def distances_in_places(distances: Sequence[float], members: Sequence[Member], places: int) -> list[float]:
    """The members' distances from the mean by their places in the round; 0 for a replica that is gone."""
    of_place = {member.place: distances[i] for i, member in enumerate(members) if member.has_trained}
    return [of_place.get(place, 0.0) for place in range(places)]
