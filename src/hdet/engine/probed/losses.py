"""Probe losses, shared out over the ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch.optim import Optimizer

from hdet.comm.group import ReplicaGroup, arriving
from hdet.engine.probe import ProbeFn, probed_loss, rng_put_back
from hdet.engine.probed.evaluated import evaluated
from hdet.engine.weights import trained_parameters
from hdet.errors import ArgumentError

__all__ = ["gathered", "loss_now"]


def gathered(
    group: ReplicaGroup,
    device: torch.device,
    what: str,
    losses: Sequence[Callable[[], float]],
    measured: Sequence[float],
) -> tuple[list[float], list[float]]:
    """The losses, of which each rank evaluates its own; and rank 0's ``measured``. Collective.

    Whatever the user's probe raises on one rank, the others hear of it.
    """
    failure, mine = None, [math.nan] * len(losses)
    try:
        for i in range(group.rank, len(losses), group.seat.size):
            mine[i] = losses[i]()
    except Exception as error:
        failure = error
    with arriving(what):
        rows = group.gather([*mine, *measured, float(failure is not None)], device)
    if failure is not None:
        raise failure
    failed = [rank for rank, row in enumerate(rows) if row[-1]]
    if failed:
        raise ArgumentError(f"the probe raised an error on the ranks {failed}; see their messages")
    return [rows[i % len(rows)][i] for i in range(len(losses))], rows[0][len(losses) : -1]


@torch.no_grad()
def loss_now(probe: ProbeFn, optimizer: Optimizer) -> float:
    """The probe's loss of the weights that the optimizer evaluates; random generators stay where they were."""
    parameters = trained_parameters(optimizer)
    with evaluated(optimizer), rng_put_back(parameters[0].device if parameters else torch.device("cpu")):
        return float(probed_loss(probe))
