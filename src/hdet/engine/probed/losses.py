"""Probe losses, shared out over teams of ranks: one rank each or, where a forward pass takes several, those."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.distributed.group import ReplicaGroup, arriving
from hdet.distributed.host import to_host
from hdet.distributed.resharding import resharded
from hdet.engine.probe import ProbeBatch, ProbeFn, probed_loss, rng_put_back
from hdet.engine.probed.evaluated import evaluated
from hdet.errors import ArgumentError

__all__ = ["gathered", "loss_now"]


def gathered(
    group: ReplicaGroup,
    teams: Sequence[Sequence[int]],
    device: torch.device,
    what: str,
    losses: Sequence[Callable[[], Tensor]],
    measured: Sequence[Tensor],
    shown: Callable[[Sequence[float]], list[float]],
) -> tuple[list[float], list[list[float]]]:
    """The losses, of which each team evaluates its own, as means over the team; and what every rank shows. Collective.

    Host and device are synchronised once for each kind of number, and random generators stay where they were. Whatever
    the user's probe raises on one rank, the others hear of it.

    Args:
        group: all ranks.
        teams: the ranks that evaluate a loss together.
        device: of the weights.
        what: in words, should somebody not arrive.
        losses: to be evaluated.
        measured: numbers on the device.
        shown: makes of their values what this rank shows.
    """
    failure, mine, own = None, [math.nan] * len(losses), [math.nan] * len(measured)
    team = next(number for number, ranks in enumerate(teams) if group.rank in ranks)
    places = range(team, len(losses), len(teams))
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
        rows = group.gather([*mine, *shown(own), float(failure is not None)], device)
    if failure is not None:
        raise failure
    failed = [rank for rank, row in enumerate(rows) if row[-1]]
    if failed:
        raise ArgumentError(f"the probe raised an error on the ranks {failed}; see their messages")
    by_team = [[rows[rank][i] for rank in teams[i % len(teams)]] for i in range(len(losses))]
    return [sum(values) / len(values) for values in by_team], [row[len(losses) : -1] for row in rows]


@torch.no_grad()
def loss_now(probe: ProbeFn, optimizer: Optimizer, model: nn.Module | None, device: torch.device) -> Tensor:
    """The probe's loss of the weights that the optimizer evaluates, inside :func:`rng_put_back`.

    A function of the user's own that draws its batch must draw the same one for every loss of a round.
    """
    with evaluated(optimizer), nullcontext() if isinstance(probe, ProbeBatch) else _as_probe_batch(model, device):
        return probed_loss(probe, inside=True)


@contextmanager
def _as_probe_batch(model: nn.Module | None, device: torch.device) -> Iterator[None]:
    """What a :class:`ProbeBatch` does by itself."""
    with rng_put_back(device), resharded(model):
        yield
