"""The rate of a group that is added during a search: given as a guess, or derived from a rate that was found."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import hdet
from tests.problems import batch_of, loss_of, network

STEPS, ADDED, GUESS = 200, 100, 1e-6


def begun(lr: Any = GUESS, **arguments: Any) -> tuple[Any, torch.optim.Optimizer, hdet.AutoScheduler]:
    """A network whose first layer joins the optimizer later, at step ``ADDED`` of the run."""
    model: Any = network()
    optimizer = torch.optim.Adam(model[2].parameters(), lr=lr)
    scheduler = hdet.auto(optimizer, STEPS, **arguments)
    train(model, optimizer, scheduler, range(ADDED))
    return model, optimizer, scheduler


def train(model: nn.Module, optimizer: Any, scheduler: Any, steps: range) -> float:
    """Train, and return the last loss."""
    for t in steps:
        model.zero_grad()
        loss = loss_of(model, batch_of(t))
        loss.backward()
        optimizer.step()
        scheduler.step(loss.detach())
    return float(loss.detach())


def test_a_rate_that_is_derived_from_a_found_one_keeps_its_ratio() -> None:
    """As Lightning's BaseFinetuning gives it: a tenth of what the first group has now."""
    model, optimizer, scheduler = begun()
    before = train(copy.deepcopy(model), torch.optim.SGD(model.parameters(), lr=0.0), Idle(), range(1))
    optimizer.add_param_group({"params": model[0].parameters(), "lr": optimizer.param_groups[0]["lr"] / 10})
    last = train(model, optimizer, scheduler, range(ADDED, STEPS - 1))
    first, added = scheduler.get_last_lr()
    assert added == pytest.approx(first / 10)
    assert scheduler.guesses == pytest.approx([GUESS, GUESS / 10])
    assert last < before


class Idle:
    """A scheduler that does nothing."""

    def step(self, loss: Any) -> None: ...


@pytest.mark.parametrize("ratio", [0.1, 1.0, 30.0])
def test_a_rate_near_the_guesses_is_a_guess(ratio: float) -> None:
    model, optimizer, scheduler = begun()
    optimizer.add_param_group({"params": model[0].parameters(), "lr": GUESS * ratio})
    train(model, optimizer, scheduler, range(ADDED, ADDED + 5))
    first, added = scheduler.get_last_lr()
    assert added == pytest.approx(first * ratio)


def test_a_group_that_takes_torchs_default_shares_its_tensor() -> None:
    """torch gives all groups one tensor, in which the found rate stands."""
    model, optimizer, scheduler = begun(torch.tensor(GUESS, dtype=torch.float64))
    rate = float(optimizer.param_groups[0]["lr"])
    optimizer.add_param_group({"params": model[0].parameters()})
    train(model, optimizer, scheduler, range(ADDED, ADDED + 1))
    assert [float(group["lr"]) for group in optimizer.param_groups] == pytest.approx([rate, rate], rel=0.1)


def test_its_first_step_is_made_at_the_rate_that_was_found() -> None:
    model, optimizer, scheduler = begun(10.0)
    optimizer.add_param_group({"params": model[0].parameters(), "lr": 10.0})
    before = [p.detach().clone() for p in model[0].parameters()]
    model.zero_grad()
    loss_of(model, batch_of(ADDED)).backward()
    optimizer.step()
    moved = max(float((p - old).abs().max()) for p, old in zip(model[0].parameters(), before, strict=True))
    rate = float(scheduler.get_last_lr()[1])
    assert rate == optimizer.param_groups[1]["lr"] == optimizer.param_groups[0]["lr"] < 1.0
    assert moved == pytest.approx(rate, rel=0.01)  # Adam's first step


def test_a_state_tells_the_rates_that_the_optimizer_has() -> None:
    model, optimizer, scheduler = begun(10.0)
    optimizer.add_param_group({"params": model[0].parameters(), "lr": 10.0})
    scheduler.state_dict()
    assert scheduler.get_last_lr() == [group["lr"] for group in optimizer.param_groups]


def test_a_copy_of_the_scheduler_hears_of_its_own_optimizer() -> None:
    model, optimizer, scheduler = copy.deepcopy(begun(10.0))
    optimizer.add_param_group({"params": model[0].parameters(), "lr": 10.0})
    model.zero_grad()
    loss_of(model, batch_of(ADDED)).backward()
    optimizer.step()
    assert len(scheduler.get_last_lr()) == 2


@pytest.mark.parametrize(
    "schedule", [None, lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS), lambda t: 1 - t / STEPS]
)
def test_a_copy_of_a_group_has_its_rate(schedule: Any) -> None:
    model, optimizer, scheduler = begun(schedule=schedule)
    optimizer.add_param_group({**optimizer.param_groups[0], "params": list(model[0].parameters())})
    train(model, optimizer, scheduler, range(ADDED, ADDED + 20))
    first, added = scheduler.get_last_lr()
    assert added == pytest.approx(first)


@pytest.mark.parametrize(
    "schedule",
    [
        pytest.param(
            lambda o: lr_scheduler.LambdaLR(o, lambda t: 1 - t / STEPS),
            marks=pytest.mark.skipif(torch.__version__ < "2.11", reason="LambdaLR of old torch leaves the group alone"),
        ),
        lambda o: lr_scheduler.OneCycleLR(o, GUESS, STEPS),
    ],
)
def test_a_schedule_that_knows_nothing_of_it_says_what_to_do(schedule: Any) -> None:
    model, optimizer, scheduler = begun(schedule=schedule)
    optimizer.add_param_group({"params": model[0].parameters(), "lr": GUESS})
    with pytest.raises(hdet.ArgumentError, match=r"has no rate for a parameter group that was added .*; give a func"):
        train(model, optimizer, scheduler, range(ADDED, ADDED + 2))


def test_a_search_that_is_over_lets_go_of_the_rates(recwarn: pytest.WarningsRecorder) -> None:
    model, optimizer, scheduler = begun()
    train(model, optimizer, scheduler, range(ADDED, STEPS))
    again = hdet.auto(optimizer, STEPS)
    train(model, optimizer, again, range(20))
    assert [float(rate) for rate in again.get_last_lr()] == [group["lr"] for group in optimizer.param_groups]
    assert not [one for one in recwarn if "had written" in str(one.message)]
