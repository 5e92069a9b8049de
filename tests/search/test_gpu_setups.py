"""Set-ups that only a GPU has: fp16 with a scaler, SyncBatchNorm, no float64, rates on the device, CUDA graphs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import hdet
from tests.gpu import no_synchronising
from tests.problems import (
    Records,
    batch_of,
    final_loss,
    first_steps,
    found_rate,
    loss_of,
    network,
    train,
    weights_of,
)
from tests.processes import run_ranks
from tests.setup_runs import fixed_loss, searching

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

STEPS = 300


def on_gpu(*middle: nn.Module) -> nn.Sequential:
    return network(*middle).cuda()


def plain(guess: float, journal: Path | None = None, steps: int = STEPS, *middle: nn.Module) -> float:
    """The final loss of the plain loop."""
    model = on_gpu(*middle)
    optimizer = torch.optim.Adam(model.parameters(), lr=guess)
    train(model, optimizer, searching(model, optimizer, steps, journal=journal), range(steps))
    return final_loss(model)


@pytest.mark.parametrize("guess", [1e-6, 10.0])
@pytest.mark.parametrize("around", ["forward", "everything"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_autocast_finds_what_fp32_finds(dtype: torch.dtype, around: str, guess: float, tmp_path: Path) -> None:
    best = plain(guess, tmp_path / "fp32.jsonl")
    journal = tmp_path / "cast.jsonl"
    model = on_gpu()
    optimizer = torch.optim.Adam(model.parameters(), lr=guess)
    scaler = torch.amp.GradScaler("cuda", enabled=dtype == torch.float16)
    scheduler = hdet.auto(optimizer, total_steps=STEPS, journal=journal)

    def update(loss: Tensor) -> None:
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step(loss.detach())

    for t in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype):
            loss = loss_of(model, batch_of(t))
            if around == "everything":
                update(loss)
        if around == "forward":
            update(loss)
    assert best < 0.3 * final_loss(on_gpu())
    assert final_loss(model) < 2 * best + 0.01
    assert 1 / 10 < found_rate(journal, guess) / found_rate(tmp_path / "fp32.jsonl", guess) < 10
    assert first_steps(journal) < 0.1 * STEPS


def _sync_batchnorm(rank: int) -> tuple[float, Tensor]:
    model = nn.SyncBatchNorm.convert_sync_batchnorm(on_gpu(nn.BatchNorm1d(32)))
    ddp = DistributedDataParallel(model, device_ids=[0])
    optimizer = torch.optim.Adam(ddp.parameters(), lr=1e-5)
    scheduler = hdet.auto(optimizer, total_steps=100)
    for t in range(100):
        optimizer.zero_grad()
        loss = loss_of(ddp, batch_of(2 * t + rank))
        loss.backward()
        optimizer.step()
        scheduler.step(loss.detach())
    return final_loss(model), weights_of(model).cpu()


def test_sync_batchnorm_over_two_ranks_does_not_hang() -> None:
    (loss, mine), (_, theirs) = run_ranks(_sync_batchnorm, 2)
    assert torch.equal(mine, theirs)
    assert loss < 1.5 * plain(1e-5, None, 100, nn.BatchNorm1d(32))


class NoDouble(TorchDispatchMode):
    """A device without float64, as MPS is."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.is_cuda and leaf.dtype in (torch.float64, torch.complex128):
                raise TypeError(f"{func} made a float64 tensor on the device")
        return out


@pytest.mark.parametrize("make", [hdet.auto, partial(hdet.OneCycleLR, max_lr=0.02)], ids=["auto", "trained"])
def test_a_run_needs_no_float64_on_the_device(make: Any) -> None:
    model = on_gpu(nn.BatchNorm1d(32))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    with NoDouble():
        scheduler = make(optimizer, total_steps=100, journal=Records(), model=model)
        for t in range(100):
            optimizer.zero_grad()
            loss = loss_of(model, batch_of(t))
            loss.backward()
            optimizer.step()
            scheduler.observe(loss)
            scheduler.observe(2.0)
            scheduler.step()
            if t in (10, 55):
                with scheduler.consensus():
                    pass
                scheduler.converge()
    best = (
        plain(0.02, None, 100, nn.BatchNorm1d(32))
        if make is hdet.auto
        else fixed_loss(torch.optim.Adam, 0.02, 100, partial(on_gpu, nn.BatchNorm1d(32)))
    )
    assert final_loss(model) < 1.5 * best


def test_a_search_on_any_schedule_needs_no_float64_on_the_device() -> None:
    model = on_gpu()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    with NoDouble():
        train(model, optimizer, searching(model, optimizer, 100, "schedule", journal=Records()), range(100))
    assert final_loss(model) < 2 * plain(0.02, None, 100)


def with_rate_on_the_device(model: nn.Module, guess: float) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=torch.tensor(guess, device="cuda"), capturable=True)


def test_a_rate_on_the_device_is_not_read_by_the_optimizers_step() -> None:
    """At the first step, in the search and after it."""
    model, journal = on_gpu(), Records()
    optimizer = with_rate_on_the_device(model, 1e-5)
    scheduler = hdet.auto(optimizer, total_steps=150, journal=journal)
    for t in range(150):
        optimizer.zero_grad()
        loss = loss_of(model, batch_of(t))
        loss.backward()
        with no_synchronising():
            optimizer.step()
        scheduler.step(loss.detach())
    assert any(record["estimated_rate"] > 0 for record in journal.rounds)
    assert final_loss(model) < 1.5 * plain(1e-5, None, 150)


@pytest.mark.parametrize("guess", [1e-5, 10.0])
@pytest.mark.parametrize("built", ["before-capture", "after-capture"])
@pytest.mark.covers("setups", "`capturable=True`, a captured CUDA graph", "from a guess 100 times too low")
def test_a_captured_step_finds_the_rate(built: str, guess: float) -> None:
    """Forward, backward and optimizer.step are one CUDA graph: hooks run at capture, never at a replay."""
    model = on_gpu()
    optimizer = with_rate_on_the_device(model, guess)
    x, y = (part.cuda() for part in batch_of(0))
    scheduler: Any = None
    if built == "before-capture":
        scheduler = hdet.auto(optimizer, total_steps=STEPS)
    loss = _warmed_up(model, optimizer, (x, y))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = _step(model, optimizer, (x, y))
    if scheduler is None:
        scheduler = hdet.auto(optimizer, total_steps=STEPS)
    for t in range(STEPS):
        for static, new in zip((x, y), batch_of(t), strict=True):
            static.copy_(new)
        graph.replay()
        scheduler.step(loss.detach())
    assert final_loss(model) < 1.5 * plain(guess)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> Tensor:
    optimizer.zero_grad(set_to_none=True)
    loss = nn.functional.mse_loss(model(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    return loss


def _warmed_up(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> Tensor:
    """As torch's documentation has it: a few steps on a side stream, at a rate that leaves the weights alone."""
    rate: Any = optimizer.param_groups[0]["lr"]
    was = rate.clone()
    rate.fill_(0.0)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            loss = _step(model, optimizer, batch)
    torch.cuda.current_stream().wait_stream(side)
    rate.copy_(was)
    return loss
