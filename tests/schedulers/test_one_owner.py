"""Who owns the rates of an optimizer: the last ``hdet.auto`` on it. What is no optimizer, and groups that go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR

import hdet
from tests.problems import final_loss, network, train

STEPS = 100
Built = tuple[torch.nn.Sequential, torch.optim.Optimizer]


def built(lr: float = 1e-4) -> Built:
    """Every parameter in a group of its own."""
    model = network()
    return model, torch.optim.Adam([{"params": [p]} for p in model.parameters()], lr=lr)


def trained(run: Built, scheduler: Any, steps: range = range(STEPS)) -> float:
    """Train, and say how good the model is."""
    train(*run, scheduler, steps)
    return final_loss(run[0])


def test_the_last_search_has_the_optimizer_whatever_became_of_the_one_before() -> None:
    beside = built()
    before = hdet.auto(beside[1], STEPS)
    alone = built(before.get_last_lr()[0])
    expected = trained(alone, hdet.auto(alone[1], STEPS))
    assert trained(beside, hdet.auto(beside[1], STEPS)) == expected
    assert str(before.found) == str(hdet.auto(built()[1], STEPS).found)  # it has not measured anything


@pytest.mark.parametrize("call", ["step", "finish"])
def test_a_search_that_was_replaced_says_so_and_changes_nothing(call: str) -> None:
    run = built()
    before, now = hdet.auto(run[1]), hdet.auto(run[1])
    trained(run, now, steps=range(30))
    rates = now.get_last_lr()
    with pytest.raises(hdet.ArgumentError, match="this Adam has got another one since; step that one"):
        before.step(1.0) if call == "step" else before.finish(10)
    assert [group["lr"] for group in run[1].param_groups] == rates
    assert before.last_epoch == 0


def test_a_search_goes_on_if_the_later_one_was_given_up() -> None:
    alone, beside = built(), built()
    expected = trained(alone, hdet.auto(alone[1], STEPS))
    scheduler, other = hdet.auto(beside[1], STEPS), hdet.auto(beside[1], STEPS)
    del other
    assert trained(beside, scheduler) == expected


@pytest.mark.parametrize(
    "build",
    [
        lambda one, model: hdet.auto(one, STEPS),
        lambda one, model: hdet.auto([one], STEPS),
        lambda one, model: hdet.OneCycleLR(one, 0.1, STEPS),
        lambda one, model: hdet.Ensemble(one),
        lambda one, model: hdet.Guard(one, model),
    ],
    ids=["auto", "auto of several", "OneCycleLR", "Ensemble", "Guard"],
)
@pytest.mark.parametrize(
    "made",
    [
        lambda optimizer: CosineAnnealingLR(optimizer, STEPS),
        lambda optimizer: hdet.auto(optimizer, STEPS),
        hdet.Ensemble,
    ],
    ids=["torch's", "auto's", "an Ensemble"],
)
def test_a_scheduler_is_no_optimizer(build: Callable[[Any, Any], Any], made: Callable[[Any], Any]) -> None:
    model, optimizer = built()
    scheduler = made(optimizer)
    with pytest.raises(
        (hdet.ArgumentError, TypeError),
        match=f"optimizer.*{type(scheduler).__name__}|{type(scheduler).__name__}.*Optimizer",
    ):
        build(scheduler, model)


@pytest.mark.parametrize("rate", [-1.0, float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("schedule", [None, lambda o: CosineAnnealingLR(o, STEPS)], ids=["trapezoid", "given"])
def test_a_group_is_added_at_a_rate_or_not_at_all(rate: float, schedule: Any) -> None:
    run = _, optimizer = built()
    scheduler = hdet.auto(optimizer, STEPS, schedule)
    trained(run, scheduler, steps=range(20))
    found = str(scheduler.found)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))], "lr": rate})
    with pytest.raises(
        hdet.ArgumentError, match=r"lr of the added param_groups\[4\] must be a number from 1e-14 to 1e\+14"
    ):
        scheduler.step()
    assert (str(scheduler.found), scheduler.last_epoch) == (found, 20)
    optimizer.param_groups[4]["lr"] = 1e-4
    assert trained(run, scheduler, steps=range(20, STEPS)) < 0.5


@pytest.mark.parametrize(
    "build",
    [
        lambda optimizer: hdet.auto(optimizer, STEPS),
        lambda optimizer: hdet.OneCycleLR(optimizer, 0.1, STEPS),
        lambda optimizer: hdet.Ensemble(optimizer, schedule=CosineAnnealingLR(optimizer, STEPS)),
    ],
    ids=["auto", "OneCycleLR", "Ensemble"],
)
def test_a_group_that_is_removed_is_explained(build: Any) -> None:
    run = _, optimizer = built()
    scheduler = build(optimizer)
    trained(run, scheduler, steps=range(5))
    del optimizer.param_groups[1]
    with pytest.raises(hdet.ArgumentError, match="this Adam has 3 and had 4; freeze its parameters"):
        scheduler.step()


def test_as_printed_leaves_a_group_at_rate_zero_there() -> None:
    """Its decay is a quotient of rates."""
    run = model, optimizer = built()
    first = next(model.parameters())
    before = first.detach().clone()
    arguments: dict[str, Any] = {"sync_every": 5, "auto_lr": hdet.AsPrinted()}
    scheduler = hdet.OneCycleLR(optimizer, [0.0, *[0.01] * 3], STEPS, **arguments)
    trained(run, scheduler)
    assert torch.equal(first, before)
    assert optimizer.param_groups[0]["lr"] == 0 < optimizer.param_groups[1]["lr"]
