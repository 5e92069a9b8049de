"""Two ranks: an error on one reaches both, nothing is averaged that is equal, and sharded weights are refused."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import hdet
from tests.ranks import error_of, run_ranks
from tests.setups.problems import Batch, batch_of, loss_of, network

STEPS = 160


def _steps(ddp: nn.Module, optimizer: Any, scheduler: Any, steps: range) -> None:
    for t in steps:
        optimizer.zero_grad()
        loss_of(ddp, batch_of(t)).backward()
        optimizer.step()
        scheduler.step()


def _raises_late(rank: int) -> tuple[str, str]:
    """After all weights are ruined, only those to go back to have a low loss: rank 1 cannot bear to see one."""
    model = network()
    ddp = DistributedDataParallel(model)
    ruined = False

    def loss_fn(inner: nn.Module, batch: Batch) -> Tensor:
        loss = loss_of(inner, batch)
        if ruined and rank == 1 and float(loss) < 10:
            raise RuntimeError("out of memory")
        return loss

    optimizer = torch.optim.Adam(ddp.parameters(), lr=1e-3)
    scheduler = hdet.OneCycleLR(optimizer, "auto", total_steps=STEPS)
    _steps(ddp, optimizer, scheduler, range(80))
    ruined = True
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(30.0)
    error = error_of(lambda: _steps(ddp, optimizer, scheduler, range(80, STEPS)))
    return type(error).__name__, str(error)


def test_an_error_in_the_loss_of_earlier_weights_reaches_both_ranks() -> None:
    (kind, message), (other, words) = run_ranks(_raises_late, 2, timeout=30, group_timeout=10)
    assert (other, words) == ("RuntimeError", "out of memory")
    assert kind == "ArgumentError", message
    assert "[1]" in message


def _counts_all_reduces(rank: int) -> tuple[int, bool]:
    model = network()
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=1e-3)
    scheduler = hdet.OneCycleLR(optimizer, "auto", total_steps=100)
    _steps(ddp, optimizer, scheduler, range(7))
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
    scheduler: Any
    if face == "OneCycleLR":
        scheduler = hdet.OneCycleLR(optimizer, "auto", total_steps=100)
    else:
        scheduler = hdet.Ensemble(optimizer, fanout="probed", total_steps=100)
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    optimizer.param_groups[0]["params"] = [nn.Parameter(flat.chunk(2)[rank].clone())]

    def step() -> None:
        optimizer.param_groups[0]["params"][0].grad = torch.ones_like(flat.chunk(2)[rank])
        optimizer.step()
        scheduler.step()

    return type(error_of(step)).__name__


def test_parameters_that_were_replaced_are_told_so() -> None:
    for face in ("OneCycleLR", "Ensemble"):
        assert run_ranks(_partitions, 2, face, timeout=30, group_timeout=10) == ["ShardedParametersError"] * 2, face
