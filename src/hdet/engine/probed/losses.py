"""Probe losses, shared out over the ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.optim import Optimizer

from hdet.comm.group import ReplicaGroup, arriving
from hdet.comm.host import to_host
from hdet.engine.probe import ProbeBatch, ProbeFn, probed_loss, rng_put_back
from hdet.engine.probed.evaluated import evaluated
from hdet.errors import ArgumentError

__all__ = ["gathered", "loss_now"]


def gathered(
    group: ReplicaGroup,
    device: torch.device,
    what: str,
    losses: Sequence[Callable[[], Tensor]],
    measured: Sequence[Tensor],
) -> tuple[list[float], list[float]]:
    """The losses, of which each rank evaluates its own; and rank 0's ``measured``. Collective.

    Host and device are synchronised once for each kind of number, and random generators stay where they were. Whatever
    the user's probe raises on one rank, the others hear of it.
    """
    failure, mine, own = None, [math.nan] * len(losses), [math.nan] * len(measured)
    places = range(group.rank, len(losses), group.seat.size)
    try:
        with rng_put_back(device):
            found = [losses[i]() for i in places]
        values = to_host([*found, *measured])
        own = values[len(found) :]
        for i, value in zip(places, values, strict=False):
            mine[i] = value
    except Exception as error:
        failure = error
    with arriving(what):
        rows = group.gather([*mine, *own, float(failure is not None)], device)
    if failure is not None:
        raise failure
    failed = [rank for rank, row in enumerate(rows) if row[-1]]
    if failed:
        raise ArgumentError(f"the probe raised an error on the ranks {failed}; see their messages")
    return [rows[i % len(rows)][i] for i in range(len(losses))], rows[0][len(losses) : -1]


@torch.no_grad()
def loss_now(probe: ProbeFn, optimizer: Optimizer, device: torch.device) -> Tensor:
    """The probe's loss of the weights that the optimizer evaluates, inside :func:`rng_put_back`.

    A function of the user's own that draws its batch must draw the same one for every loss of a round.
    """
    again = nullcontext() if isinstance(probe, ProbeBatch) else rng_put_back(device)
    with evaluated(optimizer), again:
        return probed_loss(probe, inside=True)
