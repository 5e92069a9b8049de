"""Replicas that are sharded: each is a group of ranks, and only equal parts are averaged."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import hdet
from tests.ranks import run_ranks
from tests.setups.sharded import Net, batch_of, loss_of, mesh_of, sharded, train, whole

STEPS = 18


class _Trained(NamedTuple):
    weights: list[list[Tensor]]
    """Inside a consensus, after it, and at the end."""
    losses: list[float]
    rates: list[float]
    rounds: list[dict[str, Any]]


def _trained(rank: int, folder: Path, shards: bool, isolated: bool) -> _Trained:
    """Two replicas of two ranks, which share gradients among themselves (``isolated``) or with all."""
    mesh, model = mesh_of(2, 2), Net()
    arms = hdet.arms(mesh, "replicate")
    shares = arms.gradients if isolated else None
    if shards:
        sharded(model, mesh["shard"] if isolated else mesh)
    else:
        model.body = DistributedDataParallel(model.body, process_group=shares)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    journal = folder / f"{shards} {isolated}.jsonl"
    given: Any = {"group": arms, "model": model, "journal": journal if rank == 0 else None}
    scheduler = hdet.OneCycleLR(optimizer, 1e-2, STEPS, sync_every=6, spread=0.5, auto_lr_start=0, **given)
    rates = train(model, optimizer, scheduler, range(8), rank, 4, shares)
    with scheduler.consensus():
        inside, losses = whole(model), [_loss(model)]
    after = whole(model)
    losses.append(_loss(model))  # FSDP2 keeps what it has gathered for this, and must not for the next step
    rates += train(model, optimizer, scheduler, range(8, STEPS), rank, 4, shares)
    rounds = hdet.read_journal(journal).rounds if rank == 0 else []
    return _Trained([inside, after, whole(model)], [*losses, _loss(model)], rates, rounds)


@torch.no_grad()
def _loss(model: Net) -> float:
    return float(loss_of(model, batch_of(50_000)))


def _both(rank: int, folder: Path, isolated: bool) -> tuple[_Trained, _Trained]:
    return _trained(rank, folder, True, isolated), _trained(rank, folder, False, isolated)


@pytest.mark.parametrize("isolated", [True, False], ids=["one mesh each", "one mesh for all"])
def test_sharded_replicas_train_as_whole_ones_do(tmp_path: Path, isolated: bool) -> None:
    answers = run_ranks(_both, 4, tmp_path, isolated, timeout=60)
    for ours, theirs in answers:
        for now, then in zip(ours.weights, theirs.weights, strict=True):
            torch.testing.assert_close(now, then, rtol=1e-9, atol=1e-12)
        assert ours.losses == pytest.approx(theirs.losses, rel=1e-9)
        assert ours.rates == pytest.approx(theirs.rates, rel=1e-9)
        for now, then in zip(ours.rounds, theirs.rounds, strict=True):
            assert now["base"] == pytest.approx(then["base"], rel=1e-9)
            for one, other in zip(now["replicas"], then["replicas"], strict=True):
                assert one == pytest.approx(other, rel=1e-9)
    (first, _), (_, _), (third, _), _ = answers
    assert first.rates != third.rates  # two replicas,
    assert not torch.equal(first.weights[1][0], third.weights[1][0])  # which come apart inside a round,
    torch.testing.assert_close(first.weights[0], third.weights[0], rtol=0, atol=0)  # have one consensus,
    torch.testing.assert_close(first.weights[2], third.weights[2], rtol=0, atol=0)  # and end as one
