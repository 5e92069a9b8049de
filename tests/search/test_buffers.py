"""Buffers of a search on several ranks: each rank's batch norms see other batches, and one model comes out."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import hdet
from tests.problems import batch_of, loss_of, network
from tests.processes import run_ranks

STEPS = 60


class Cached(nn.Module):
    """Keeps a cache as long as its rank's batch needs, a mask with infinities, and a count."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.register_buffer("cache", torch.ones(length), persistent=False)
        self.register_buffer("mask", torch.tensor([0.0, -math.inf]))
        self.register_buffer("count", torch.tensor(length))

    def forward(self, h: Tensor) -> Tensor:
        return h


def shifted(rank: int, k: int) -> tuple[Tensor, Tensor]:
    x, y = batch_of(k)
    return x + 10 * rank, y


def step(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, rank: int, t: int) -> None:
    """Gradients are averaged by hand, so that nobody touches the buffers."""
    optimizer.zero_grad()
    loss = loss_of(model, shifted(rank, t))
    loss.backward()
    for p in model.parameters():
        assert p.grad is not None
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
    optimizer.step()
    scheduler.step(loss.detach())


def _consensus(rank: int) -> dict[str, Any]:
    model = network(nn.BatchNorm1d(32, momentum=0.5), Cached(3 + rank))
    norm: Any = model[1]
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scheduler = hdet.auto(optimizer, total_steps=STEPS, model=model)
    ends = []
    for t in range(STEPS - 3):
        step(model, optimizer, scheduler, rank, t)
        ends.append(norm.running_mean.clone())
    own = norm.running_mean.clone()
    with scheduler.consensus():
        inside = norm.running_mean.clone()
    after = norm.running_mean.clone()
    step(model, optimizer, scheduler, rank, STEPS - 3)
    norm.running_var.fill_(math.nan if rank == 0 else 2.0)
    scheduler.converge()
    cached: Any = model[2]
    return {
        "own": own,
        "inside": inside,
        "after": after,
        "ends": torch.stack(ends),
        "last": torch.cat([norm.running_mean, norm.running_var]),
        "cached": (cached.cache.tolist(), cached.mask.tolist(), int(cached.count)),
    }


def test_buffers_are_averaged_in_consensus_and_where_rounds_end() -> None:
    mine, theirs = run_ranks(_consensus, 2)
    assert (mine["own"] - theirs["own"]).abs().max() > 1  # they do come apart
    assert torch.equal(mine["inside"], theirs["inside"])
    assert torch.allclose(mine["inside"], (mine["own"] + theirs["own"]) / 2)
    assert torch.equal(mine["own"], mine["after"])
    assert torch.equal(theirs["own"], theirs["after"])
    equal = (mine["ends"] == theirs["ends"]).all(dim=1)
    assert 3 <= int(equal.sum()) < STEPS - 3  # at the ends of rounds, and only there
    assert torch.equal(mine["last"], theirs["last"])
    assert set(mine["last"][32:].tolist()) == {2.0}  # what is not finite reaches nobody
    assert mine["cached"] == ([1.0] * 3, [0.0, -math.inf], 3)
    assert theirs["cached"] == ([1.0] * 4, [0.0, -math.inf], 4)
