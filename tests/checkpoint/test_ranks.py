"""Saving and loading on several ranks: one file for all, and an error of one is everybody's."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import hdet
from hdet.checkpoint import saving
from tests.checkpoint.files import names
from tests.models import batch, make_optimizer, two_layer
from tests.processes import error_of, run_ranks

ROUND, STEPS, WHOLE_BATCH = 5, 60, 12


def replica(rank: int, steps: int = STEPS) -> tuple[nn.Module, torch.optim.Optimizer, hdet.OneCycleLR]:
    model = DistributedDataParallel(two_layer())
    optimizer = make_optimizer("adam", [list(model.parameters())])
    return model, optimizer, hdet.OneCycleLR(optimizer, 0.01, steps, sync_every=ROUND, spread=0.5)


def train(rank: int, parts: tuple[Any, ...], begin: int, end: int) -> None:
    model, optimizer, scheduler = parts
    for step in range(begin, end):
        x, y = batch(step, rank)
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step(loss)


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


# -- replicas that train apart ----------------------------------------------------------------------------------------


def _save_inside_a_round(rank: int, path: str, at: int) -> tuple[torch.Tensor, torch.Tensor]:
    parts = replica(rank)
    train(rank, parts, 0, at)
    before = flat(parts[0]).clone()
    hdet.save(path, model=parts[0], optimizer=parts[1], scheduler=parts[2], step=at)
    with parts[2].consensus():  # the user's own: saved as it is
        hdet.save(f"{path}.inside", model=parts[0], step=at)
    return before, flat(parts[0])


def _load(rank: int, path: str) -> tuple[torch.Tensor, int, list[float]]:
    model, optimizer, scheduler = replica(rank)
    step = hdet.load(path, model=model, optimizer=optimizer, scheduler=scheduler)["step"]
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    weights = flat(model).clone()
    train(rank, (model, optimizer, scheduler), step, STEPS)
    return weights, step, rates


@pytest.mark.filterwarnings("ignore::hdet.ResumeWarning")
def test_the_consensus_is_saved_and_serves_other_numbers_of_ranks(tmp_path: Path) -> None:
    path = str(tmp_path / "run.pt")
    found = run_ranks(_save_inside_a_round, 3, path, 2 * ROUND + 2)
    own = torch.stack([before for before, _ in found])
    assert not torch.equal(own[0], own[1])
    assert all(torch.equal(before, after) for before, after in found)  # each goes on with its own
    assert sorted(os.listdir(tmp_path)) == ["run.pt", "run.pt.inside"]  # and no lock: the writer has ended
    loaded = run_ranks(_load, 2, path)
    for weights, step, _ in loaded:
        assert step == 2 * ROUND + 2
        assert torch.allclose(weights, own.mean(0), rtol=1e-14)
    assert loaded[0][2] != loaded[1][2]  # each has its own rate


def _save_at_the_end_of_a_round(rank: int, path: str) -> tuple[torch.Tensor, torch.Tensor]:
    parts = replica(rank)
    train(rank, parts, 0, 2 * ROUND)
    hdet.save(path, model=parts[0])
    other = two_layer(1)
    hdet.load(path, model=other)
    return flat(parts[0]), flat(other)


def test_at_the_end_of_a_round_nothing_is_rounded(tmp_path: Path) -> None:
    """The mean of three equal numbers may be another number."""
    for mine, saved in run_ranks(_save_at_the_end_of_a_round, 3, str(tmp_path / "run.pt")):
        assert torch.equal(mine, saved)


# -- what goes wrong on one rank --------------------------------------------------------------------------------------


def _failing(rank: int, folder: str) -> list[str]:
    path, model = os.path.join(folder, "run.pt"), two_layer()
    said = []

    def note(action: Any) -> None:
        error = error_of(action)
        said.append(f"{type(error).__name__}: {error}")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    hdet.save(path, model=model, number=1)
    original, saving.write = saving.write, full
    note(lambda: hdet.save(path, model=model, number=2))
    saving.write = original
    note(lambda: hdet.save(path, keep=0 if rank == 1 else 2, model=model))
    note(lambda: hdet.load(path if rank == 0 else os.path.join(folder, "elsewhere.pt"), model=nn.Linear(rank + 6, 8)))
    other = two_layer(5) if rank == 0 else nn.Linear(3, 2)
    before = flat(other).clone()
    note(lambda: hdet.load(path, model=other))
    assert torch.equal(flat(other), before)  # on rank 0 too, which it would have fitted
    shards = distribute_tensor(torch.ones(4, 2), dist.device_mesh.init_device_mesh("cpu", (2,)))
    sharded = nn.Module()
    sharded.weight = nn.Parameter(shards)
    note(lambda: hdet.save(path, model=sharded))
    note(lambda: hdet.save(path, value={"deep": [shards]}))
    assert hdet.load(path, model=model) == {"number": 1}
    assert names(Path(folder)) == ["run.pt"]
    return said


def test_an_error_of_one_rank_is_everybodys(tmp_path: Path) -> None:
    first, second = run_ranks(_failing, 2, str(tmp_path))
    assert "OSError: [Errno 28] No space left on device" in first[0]
    assert second[0].startswith("CheckpointError: rank 0: writing ")
    assert second[1].startswith("ArgumentError: keep must be an integer, at least 1")
    assert first[1].startswith("CheckpointError: rank 1: keep must be")
    for said in (first, second):
        assert "the checkpoint's state of 'model' does not fit (RuntimeError" in said[2]
        assert "the checkpoint's state of 'model' does not fit" in said[3]
        assert "torch.distributed.checkpoint" in said[4]
        assert "torch.distributed.checkpoint" in said[5]
    assert first[4].startswith("ShardedParametersError: the part 'model' is sharded over the ranks")


# -- a search, on other numbers of ranks ------------------------------------------------------------------------------


def squared(model: nn.Module, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return (model(pair[0]) - pair[1]).square().mean()


def _search(rank: int, ranks: int, path: str, begin: int, end: int) -> list[float]:
    """Part of a search in float64; the ranks share every step's batch."""
    plain = two_layer(begin)  # a checkpoint replaces the weights
    model: nn.Module = DistributedDataParallel(plain) if ranks > 1 else plain
    optimizer = torch.optim.Adam(plain.parameters(), 1e-6)
    scheduler = hdet.auto(optimizer, total_steps=STEPS)
    parts = {"model": plain, "optimizer": optimizer, "scheduler": scheduler}
    rates = hdet.load(path, **parts)["rates"] if begin else []
    for step in range(begin, end):
        x, y = (part.chunk(ranks)[rank] for part in batch(step, 0, WHOLE_BATCH))
        optimizer.zero_grad()
        loss = squared(model, (x, y))
        loss.backward()
        optimizer.step()
        scheduler.step(loss.detach())
        rates.append(float(optimizer.param_groups[0]["lr"]))
    hdet.save(path, **parts, rates=rates)
    return rates


def test_a_search_goes_on_at_any_number_of_ranks(tmp_path: Path) -> None:
    alone = _search(0, 1, str(tmp_path / "alone.pt"), 0, STEPS)
    path = str(tmp_path / "run.pt")
    for ranks, begin, end in ((4, 0, 9), (2, 9, 24), (3, 24, STEPS)):
        found = run_ranks(_search, ranks, ranks, path, begin, end)
        assert all(rates == found[0] for rates in found)
    assert found[0] == pytest.approx(alone, rel=1e-9)
    assert max(alone) > 10 * alone[0]  # something was searched
