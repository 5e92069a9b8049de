"""Converge: every replica gets what the outer step makes of those that are live; by default their mean."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch import Tensor

from hdet.comm.average import Distance, average_
from hdet.comm.group import ReplicaGroup
from hdet.engine.rollcall import RollCall
from hdet.engine.trained.outer import Mean, OuterStep
from hdet.engine.weights import Weights
from hdet.errors import DivergedError

__all__ = ["converge", "refuse_diverged"]

_log = logging.getLogger("hdet")


def refuse_diverged(roll: RollCall, what: str) -> None:
    """Raise if no replica is live; otherwise say in the log who is left out."""
    if all(roll.live):
        return
    lines = [
        f"  replica {r}: loss {loss}, weights {'finite' if finite else 'not finite'}"
        for r, (loss, finite) in enumerate(zip(roll.losses, roll.finite, strict=True))
    ]
    if not any(roll.live):
        raise DivergedError(
            f"training has diverged in {what}: no replica has a finite loss and finite weights. The weights were left "
            "as they are.\n"
            + "\n".join(lines)
            + "\nGo back to a checkpoint and lower max_lr, or clip gradients; where "
            "gradients are shared, one replica's NaN reaches all of them through the all-reduce."
        )
    _log.warning("%s: replicas left out of the mean because they are not finite:\n%s", what, "\n".join(lines))


def converge(
    group: ReplicaGroup, weights: Weights, roll: RollCall, outer: OuterStep, *, measure: bool
) -> list[float] | None:
    """Merge what differs, in place. With ``measure`` also a second small gather:

    Returns:
        ``divergence[r]`` = ||theta_r - mean|| / ||mean|| over the parameters, or None.
    """
    equal = roll.moving_equal and all(roll.live)
    still = [] if roll.still_equal and all(roll.live) else weights.still
    rest = still if equal else [*weights.buffers, *weights.state, *still]
    distance: list[Distance] = []

    def average(parameters: Sequence[Tensor]) -> None:
        if measure:  # by themselves: running statistics would drown the parameters' distance
            distance.extend(d for d in [average_(parameters, group, roll.live, measure=True)] if d is not None)
            average_(rest, group, roll.live)
        else:
            average_([*parameters, *rest], group, roll.live)

    if equal and isinstance(outer, Mean):
        average([])
    else:
        outer.merge(weights.parameters, average, roll.live[group.seat.replica])
    if not measure:
        return None
    rows = group.gather([distance[0].relative()], weights.device)
    return [rows[ranks[0]][0] for ranks in group.members]
