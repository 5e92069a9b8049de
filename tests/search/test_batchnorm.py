"""Batch norms on two ranks, and frozen ones: a search changes no mode and no statistic.

What becomes of their statistics where training goes back: ``test_going_back.py``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from tests.problems import batch_of, loss_of, network, train, weights_of
from tests.processes import run_ranks
from tests.setup_runs import searching

STEPS = 60


def auto(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return optimizer, searching(model, optimizer, STEPS, "auto", known=True)


class Talking(nn.SyncBatchNorm):
    """A SyncBatchNorm that runs on the host: in train mode, with others around, its forward pass is a collective."""

    def forward(self, input: Tensor) -> Tensor:
        if self.training and dist.is_initialized():
            dist.all_reduce(torch.zeros(1))
            return functional.batch_norm(input, None, None, self.weight, self.bias, training=True, eps=self.eps)
        return super().forward(input)


def _with_sync_batchnorm(rank: int) -> tuple[float, Tensor]:
    """Gradients are averaged by hand: DistributedDataParallel takes SyncBatchNorm on a GPU only."""
    model = network(Talking(32))
    optimizer, scheduler = auto(model)
    for t in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, batch_of(2 * t + rank))
        loss.backward()
        for p in model.parameters():
            assert p.grad is not None
            dist.all_reduce(p.grad)
            p.grad /= 2
        optimizer.step()
        scheduler.step(loss.detach())
    last = loss_of(model, batch_of(999_999, 2000))
    return float(last.detach()), weights_of(model)


@pytest.mark.covers("setups", "SyncBatchNorm", "on two ranks")
def test_sync_batchnorm_does_not_hang() -> None:
    (loss, mine), (_, theirs) = run_ranks(_with_sync_batchnorm, 2)
    assert loss == pytest.approx(_in_one_process(), rel=0.05)
    assert torch.equal(mine, theirs)


def _in_one_process() -> float:
    """The same with a plain batch norm, which sees the ranks' batches one after the other."""
    model = network(nn.BatchNorm1d(32))
    optimizer, scheduler = auto(model)
    for t in range(STEPS):
        optimizer.zero_grad()
        losses = [loss_of(model, batch_of(2 * t + rank)) / 2 for rank in range(2)]
        for loss in losses:
            loss.backward()
        optimizer.step()
        scheduler.step(torch.stack(losses).sum().detach())
    return float(loss_of(model, batch_of(999_999, 2000)).detach())


def test_a_frozen_batchnorm_stays_frozen() -> None:
    model = network(nn.BatchNorm1d(32))
    norm: Any = model[1].eval()
    norm.running_mean.fill_(0.5)
    norm.running_var.fill_(4.0)
    optimizer, scheduler = auto(model)
    train(model, optimizer, scheduler, range(STEPS))
    assert model.training
    assert not norm.training
    assert set(norm.running_mean.tolist()) == {0.5}
    assert set(norm.running_var.tolist()) == {4.0}
