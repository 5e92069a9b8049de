"""Parameter groups that are added while a OneCycle or a search trains, as layers that are thawed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import hdet
from tests.problems import batch_of, final_loss, loss_of, network
from tests.processes import run_ranks

STEPS = 200
ADDED = 80


def scheduler_of(optimizer: torch.optim.Optimizer, max_lr: float | str, total_steps: int, **arguments: Any) -> Any:
    """A OneCycle, or the search if ``max_lr`` is "auto"."""
    if max_lr == "auto":
        return hdet.auto(optimizer, total_steps)
    return hdet.OneCycleLR(optimizer, max_lr, total_steps, **arguments)  # type: ignore[arg-type]


def thawed(group: dict[str, Any], steps: int = STEPS, *, max_lr: float | str, **arguments: Any) -> tuple[Any, Any]:
    """The first layer joins the optimizer in the middle of the run."""
    model: Any = network()
    model[0].requires_grad_(False)
    optimizer = torch.optim.Adam(model[2].parameters(), lr=0.01)
    scheduler = scheduler_of(optimizer, max_lr, STEPS, **arguments)
    for t in range(steps):
        if t == ADDED:
            model[0].requires_grad_(True)
            optimizer.add_param_group({"params": list(model[0].parameters()), **group})
        one_step(model, scheduler, t)
    return model, scheduler


def one_step(model: nn.Module, scheduler: Any, t: int) -> None:
    scheduler.optimizer.zero_grad()
    loss = loss_of(model, batch_of(t))
    loss.backward()
    scheduler.optimizer.step()
    scheduler.step(*([loss.detach()] if hasattr(scheduler, "observe") else []))


def test_a_group_with_a_peak_follows_the_schedule_as_if_it_had_been_there() -> None:
    arguments: dict[str, Any] = {"div_factor": 10.0, "final_div_factor": 50.0, "max_momentum": 0.9}
    _, scheduler = thawed({"max_lr": 0.03}, ADDED + 30, max_lr=0.01, **arguments)
    expected: Any = network()
    groups = [{"params": expected[2].parameters()}, {"params": expected[0].parameters()}]
    whole = torch.optim.lr_scheduler.OneCycleLR(torch.optim.Adam(groups), [0.01, 0.03], STEPS, **arguments)
    for t in range(ADDED + 30):
        one_step(expected, whole, t)
    assert scheduler.get_last_lr() == pytest.approx(whole.get_last_lr(), rel=1e-12)
    momenta = [[group["betas"][0] for group in one.optimizer.param_groups] for one in (scheduler, whole)]
    assert momenta[0] == momenta[1]
    assert scheduler.base_lrs_now == scheduler.get_last_lr()


@pytest.mark.parametrize("lr", [{}, {"lr": 0.003}])
def test_a_search_takes_the_groups_rate_for_its_guess(lr: dict[str, float]) -> None:
    model, scheduler = thawed(lr, max_lr="auto")
    rates = [float(group["lr"]) for group in scheduler.optimizer.param_groups]
    assert rates[1] == pytest.approx(rates[0] * lr.get("lr", 0.01) / 0.01)
    only_last = thawed({}, ADDED, max_lr="auto")[0]
    assert final_loss(model) < 0.8 * final_loss(only_last)


def test_of_several_optimizers_any_may_get_one() -> None:
    model: Any = network()
    model[0].bias.requires_grad_(False)
    parts = [torch.optim.SGD([model[0].weight], lr=0.01), torch.optim.Adam(model[2].parameters(), lr=0.001)]
    scheduler = hdet.auto(parts, total_steps=STEPS)
    for t in range(ADDED + 20):
        if t == ADDED:
            model[0].bias.requires_grad_(True)
            parts[0].add_param_group({"params": [model[0].bias], "lr": 0.02})
        model.zero_grad()
        loss = loss_of(model, batch_of(t))
        loss.backward()
        for part in parts:
            part.step()
        scheduler.step(loss.detach())
    rates = scheduler.get_last_lr()
    assert rates == pytest.approx([rates[0], 2 * rates[0], 0.1 * rates[0]])


def test_without_a_peak_the_cure_is_named_before_anything_is_changed() -> None:
    _, scheduler = thawed({}, 15, max_lr=0.01, sync_every=10)
    optimizer = scheduler.optimizer
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    groups = repr(optimizer.param_groups)
    words = r"param_groups\[1\].* no max_lr.*; .*add_param_group\(.*\"max_lr\""
    for call in (scheduler.step, lambda: scheduler.step(0.5), lambda: scheduler.base_lrs_now, scheduler.state_dict):
        with pytest.raises(hdet.ArgumentError, match=words):
            call()
    assert (scheduler.last_epoch, scheduler._run.losses.count) == (15, 5)
    assert repr(optimizer.param_groups) == groups
    optimizer.param_groups[1]["max_lr"] = 0.02  # the cure, late
    scheduler.step(0.5)
    assert scheduler.last_epoch == 16


@pytest.mark.parametrize("value", ["0.1", -1.0, float("nan"), None])
def test_a_peak_that_is_no_rate_is_refused(value: Any) -> None:
    _, scheduler = thawed({}, 10, max_lr=0.01)
    scheduler.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "max_lr": value})
    with pytest.raises(hdet.ArgumentError, match=r"max_lr of param_groups\[1\] must be"):
        scheduler.step(0.5)


@pytest.mark.parametrize("max_lr", [0.01, "auto"])
@pytest.mark.parametrize("steps", [ADDED + 20, ADDED])
def test_its_state_can_be_loaded(max_lr: Any, steps: int) -> None:
    model, scheduler = thawed({"max_lr": 0.03}, steps, max_lr=max_lr)
    if steps == ADDED:  # saved before the next step
        scheduler.optimizer.add_param_group({"params": list(model[0].parameters()), "max_lr": 0.03})
    states = copy.deepcopy((scheduler.state_dict(), scheduler.optimizer.state_dict(), model.state_dict()))
    again: Any = network()
    groups = [{"params": again[2].parameters()}, {"params": again[0].parameters()}]
    optimizer = torch.optim.Adam(groups, lr=0.01)
    resumed = scheduler_of(optimizer, max_lr, STEPS)
    again.load_state_dict(states[2])
    resumed.load_state_dict(states[0])
    optimizer.load_state_dict(states[1])
    model[0].requires_grad_(True)
    one_step(model, scheduler, steps)
    one_step(again, resumed, steps)
    assert resumed.get_last_lr() == scheduler.get_last_lr()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["optimizer first", "scheduler first"])
@pytest.mark.parametrize("max_lr", ["auto", 0.1])
def test_a_group_that_was_added_after_the_scheduler_was_built_is_loaded(max_lr: Any, order: tuple[int, int]) -> None:
    """By load_state_dict alone, before any step."""

    def build() -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)
        more = {} if max_lr == "auto" else {"cycle_momentum": False}
        scheduler = scheduler_of(optimizer, max_lr, 100, **more)
        optimizer.add_param_group({"params": torch.nn.Linear(2, 2).parameters(), "lr": 0.2, "max_lr": 0.2})
        return optimizer, scheduler

    first, second = build(), build()
    for _ in range(5):
        first[0].step()
        first[1].step()
    states = [part.state_dict() for part in first]
    for number in order:
        second[number].load_state_dict(copy.deepcopy(states[number]))
    assert second[1].state_dict()["hdet"] == states[1]["hdet"]
    assert [g["lr"] for g in second[0].param_groups] == [g["lr"] for g in first[0].param_groups]


@pytest.mark.slow
def test_replicas_that_train_apart_take_it_in() -> None:
    first, second = run_ranks(_two_replicas, 2)
    assert first["groups"] == second["groups"] == 2
    assert first["rates"] != second["rates"]
    assert torch.equal(first["weights"], second["weights"])


def _two_replicas(rank: int) -> dict[str, Any]:
    model, scheduler = thawed({"max_lr": 0.03}, ADDED + 22, max_lr=0.01, sync_every=10)
    rates = scheduler.get_last_lr()
    with scheduler.consensus():
        weights = model[0].weight.detach().clone()
    return {"groups": len(rates), "rates": rates, "weights": weights}


def test_while_another_scheduler_has_its_turn() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9)
    warm_up = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=0.1, total_iters=100)
    ours = hdet.OneCycleLR(optimizer, 0.5, 20)
    both = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm_up, ours], milestones=[5])
    for t in range(10):
        if t == 3:
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "max_lr": 1.0})
        optimizer.step()
        both.step()
    rates = both.get_last_lr()
    assert rates[1] == pytest.approx(2 * rates[0])
