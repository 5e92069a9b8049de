"""Replicas that are sharded: each is a group of ranks, and only equal parts are averaged."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import hdet
from tests.processes import run_ranks
from tests.sharded_nets import Net, batch_of, loss_of, mesh_of, sharded, train, whole

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


def _all(rank: int, folder: Path) -> list[tuple[_Trained, _Trained]]:
    return [(_trained(rank, folder, True, own), _trained(rank, folder, False, own)) for own in (True, False)]


def _agree(ours: _Trained, theirs: _Trained) -> None:
    for now, then in zip(ours.weights, theirs.weights, strict=True):
        torch.testing.assert_close(now, then, rtol=1e-9, atol=1e-12)
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-9)
    assert ours.rates == pytest.approx(theirs.rates, rel=1e-9)
    for one, other in zip(ours.rounds, theirs.rounds, strict=True):
        assert one["base"] == pytest.approx(other["base"], rel=1e-9)
        for name in ("loss", "divergence"):
            mine, others = ([replica[name] for replica in r["replicas"]] for r in (one, other))
            assert mine == pytest.approx(others, rel=1e-9), name


@pytest.mark.slow
@pytest.mark.covers("frameworks", "plain loop, replicas", "HSDP", "fp64")
def test_sharded_replicas_train_as_whole_ones_do(tmp_path: Path) -> None:
    """With gradients of their own, and with those of all ranks."""
    answers = run_ranks(_all, 4, tmp_path)
    for answer in answers:
        for ours, theirs in answer:
            _agree(ours, theirs)
    for (first, _), (other, _) in zip(answers[0], answers[2], strict=True):  # ranks of two replicas,
        assert first.rates != other.rates
        assert not torch.equal(first.weights[1][0], other.weights[1][0])  # which come apart inside a round,
        assert all(map(torch.equal, first.weights[0], other.weights[0]))  # have one consensus,
        assert all(map(torch.equal, first.weights[2], other.weights[2]))  # and end as one
