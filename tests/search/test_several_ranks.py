"""Several ranks: whoever gives a loss, all decide alike; nothing is averaged that is equal; partitions are refused."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adam
from torch.utils._pytree import tree_leaves

import hdet
from tests.problems import (
    Records,
    batch_of,
    final_loss,
    loss_of,
    network,
    recorded,
    said,
    train,
    weights_of,
)
from tests.processes import error_of, run_ranks
from tests.setup_runs import FACES, fixed_loss, searching

STEPS = 160
GUESS = 1e-4


KINDS = ("all", "rank 0 alone", "NaN on one", "infinite on one", "late", "none")
"""Who gives a loss."""


def _told(kind: str, rank: int, loss: Tensor, t: int) -> list[Tensor]:
    if kind == "none" or (kind == "rank 0 alone" and rank > 0) or (kind == "late" and t < 20 * rank):
        return []
    bad = {"NaN on one": math.nan, "infinite on one": math.inf}.get(kind)
    return [torch.tensor(bad) if bad is not None and rank == 1 else loss]


class _Ended(NamedTuple):
    loss: float
    state: str
    tensors: list[Tensor]
    """Weights, what the optimizer remembers, and all that the search holds."""
    events: list[str]
    words: list[str]


def _kinds(rank: int) -> list[_Ended]:
    return [_of_kind(rank, kind) for kind in KINDS]


def _of_kind(rank: int, kind: str) -> _Ended:
    """Each rank has data of its own, and while the rate is searched the weights are ruined on all of them."""
    model, journal = network(), Records()
    ddp = DistributedDataParallel(model)
    optimizer = Adam(ddp.parameters(), lr=GUESS)
    with recorded() as caught:
        scheduler = hdet.auto(optimizer, total_steps=STEPS, journal=journal)
        for t in range(STEPS):
            optimizer.zero_grad()
            loss = loss_of(ddp, batch_of(3 * t + rank))
            loss.backward()
            optimizer.step()
            if t == 50:
                _ruin(model)
            scheduler.step(*_told(kind, rank, loss.detach(), t))
    held = tree_leaves([optimizer.state_dict()["state"], scheduler.search_state_dict()])
    tensors = [weights_of(model), *(leaf for leaf in held if isinstance(leaf, Tensor))]
    events = [r["event"] for r in journal.rounds if r["event"]]
    return _Ended(final_loss(model), repr(scheduler.state_dict()), tensors, events, said(caught))


@torch.no_grad()
def _ruin(model: nn.Module) -> None:
    for p in model.parameters():
        p.mul_(1e4)


@pytest.mark.slow
@pytest.mark.covers("frameworks", "plain loop, search", "DDP", "fp32")
def test_ranks_decide_alike_whoever_gives_a_loss() -> None:
    first, *others = run_ranks(_kinds, 3)
    good = fixed_loss(Adam, 0.03, STEPS)
    for number, kind in enumerate(KINDS):
        mine = first[number]
        for theirs in (other[number] for other in others):
            assert theirs.state == mine.state, kind
            assert len(theirs.tensors) == len(mine.tensors), kind
            assert all(map(torch.equal, theirs.tensors, mine.tensors)), kind
            assert theirs.words == [], kind  # one rank speaks for all
        later = [event for event in mine.events if event != "first_step"]
        assert "rolled_back" in later, kind
        assert len([words for words in mine.words if "rolled back to" in words]) == len(later), kind
        assert not any("loss was given" in words for words in mine.words), kind
        assert mine.loss < 2 * good, kind


def _counts_all_reduces(rank: int) -> tuple[int, bool]:
    model = network()
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=1e-3)
    scheduler = hdet.auto(optimizer, total_steps=100)
    train(ddp, optimizer, scheduler, range(7))
    before = [p.detach().clone() for p in model.parameters()]
    real, calls = dist.all_reduce, 0

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return real(*args, **kwargs)

    dist.all_reduce = counting
    try:
        with scheduler.consensus():
            same = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    finally:
        dist.all_reduce = real
    return calls, same


def test_consensus_of_a_search_averages_nothing() -> None:
    """All ranks hold the same weights: there is nothing to average."""
    for calls, same in run_ranks(_counts_all_reduces, 2):
        assert calls == 0
        assert same


def _partitions(rank: int, face: str) -> str:
    """As ZeRO does it: the optimizer holds this rank's part of the weights after the scheduler was built."""
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scheduler = searching(model, optimizer, 100, face)
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    optimizer.param_groups[0]["params"] = [nn.Parameter(flat.chunk(2)[rank].clone())]

    def step() -> None:
        optimizer.param_groups[0]["params"][0].grad = torch.ones_like(flat.chunk(2)[rank])
        optimizer.step()
        scheduler.step()

    return type(error_of(step)).__name__


def test_parameters_that_were_replaced_are_told_so() -> None:
    for face in FACES:
        assert run_ranks(_partitions, 2, face) == ["ShardedParametersError"] * 2, face
