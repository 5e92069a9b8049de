"""Converge: every replica gets the mean of those that are live."""

from __future__ import annotations

import logging

from hdet.comm.average import average_
from hdet.comm.group import ReplicaGroup
from hdet.engine.rollcall import RollCall
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


def converge(group: ReplicaGroup, weights: Weights, roll: RollCall, *, measure: bool) -> list[float] | None:
    """Average what differs, in place. With ``measure`` also a second small gather:

    Returns:
        ``divergence[r]`` = ||theta_r - mean|| / ||mean|| over the averaged weights, or None.
    """
    everybody_live = all(roll.live)
    differing = [] if roll.moving_equal and everybody_live else list(weights.moving)
    differing += [] if roll.still_equal and everybody_live else weights.still
    distance = average_(differing, group, roll.live, measure=measure)
    if distance is None:
        return None
    ratio = (distance.to_mean / distance.of_mean).sqrt() if differing else distance.to_mean
    return [row[0] for row in group.gather(ratio.reshape(1))]
