"""Autocast, bf16 weights and fp32 masters: the same rate is found as in fp32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import hdet
from tests.problems import (
    batch_of,
    final_loss,
    first_steps,
    found_rate,
    loss_of,
    network,
    quiet,
    train,
)

STEPS = 300
Loop = Callable[[nn.Module, Optimizer, Any], None]


def plain(model: nn.Module, optimizer: Optimizer, scheduler: Any) -> None:
    train(model, optimizer, scheduler, range(STEPS))


def cast_around_everything(model: nn.Module, optimizer: Optimizer, scheduler: Any) -> None:
    for t in range(STEPS):
        with torch.autocast("cpu", torch.bfloat16):
            optimizer.zero_grad()
            loss = loss_of(model, batch_of(t))
            loss.backward()
            optimizer.step()
            scheduler.step(loss.detach())


def cast_around_forward(model: nn.Module, optimizer: Optimizer, scheduler: Any) -> None:
    for t in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, batch_of(t))
        loss.backward()
        optimizer.step()
        scheduler.step(loss.detach())


def cast_around_everything_scheduler_first(model: nn.Module, optimizer: Optimizer, scheduler: Any) -> None:
    """The forward pass comes after a round's end here, which may have put other weights there."""
    loss = torch.zeros(())
    for t in range(STEPS):
        with torch.autocast("cpu", torch.bfloat16):
            if t > 0:
                scheduler.step(loss.detach())
            optimizer.zero_grad()
            loss = loss_of(model, batch_of(t))
            loss.backward()
            assert all(p.grad is not None for p in model.parameters())
            optimizer.step()


def auto(
    journal: Path,
    guess: float,
    loop: Loop = plain,
    make: Callable[..., Optimizer] = torch.optim.Adam,
    dtype: torch.dtype = torch.float32,
) -> tuple[float, float]:
    """Final loss and found rate."""
    model = network().to(dtype)
    optimizer = make(model.parameters(), lr=guess)
    scheduler = hdet.auto(optimizer, total_steps=STEPS, journal=journal)
    with quiet():
        loop(model, optimizer, scheduler)
    return final_loss(model), found_rate(journal, guess)


@pytest.mark.parametrize(
    ("loop", "guess"),
    [
        pytest.param(cast_around_forward, 1e-6, id="forward"),
        pytest.param(cast_around_everything, 1e-6, id="everything"),
        pytest.param(cast_around_everything, 10.0, id="everything-from-above"),
        pytest.param(cast_around_everything_scheduler_first, 1e-6, id="scheduler-first"),
    ],
)
@pytest.mark.covers("frameworks", "plain loop, search", "one process", "bf16 autocast")
def test_autocast_finds_what_fp32_finds(loop: Loop, guess: float, tmp_path: Path) -> None:
    best, rate = auto(tmp_path / "fp32.jsonl", guess)
    loss, found = auto(tmp_path / "cast.jsonl", guess, loop)
    assert best < 0.3 * final_loss(network())
    assert loss < 2 * best + 0.01
    assert rate / 10 < found < 10 * rate
    assert first_steps(tmp_path / "cast.jsonl") < 0.1 * STEPS


class WithMasters(Optimizer):
    """Adam on fp32 copies of low-precision weights, as mixed-precision optimizers keep them."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state, grad = self.state[p], p.grad.float()
                if not state:
                    state.update(step=0, master=p.float(), first=torch.zeros_like(grad), second=torch.zeros_like(grad))
                state["step"] += 1
                state["first"].lerp_(grad, 1 - beta1)
                state["second"].lerp_(grad.square(), 1 - beta2)
                first = state["first"] / (1 - beta1 ** state["step"])
                second = state["second"] / (1 - beta2 ** state["step"])
                state["master"].addcdiv_(first, second.sqrt().add_(1e-8), value=-float(group["lr"]))
                p.copy_(state["master"])


def adamw(params: Any, lr: float) -> Optimizer:
    return torch.optim.AdamW(params, lr=lr)


def sgd(params: Any, lr: float) -> Optimizer:
    return torch.optim.SGD(params, lr=lr, momentum=0.9)


@pytest.mark.parametrize(
    ("make", "guess"),
    [
        pytest.param(adamw, 3e-8, id="adamw-from-below"),
        pytest.param(adamw, 30.0, id="adamw-from-above"),
        pytest.param(sgd, 1e-7, id="sgd-from-below"),
        pytest.param(sgd, 100.0, id="sgd-from-above"),
        pytest.param(WithMasters, 3e-8, id="masters-from-far-below"),
        pytest.param(WithMasters, 3e-5, id="masters-from-below"),
        pytest.param(WithMasters, 30.0, id="masters-from-above"),
    ],
)
@pytest.mark.covers("frameworks", "plain loop, search", "one process", "bf16 weights")
def test_bf16_weights_find_what_fp32_weights_do(make: Any, guess: float, tmp_path: Path) -> None:
    """A relative step of 2e-3 is lost in bf16: the first step must not depend on it."""
    best, rate = auto(tmp_path / "fp32.jsonl", guess, make=make)
    loss, found = auto(tmp_path / "bf16.jsonl", guess, make=make, dtype=torch.bfloat16)
    assert first_steps(tmp_path / "fp32.jsonl") < 0.1 * STEPS
    assert first_steps(tmp_path / "bf16.jsonl") < 0.1 * STEPS
    assert loss < 2 * best + 0.05
    assert rate / 10 < found < 10 * rate
