"""lab/experiments/stacked.py: a row of the stack is a run by itself; shapes.py: schedules are torch's and hdet's."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from shapes import factors, onecycle, trapezoid
from stacked import Adam, Momentum, Stack, Supply, TrainStep

from hdet.rule.constants import DEFAULT
from hdet.rule.enums import Phase
from hdet.rule.state import State
from hdet.schedulers.trapezoid import Trapezoid
from lab.tests.experiments.small_tasks import CPU, bench, small

TORCH = {
    "adam": (Adam, lambda p: torch.optim.Adam(p, lr=1.0)),
    "sgd": (Momentum, lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.9)),
}


@pytest.mark.parametrize("optimizer", TORCH)
@pytest.mark.parametrize("name", ["feed", "text", "digits"])
def test_a_row_is_plain_training(name: str, optimizer: str) -> None:
    task, seeds, peaks, steps = small(name), [3, 5], [1e-3, 1e-2], 8
    stacked, plain = TORCH[optimizer]
    stack = Stack(task, seeds, len(peaks), CPU)
    table = bench(name=name, steps=steps).rates(stack, peaks, onecycle(steps))
    step = TrainStep(stack, stacked(stack.theta), Supply(task, seeds, steps, CPU).batches, table)
    for _ in range(steps):
        step()
    model = task.model(5)
    parameters = [p for group in task.groups(model) for p in group["params"]]
    optimizer_ = plain(parameters)
    for t in range(steps):
        optimizer_.param_groups[0]["lr"] = peaks[1] * onecycle(steps)[t]
        optimizer_.zero_grad()
        loss = task.loss(model, task.batch(5, t))
        loss.backward()
        optimizer_.step()
    flat = torch.cat([p.detach().flatten() for p in parameters])
    torch.testing.assert_close(step.losses[1, 1], loss.detach(), rtol=1e-6, atol=1e-9)
    # Some gradients are 0 but for rounding (the bias of a key), which Adam makes steps of.
    tolerance = 1e-9 if optimizer == "sgd" else peaks[1] * steps
    torch.testing.assert_close(stack.theta[1, 1], flat, rtol=0, atol=tolerance)


def test_validation_is_that_of_the_task() -> None:
    task = small("feed")
    stack = Stack(task, [0, 1], 2, CPU)
    assert stack.validation(stack.theta)[1, 0] == pytest.approx(task.evaluate(task.model(1))["loss"], rel=1e-9)


def test_quarters_are_the_batch() -> None:
    supply = Supply(small("feed"), [0, 1], 3, CPU)
    for quarters, whole in zip(supply.dealt(4), supply.batches, strict=True):
        assert torch.equal(torch.cat([quarters[2, r] for r in range(4)]), whole[2, 0])
        assert torch.equal(torch.cat([quarters[2, r] for r in range(4, 8)]), whole[2, 1])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_captured_step_is_the_same() -> None:
    task, device = small("feed"), torch.device("cuda")
    found = []
    for graph in (False, True):
        stack = Stack(task, [0, 1], 2, device)
        supply = Supply(task, [0, 1], 5, device)
        rates = torch.full((5, 2, 2, len(stack.sizes)), 1e-3, device=device, dtype=stack.theta.dtype)
        step = TrainStep(stack, Adam(stack.theta), supply.batches, rates, graph=graph)
        for _ in range(5):
            step()
        found.append(step.losses.cpu())
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-9)


# Schedules ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [60, 100, 1000])
def test_onecycle_is_torchs(steps: int) -> None:
    own = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(own, 1.0, steps, cycle_momentum=False)
    rates = []
    for _ in range(steps):
        rates.append(own.param_groups[0]["lr"])
        own.step()
        scheduler.step()
    np.testing.assert_allclose(onecycle(steps)[:steps], rates, rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("steps", [2, 60, 100, 1000])
def test_the_trapezoid_is_that_of_auto(steps: int) -> None:
    rates = [Trapezoid.of(steps).at(t) for t in range(steps + 1)]  # one more is for the round that ends there
    np.testing.assert_allclose(trapezoid(steps), rates, rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("peak", [0.0, 11.0, 29.5])
@pytest.mark.parametrize("ceiling", [math.inf, -0.5])
def test_factors_are_the_states(phase: Phase, peak: float, ceiling: float) -> None:
    state, steps = State(phase, 0.3, peak, ceiling), np.arange(40)
    for constants in (DEFAULT, DEFAULT._replace(min_rise=0.05)):
        expected = [state.factor(t, constants) for t in steps]
        np.testing.assert_allclose(factors(state, steps, constants), expected, rtol=1e-12)
