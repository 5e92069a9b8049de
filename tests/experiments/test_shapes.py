"""experiments/shapes.py against torch's scheduler, the product's held schedule and the pilot's rise."""

from __future__ import annotations

import doctest

import numpy as np
import pytest
import shapes
import torch
from shapes import held, onecycle, risen

import hdet
from hdet.algorithm.auto.pilot import Phase, PilotState

KINDS = [(0.3, False), (0.7, True)]


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)


def test_examples() -> None:
    assert doctest.testmod(shapes).failed == 0


@pytest.mark.parametrize(("pct_start", "linear"), KINDS)
@pytest.mark.parametrize("steps", [60, 100, 1000])
def test_onecycle_is_torchs(steps: int, pct_start: float, linear: bool) -> None:
    own = optimizer()
    strategy = "linear" if linear else "cos"
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        own, 1.0, steps, pct_start=pct_start, anneal_strategy=strategy, cycle_momentum=False
    )
    rates = []
    for _ in range(steps):
        rates.append(own.param_groups[0]["lr"])
        own.step()
        scheduler.step()
    np.testing.assert_allclose(onecycle(steps, pct_start, linear)[:steps], rates, rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize(("pct_start", "linear"), KINDS)
def test_held_is_the_products(pct_start: float, linear: bool) -> None:
    strategy = "linear" if linear else "cos"
    scheduler = hdet.OneCycleLR(
        optimizer(),
        "auto",
        60,
        pct_start=pct_start,
        anneal_strategy=strategy,
        cycle_momentum=False,
        probe=lambda: torch.tensor(1.0),
    )
    rates = [scheduler._schedule(t)[0] for t in range(61)]
    np.testing.assert_allclose(held(60, pct_start, linear), rates, rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("peak", [0.0, 11.0, 29.5])
def test_risen_is_the_pilots(phase: Phase, peak: float) -> None:
    state, steps = PilotState(phase, peak=peak), np.arange(40.0)
    np.testing.assert_allclose(risen(state, steps), [state.rise(t) for t in steps], rtol=1e-12)
