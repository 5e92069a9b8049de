"""Where a run begins and ends: the plain schedule where nothing is searched, one step too many."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR as TorchOneCycle

import hdet
from hdet.schedulers.trapezoid import Trapezoid
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
def test_a_onecycle_without_a_controller_is_torchs(kind: str, shape: dict[str, Any]) -> None:
    """Warm-up and momenta included, bit for bit."""
    mine, theirs = network(), network()
    ours, plain = made(kind, mine), made(kind, theirs)
    scheduler = hdet.OneCycleLR(ours, 0.02, total_steps=120, auto_lr=False, **shape)
    rates, weights = followed(mine, ours, scheduler, 119)
    expected, their_weights = followed(theirs, plain, TorchOneCycle(plain, 0.02, total_steps=120, **shape), 119)
    assert rates == expected
    assert torch.equal(weights, their_weights)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda o: hdet.OneCycleLR(o, 0.02, total_steps=50), "Tried to step 51 times"),  # torch's own words
        (
            lambda o: hdet.auto(o, total_steps=50),
            r"step\(\) was called 51 times, but the run has 50 steps; give a larger total_steps",
        ),
    ],
    ids=["onecycle", "auto"],
)
def test_one_step_too_many_is_an_error_and_moves_nothing(make: Any, words: str) -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    scheduler = make(optimizer)
    train(model, optimizer, scheduler, range(50))
    before = weights_of(model), optimizer.param_groups[0]["lr"]
    with pytest.raises(ValueError, match=words):
        scheduler.step()
    assert torch.equal(weights_of(model), before[0])
    assert optimizer.param_groups[0]["lr"] == before[1]


@pytest.mark.parametrize("steps", [10, 39])
def test_a_run_too_short_for_a_search_says_so(steps: int) -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    with recorded() as caught:
        scheduler = hdet.auto(optimizer, total_steps=steps)
        train(model, optimizer, scheduler, range(steps - 1))
    (words,) = said(caught)
    assert "40" in words
    assert str(steps) in words


@pytest.mark.parametrize("steps", [10, 39])
@pytest.mark.parametrize("shape", ["trapezoid", "onecycle"])
def test_a_run_too_short_for_a_search_has_the_schedules_rates(shape: str, steps: int) -> None:
    """Without a search nobody holds the rise. Bit for bit; momenta are left alone."""

    def onecycle(optimizer: torch.optim.Optimizer) -> TorchOneCycle:
        return TorchOneCycle(optimizer, 0.02, total_steps=steps, cycle_momentum=False)

    mine, theirs = network(), network()
    ours, plain = made("adam", mine), made("adam", theirs)
    with recorded():
        scheduler = hdet.auto(ours, total_steps=steps, **({"schedule": onecycle} if shape == "onecycle" else {}))
        rates, weights = followed(mine, ours, scheduler, steps - 1)
    given: Any = onecycle(plain) if shape == "onecycle" else ByHand(plain, steps)
    expected, their_weights = followed(theirs, plain, given, steps - 1)
    assert rates == expected
    assert torch.equal(weights, their_weights)


class ByHand:
    """Writes the rates of the trapezoid, whose peak is the optimizer's rate."""

    def __init__(self, optimizer: torch.optim.Optimizer, steps: int) -> None:
        self.optimizer, self.peak, self.shape, self.t = (
            optimizer,
            optimizer.param_groups[0]["lr"],
            Trapezoid.of(steps),
            -1,
        )
        self.step()

    def step(self) -> None:
        self.t += 1
        self.optimizer.param_groups[0]["lr"] = self.shape.at(self.t, self.peak)


def test_a_run_just_long_enough_searches_without_a_warning() -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-6)
    with recorded() as caught:
        scheduler = hdet.auto(optimizer, total_steps=60)
        train(model, optimizer, scheduler, range(60))
    assert not caught
    assert final_loss(model) < 2 * fixed_loss(torch.optim.Adam, 0.03, 60)
