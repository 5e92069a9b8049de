"""A small run of one replica, the same for stand-in and torchft, and what it must have come to."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import hdet
from hdet.ensemble.design import permutation
from tests.ensemble.twin import OneCycle

__all__ = ["EVERY", "SPREAD", "STEPS", "batch", "expected", "one_step", "replica", "seeded", "trained"]

STEPS, EVERY, SPREAD, SIGMA, RATE = 24, 4, 0.5, 0.02, 0.2
OFFSET = 0.25
"""Ranks of one replica tell different losses; the mean over them moves all replicas alike, and so nothing."""


class Net(nn.Module):
    """Two layers, running statistics and a counter, in float64 so that a mean's order of sums does not show."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.outer = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)
        self.to(torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.outer(torch.tanh(self.norm(self.inner(x))))
        return found


def seeded(seed: int) -> Net:
    """A net that is a function of the seed alone."""
    net, generator = Net(), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype) / 3)
    return net


def batch(name: str, t: int) -> tuple[Tensor, Tensor]:
    """What a replica trains on at a step: nothing else is random."""
    generator = torch.Generator().manual_seed(1000 * number_of(name) + t)
    x = torch.randn(16, 6, generator=generator, dtype=torch.float64)
    return x, x.sum(1, keepdim=True).sin() + 0.1 * torch.randn(16, 1, generator=generator, dtype=torch.float64)


def number_of(name: str) -> int:
    """ "r2" is 2, also after it came back."""
    return int(name[1])


def one_step(net: nn.Module, optimizer: torch.optim.Optimizer, name: str, t: int) -> Tensor:
    x, y = batch(name, t)
    loss: Tensor = nn.functional.mse_loss(net(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def replica(group: Any, name: str, **more: Any) -> tuple[Net, Any]:
    """A model, and the scheduler of its optimizer."""
    net = seeded(number_of(name))
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE, momentum=0.9)
    given = {"sync_every": EVERY, "spread": SPREAD, "auto_lr": hdet.Corrected(sigma=SIGMA), "auto_lr_start": 0, **more}
    return net, hdet.OneCycleLR(optimizer, RATE, group=group, model=net, **{"total_steps": STEPS, **given})


def trained(
    manager: Any,
    name: str,
    journal: Any = None,
    *,
    timeout: float = 120.0,
    passing: Callable[[str, int], None] = lambda point, t: None,
    rank: int = 0,
    spoiled: threading.Event | None = None,
    tells: bool = True,
    **more: Any,
) -> dict[str, Any]:
    """Join, train to the end, and say what came out."""
    group = hdet.torchft(manager, name=name, timeout=timeout)
    net, scheduler = replica(group, name, journal=journal, **more)
    group.join(scheduler)
    passing("joined", scheduler.last_epoch)
    while scheduler.last_epoch < scheduler.total_steps:
        loss = one_step(net, scheduler.optimizer, name, scheduler.last_epoch) + OFFSET * rank
        passing("step", scheduler.last_epoch)
        if spoiled is not None and spoiled.is_set():
            loss = loss * math.nan
            spoiled.clear()
        scheduler.step(loss if tells else None)
    return outcome(net, scheduler)


def outcome(net: nn.Module, scheduler: Any) -> dict[str, Any]:
    """All that must be equal on all replicas."""
    moments = [state["momentum_buffer"] for state in scheduler.optimizer.state.values()]
    return {
        "weights": [tensor.detach().clone() for tensor in net.state_dict().values()],
        "moments": [moment.clone() for moment in moments],
        "state": scheduler.state_dict()["hdet"],
        "step": scheduler.last_epoch,
    }


def expected(first: str, rounds: Sequence[dict[str, Any]], steps: int = STEPS, tells: bool = True) -> dict[str, Any]:
    """The run in one process, by the equations: in each round the members that a journal names, and nobody is lost.

    Where a round ends all replicas are equal, so there is one state: fan out, train each apart, take the mean.

    Args:
        first: whose weights the run began with.
        rounds: a journal's: of each the names to whom places were dealt, and who was absent at its end.
        steps: S.
        tells: whether losses were given, so that the base rate moves.
    """
    schedule = OneCycle(RATE, steps)
    net, t, m, v = seeded(number_of(first)), 0, 1.0, 0.0
    state: list[Tensor] = [x.clone() for x in net.state_dict().values()]
    moments: list[Tensor] | None = None
    for k, told in enumerate(rounds):
        n, end = len(told["names"]), told["step"]
        delta = max((n - 1) / 2, 1 / 2)
        rho = [1 + SPREAD * (r - (n - 1) / 2) / delta for r in permutation(0, k, 0, n)]
        ends, losses = [], []
        here = [r for r in range(n) if r not in told["absent"]]
        for r in here:
            copy_into(net, state)
            rates = {s: m * rho[r] * schedule.eta(s) for s in range(t, end)}
            after, loss = _apart(net, moments, told["names"][r], rates, schedule)
            ends.append(after)
            losses.append(loss)
        pairs = [
            [sum(xs) / len(here) if xs[0].is_floating_point() else xs[0] for xs in zip(*part, strict=True)]
            for part in zip(*ends, strict=True)
        ]
        state, moments = pairs[0], pairs[1]
        if len(here) > 1 and tells:
            mean = sum(losses) / len(losses)
            w = [math.exp((mean - loss) / SIGMA) for loss in losses]
            middle = sum(rho[r] for r in here) / len(here)  # 1, unless somebody is absent
            rel = sum(weight / sum(w) * (rho[r] - middle) for weight, r in zip(w, here, strict=True))
            v = 0.9 * v + 0.1 * rel
            m *= 1 + 0.5 * v
        t = end
    return {"weights": state, "moments": moments, "learned": m, "velocity": v, "step": t}


def copy_into(net: nn.Module, state: Sequence[Tensor]) -> None:
    net.load_state_dict(dict(zip(net.state_dict(), state, strict=True)))


def _apart(
    net: nn.Module,
    moments: Sequence[Tensor] | None,
    name: str,
    rates: dict[int, float],
    schedule: OneCycle,
) -> tuple[tuple[list[Tensor], list[Tensor]], float]:
    """One replica's round: weights and moments at its end, and its mean loss."""
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0, momentum=0.9)
    if moments is not None:
        for p, moment in zip(net.parameters(), moments, strict=True):
            optimizer.state[p] = {"momentum_buffer": moment.clone()}
    losses = []
    for t, rate in rates.items():
        optimizer.param_groups[0].update(lr=rate, momentum=schedule.momentum(t))
        losses.append(float(one_step(net, optimizer, name, t)))
    moved = [optimizer.state[p]["momentum_buffer"].clone() for p in net.parameters()]
    return ([x.clone() for x in net.state_dict().values()], moved), sum(losses) / len(losses)
