"""Converge: the mean over the live replicas, how far each was from it, and the error if none is live."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

from torch import Tensor
from torch.optim import Optimizer

from hdet.errors import DivergedError
from hdet.ranks.agreement import Agreement
from hdet.ranks.average import average_
from hdet.ranks.group import ReplicaGroup
from hdet.ranks.presence import listed
from hdet.ranks.shards import counted_once, local, place
from hdet.ranks.weights import Weights, fingerprint_of_words

_log = logging.getLogger("hdet")


def refuse_diverged(roll: Agreement, what: str, rank: int) -> None:
    """Raise on every rank if no replica is live; otherwise rank 0 says in the log who is left out."""
    if all(roll.live):
        return
    out = [r for r, live in enumerate(roll.live) if not live]
    finite = {True: "finite", False: "not finite"}
    lines = listed([f"replica {r}: loss {roll.losses[r]}, weights {finite[roll.finite[r]]}" for r in out])
    if not any(roll.live):
        raise DivergedError(
            f"training has diverged in {what}: no replica has a finite loss and finite weights. The weights were left "
            f"as they are.\n{lines}\nGo back to a checkpoint and lower max_lr, or clip gradients; if gradients are "
            "shared, one replica's NaN reaches all of them through the all-reduce."
        )
    if rank == 0:
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
