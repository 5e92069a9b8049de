"""Batch norms while probed: those that were training use the probe batch, nothing else changes, nobody talks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import hdet
from tests.ranks import run_ranks
from tests.setups.problems import Batch, batch_of, loss_of, network, train, weights_of

STEPS = 60


def by_batch(norm: Any, h: Tensor) -> Tensor:
    """What a batch norm gives with the statistics of this batch."""
    return functional.batch_norm(h, None, None, norm.weight, norm.bias, training=True, eps=norm.eps)


def by_running(norm: Any, h: Tensor) -> Tensor:
    return functional.batch_norm(h, norm.running_mean, norm.running_var, norm.weight, norm.bias, eps=norm.eps)


def auto(model: nn.Module, probe: hdet.ProbeBatch) -> tuple[torch.optim.Optimizer, hdet.OneCycleLR]:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return optimizer, hdet.OneCycleLR(optimizer, "auto", total_steps=STEPS, probe=probe)


class Talking(nn.SyncBatchNorm):
    """A SyncBatchNorm that runs on the host: in train mode, with others around, its forward pass is a collective."""

    def forward(self, input: Tensor) -> Tensor:
        if self.training and dist.is_initialized():
            dist.all_reduce(torch.zeros(1))
            return by_batch(self, input)
        return super().forward(input)


def test_sync_batchnorm_uses_the_probe_batch_without_being_in_train_mode() -> None:
    """In train mode its forward pass is a collective, which not every rank makes for every loss."""
    model = network(nn.SyncBatchNorm(32))
    seen: list[bool] = []

    def looks(inner: Any, batch: Batch) -> Tensor:
        h = inner[0](batch[0])
        assert torch.allclose(inner[1](h), by_batch(inner[1], h), atol=1e-5)
        seen.append(inner[1].training)
        return loss_of(inner, batch)

    optimizer, scheduler = auto(model, probe_of(model, looks))
    for t in range(10):
        optimizer.zero_grad()
        loss_of(model, batch_of(t)).backward()
        optimizer.step()
        before = [b.clone() for b in model.buffers()]
        scheduler.step()
        assert model[1].training
        assert all(torch.equal(a, b) for a, b in zip(before, model.buffers(), strict=True))
    assert seen
    assert not any(seen)


def _with_sync_batchnorm(rank: int) -> tuple[float, Tensor]:
    """Gradients are averaged by hand: DistributedDataParallel takes SyncBatchNorm on a GPU only."""
    model = network(Talking(32))
    optimizer, scheduler = auto(model, probe_of(model))
    for t in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, batch_of(2 * t + rank)).backward()
        for p in model.parameters():
            assert p.grad is not None
            dist.all_reduce(p.grad)
            p.grad /= 2
        optimizer.step()
        scheduler.step()
    loss = loss_of(model, batch_of(999_999, 2000))
    return float(loss.detach()), weights_of(model)


@pytest.mark.covers("setups", "SyncBatchNorm", "on two ranks")
def test_sync_batchnorm_with_a_loss_for_each_rank_does_not_hang() -> None:
    (loss, mine), (_, theirs) = run_ranks(_with_sync_batchnorm, 2, timeout=30, group_timeout=8)
    assert loss == pytest.approx(_in_one_process(), rel=0.05)
    assert torch.equal(mine, theirs)


def _in_one_process() -> float:
    """The same with a plain batch norm, which sees the ranks' batches one after the other."""
    model = network(nn.BatchNorm1d(32))
    optimizer, scheduler = auto(model, probe_of(model))
    for t in range(STEPS):
        optimizer.zero_grad()
        for rank in range(2):
            (loss_of(model, batch_of(2 * t + rank)) / 2).backward()
        optimizer.step()
        scheduler.step()
    return float(loss_of(model, batch_of(999_999, 2000)).detach())


def frozen() -> nn.Sequential:
    """With running statistics of its own, as a pretrained network has them."""
    model = network(nn.BatchNorm1d(32))
    norm: Any = model[1]
    norm.running_mean.fill_(0.5)
    norm.running_var.fill_(4.0)
    norm.eval()
    return model


def test_a_frozen_batchnorm_stays_frozen_while_probed() -> None:
    model = frozen()
    calls = []

    def looks(inner: Any, batch: Batch) -> Tensor:
        h = inner[0](batch[0])
        calls.append(inner[1].training)
        assert torch.allclose(inner[1](h), by_running(inner[1], h), atol=1e-5)
        return loss_of(inner, batch)

    optimizer, scheduler = auto(model, probe_of(model, looks))
    train(model, optimizer, scheduler, range(20))
    assert calls
    assert not any(calls)
    assert not model[1].training
    assert model.training


def test_a_frozen_batchnorm_is_probed_on_a_batch_of_one() -> None:
    model = frozen()
    optimizer, scheduler = auto(model, probe_of(model, size=1))
    train(model, optimizer, scheduler, range(20))
    assert not model[1].training


@pytest.mark.parametrize("everything", [False, True], ids=["some", "whole-model"])
def test_modes_are_as_before_and_only_what_was_training_trains(everything: bool) -> None:
    """Dropout is off, a batch norm that trains uses the batch, one that does not trains as little as before."""
    model = network(nn.BatchNorm1d(32), nn.Dropout(0.5), nn.BatchNorm1d(32), nn.Dropout(0.5))
    model[3].eval()
    model[4].eval()
    if everything:
        model.eval()
    modes = [m.training for m in model.modules()]

    def looks(inner: Any, batch: Batch) -> Tensor:
        h = inner[0](batch[0])
        first = by_running if everything else by_batch
        assert torch.allclose(inner[1](h), first(inner[1], h), atol=1e-5)
        assert torch.equal(inner[2](h), h)
        assert torch.allclose(inner[3](h), by_running(inner[3], h), atol=1e-5)
        assert torch.equal(inner[4](h), h)
        return loss_of(inner, batch)

    optimizer, scheduler = auto(model, probe_of(model, looks))
    for t in range(12):
        train(model, optimizer, scheduler, range(t, t + 1))
        assert [m.training for m in model.modules()] == modes


def test_batchnorm_without_running_statistics_is_probed_by_the_batch() -> None:
    """It uses the batch in either mode, and must still have no statistics afterwards."""
    model = network(nn.BatchNorm1d(32, track_running_stats=False))
    norm: Any = model[1]
    norm.eval()

    def looks(inner: Any, batch: Batch) -> Tensor:
        h = inner[0](batch[0])
        assert torch.allclose(inner[1](h), by_batch(inner[1], h), atol=1e-5)
        return loss_of(inner, batch)

    optimizer, scheduler = auto(model, probe_of(model, looks))
    train(model, optimizer, scheduler, range(12))
    assert norm.running_mean is None
    assert not norm.training
