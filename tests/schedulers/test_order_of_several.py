"""Several optimizers are stepped in any order, some not in every step: the search sees the same gradients."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

import hdet
from tests.problems import Records, batch_of, final_loss, loss_of, network, weights_of

STEPS = 120
Order = Callable[[int], list[int]]


def parts_of(model: nn.Module, make: Any = SGD, rates: tuple[float, float] = (1e-3, 1e-3)) -> list[Optimizer]:
    parameters = list(model.parameters())
    return [make(parameters[:2], lr=rates[0]), make(parameters[2:], lr=rates[1])]


def run(order: Order, *, zeros: bool = False, times: int = 1, **more: Any) -> tuple[list[Any], Tensor, Any]:
    """What the journal says of the search, the weights at the end, and the scheduler.

    ``zeros``: each has its gradients set to None after its own step; ``times``: steps for one of the scheduler.
    """
    model, journal = network(), Records()
    optimizers = parts_of(model, **more)
    scheduler = hdet.auto(optimizers, total_steps=STEPS, journal=journal)
    for t in range(STEPS):
        for _ in range(times):
            model.zero_grad()
            loss = loss_of(model, batch_of(t))
            loss.backward()
            for i in order(t):
                optimizers[i].step()
                if zeros:
                    optimizers[i].zero_grad()
        scheduler.step(loss.detach())
    return [(r["step"], r["event"], r["learned"]) for r in journal.rounds], weights_of(model), scheduler


def ordered(t: int) -> list[int]:
    return [0, 1]


def turned(t: int) -> list[int]:
    return [1, 0]


def mixed(t: int) -> list[int]:
    return random.Random(t).sample([0, 1], 2)


@pytest.mark.parametrize("make", [SGD, Adam])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("order", [turned, mixed])
def test_any_order_is_as_good_as_the_first(order: Order, zeros: bool, make: Any) -> None:
    rounds, weights, _ = run(order, zeros=zeros, make=make)
    expected, expected_weights, _ = run(ordered, make=make)
    assert rounds == expected
    assert torch.equal(weights, expected_weights)


@pytest.mark.parametrize("rates", [(0.0, 1e-3), (1e-3, 0.0)])
def test_one_at_rate_0_may_be_stepped_first_or_last(rates: tuple[float, float]) -> None:
    rounds, weights, _ = run(turned, rates=rates)
    expected, expected_weights, _ = run(ordered, rates=rates)
    assert rounds == expected
    assert torch.equal(weights, expected_weights)
    assert max(learned[0] for *_, learned in rounds) > 1


@pytest.mark.parametrize("order", [ordered, turned])
def test_steps_are_counted_where_the_scheduler_makes_fewer(order: Order) -> None:
    *_, scheduler = run(order, times=3)
    assert scheduler.search.steps.made == 3 * STEPS


def test_one_that_was_left_out_may_be_the_first_of_the_next_step() -> None:
    """Every second step the second optimizer is not stepped, and where it is, it is the first: no step is missed."""
    *_, scheduler = run(lambda t: [1, 0] if t % 2 else [0])
    assert scheduler.search.steps.made == STEPS


def scaled(order: Order, overflows: Callable[[int], int | None]) -> tuple[float, list[Any], Any]:
    """With a GradScaler, which leaves out the step of an optimizer whose gradients overflow."""
    model, journal = network(), Records()
    optimizers = parts_of(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
    scheduler = hdet.auto(optimizers, total_steps=STEPS, journal=journal)
    for t in range(STEPS):
        model.zero_grad()
        loss = loss_of(model, batch_of(t))
        scaler.scale(loss).backward()
        bad = overflows(t)
        if bad is not None:
            next(iter(optimizers[bad].param_groups[0]["params"])).grad.fill_(torch.inf)
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        for i in order(t):
            scaler.step(optimizers[i])
        scaler.update()
        scheduler.step(loss.detach())
    return final_loss(model), [(r["step"], r["event"], r["learned"]) for r in journal.rounds], scheduler


@pytest.mark.parametrize("bad", [0, 1])
def test_a_step_that_a_scaler_leaves_out_for_one_of_them(bad: int) -> None:
    def overflows(t: int) -> int | None:
        return bad if t % 20 == 5 else None

    loss, rounds, scheduler = scaled(turned, overflows)
    assert (loss, rounds) == scaled(ordered, overflows)[:2]
    assert scheduler.search.steps.made == STEPS
    undisturbed, *_ = scaled(ordered, lambda t: None)
    assert loss < 2 * undisturbed
