"""A group that is added to any of several optimizers: all groups keep their own rates, also in checkpoints."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import ExponentialLR, LinearLR, SequentialLR, StepLR

import hdet

STEPS, ADDED, END = 120, 20, 60
GUESSES = (1e-2, 1e-4)
LATE = 1e-3


def falling(optimizer: Optimizer) -> ExponentialLR:
    return ExponentialLR(optimizer, 0.99)


def warmed_up(optimizer: Optimizer) -> SequentialLR:
    """Its parts multiply what the optimizer holds: they know all groups, late ones too."""
    warm_up = LinearLR(optimizer, start_factor=0.1, total_iters=10)
    return SequentialLR(optimizer, [warm_up, StepLR(optimizer, 30, gamma=0.5)], milestones=[10])


def begun(schedule: Any, late: int | None = None) -> tuple[list[nn.Linear], list[SGD], Any]:
    """Three layers, the third without an optimizer, or already in one of the two."""
    torch.manual_seed(0)
    layers = [nn.Linear(4, 8), nn.Linear(8, 1), nn.Linear(4, 1)]
    optimizers = [SGD(layers[i].parameters(), lr=GUESSES[i]) for i in range(2)]
    if late is not None:
        optimizers[late].add_param_group({"params": list(layers[2].parameters()), "lr": LATE})
    more = {} if schedule is None else {"schedule": schedule}
    return layers, optimizers, hdet.auto(optimizers, total_steps=STEPS, **more)


def train(layers: list[nn.Linear], optimizers: list[SGD], scheduler: Any, steps: range) -> list[list[list[float]]]:
    """The rates at which each step was made, by optimizer and group."""
    rates = []
    for t in steps:
        x = torch.randn(16, 4, generator=torch.Generator().manual_seed(t))
        loss = (layers[1](layers[0](x).tanh()) + layers[2](x) - x.sum(1, keepdim=True)).square().mean()
        for layer in layers:
            layer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        rates.append([[float(group["lr"]) for group in optimizer.param_groups] for optimizer in optimizers])
        scheduler.step(loss.detach())
    return rates


def grown(schedule: Any, late: int) -> tuple[list[nn.Linear], list[SGD], Any]:
    layers, optimizers, scheduler = begun(schedule)
    train(layers, optimizers, scheduler, range(ADDED))
    optimizers[late].add_param_group({"params": list(layers[2].parameters()), "lr": LATE})
    return layers, optimizers, scheduler


every_schedule = pytest.mark.parametrize("schedule", [None, falling, warmed_up])


@every_schedule
@pytest.mark.parametrize("late", [0, 1])
def test_rates_keep_the_ratios_of_the_guesses(schedule: Any, late: int) -> None:
    layers, optimizers, scheduler = grown(schedule, late)
    fallen = 0.99**ADDED if schedule is falling else 1.0  # before the late group was there
    for rates in train(layers, optimizers, scheduler, range(ADDED, END))[1:]:
        first, second = (own[0] for own in rates)
        assert second == pytest.approx(first * GUESSES[1] / GUESSES[0], rel=1e-9)
        assert rates[late][1] / second == pytest.approx(LATE / (GUESSES[1] * fallen), rel=1e-9)
    assert scheduler.get_last_lr() == [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]


@every_schedule
@pytest.mark.parametrize("late", [0, 1])
def test_a_resumed_run_goes_on_at_the_same_rates(schedule: Any, late: int) -> None:
    layers, optimizers, scheduler = grown(schedule, late)
    saved_at = ADDED + 15
    train(layers, optimizers, scheduler, range(ADDED, saved_at))
    states = copy.deepcopy([part.state_dict() for part in (*layers, *optimizers, scheduler)])
    search = copy.deepcopy(scheduler.search_state_dict())
    others, parts, resumed = begun(schedule, late)
    for part, state in zip((*others, *parts, resumed), states, strict=True):
        part.load_state_dict(state)
    resumed.load_search_state_dict(search)
    expected = train(layers, optimizers, scheduler, range(saved_at, END))
    assert train(others, parts, resumed, range(saved_at, END)) == expected
    assert all(torch.equal(a.weight, b.weight) for a, b in zip(layers, others, strict=True))


@every_schedule
@pytest.mark.parametrize("late", [0, 1])
def test_what_is_saved_before_the_next_step_has_the_group(schedule: Any, late: int) -> None:
    _, optimizers, scheduler = grown(schedule, late)
    state = copy.deepcopy(scheduler.state_dict())
    *_, resumed = begun(schedule, late)
    resumed.load_state_dict(state)
    for one in (scheduler, resumed):
        for optimizer in optimizers:
            optimizer.step()
        one.step(1.0)
    assert resumed.get_last_lr() == scheduler.get_last_lr()


def test_the_leading_group_stays_the_same() -> None:
    """The first optimizer is left alone: what was found is the second one's rate, also once the first has a group."""
    torch.manual_seed(0)
    layers = [nn.Linear(4, 8), nn.Linear(8, 1), nn.Linear(4, 1)]
    optimizers = [SGD(layers[0].parameters(), lr=0.0), SGD(layers[1].parameters(), lr=1e-2)]
    scheduler = hdet.auto(optimizers, total_steps=STEPS)
    train(layers, optimizers, scheduler, range(ADDED))
    optimizers[0].add_param_group({"params": list(layers[2].parameters()), "lr": 1e-6})
    train(layers, optimizers, scheduler, range(ADDED, STEPS // 3))
    rates = scheduler.get_last_lr()
    assert rates[0] == 0.0
    assert rates[1] == pytest.approx(1e-4 * rates[2])
    assert scheduler.found.rate > 1e-3


def test_a_group_that_brings_all_that_another_has_has_its_guess_too() -> None:
    layers, optimizers, scheduler = begun(None)
    train(layers, optimizers, scheduler, range(ADDED))
    like = {name: value for name, value in optimizers[0].param_groups[0].items() if name != "params"}
    optimizers[0].add_param_group({**like, "params": list(layers[2].parameters())})
    train(layers, optimizers, scheduler, range(ADDED, END))
    rates = scheduler.get_last_lr()
    assert rates == pytest.approx([rates[0], rates[0], rates[0] * GUESSES[1] / GUESSES[0]])
