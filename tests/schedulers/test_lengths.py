"""Where a run begins and ends: torch's own rates where nothing is searched, one step too many."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR as TorchOneCycle

import hdet
from tests.problems import batch_of, final_loss, loss_of, network, recorded, said, train, weights_of
from tests.setup_runs import fixed_loss

Rates = list[tuple[Any, ...]]


def followed(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, steps: int) -> tuple[Rates, Tensor]:
    """Rates and momenta of every step, and the weights after the last."""
    seen: Rates = []
    for t in range(steps):
        optimizer.zero_grad()
        loss_of(model, batch_of(t)).backward()
        optimizer.step()
        group = optimizer.param_groups[0]
        seen.append((group["lr"], group.get("momentum"), group.get("betas")))
        scheduler.step()
    return seen, weights_of(model)


def made(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "adam":
        return torch.optim.Adam(model.parameters(), lr=0.02)
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)


@pytest.mark.parametrize("kind", ["adam", "sgd"])
@pytest.mark.parametrize("shape", [{}, {"three_phase": True}, {"pct_start": 0.1, "anneal_strategy": "linear"}])
def test_without_a_search_a_run_is_torchs(kind: str, shape: dict[str, Any]) -> None:
    """Warm-up and momenta included, bit for bit."""
    mine, theirs = network(), network()
    ours, plain = made(kind, mine), made(kind, theirs)
    scheduler = hdet.OneCycleLR(ours, "auto", total_steps=120, auto_lr=False, **shape)
    rates, weights = followed(mine, ours, scheduler, 119)
    expected, their_weights = followed(theirs, plain, TorchOneCycle(plain, 0.02, total_steps=120, **shape), 119)
    assert rates == expected
    assert torch.equal(weights, their_weights)


@pytest.mark.parametrize("max_lr", ["auto", 0.02])
def test_one_step_too_many_is_torchs_error(max_lr: Any) -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    scheduler = hdet.OneCycleLR(optimizer, max_lr, total_steps=50)
    train(model, optimizer, scheduler, range(50))
    before = weights_of(model)
    with pytest.raises(ValueError, match="Tried to step 51 times"):
        scheduler.step()
    assert torch.equal(weights_of(model), before)


@pytest.mark.parametrize("steps", [10, 39])
def test_a_run_too_short_for_a_search_says_so(steps: int) -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    with recorded() as caught:
        scheduler = hdet.OneCycleLR(optimizer, "auto", total_steps=steps)
        train(model, optimizer, scheduler, range(steps - 1))
    (words,) = said(caught)
    assert "40" in words
    assert str(steps) in words


@pytest.mark.parametrize("steps", [10, 39])
def test_a_run_too_short_for_a_search_has_torchs_rates(steps: int) -> None:
    """Without a search nobody holds the rise."""
    mine, theirs = network(), network()
    ours, plain = made("adam", mine), made("adam", theirs)
    with recorded():
        scheduler = hdet.OneCycleLR(ours, "auto", total_steps=steps)
        rates, _ = followed(mine, ours, scheduler, steps - 1)
    expected, _ = followed(theirs, plain, TorchOneCycle(plain, 0.02, total_steps=steps), steps - 1)
    assert rates == expected


def test_a_run_just_long_enough_searches_without_a_warning() -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-6)
    with recorded() as caught:
        scheduler = hdet.OneCycleLR(optimizer, "auto", total_steps=60)
        train(model, optimizer, scheduler, range(60))
    assert not caught
    assert final_loss(model) < 2 * fixed_loss(torch.optim.Adam, 0.03, 60)
