"""lab/experiments/shapes.py against torch's scheduler and the rule's state."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from shapes import factors, held, onecycle

from hdet.auto.constants import DEFAULT
from hdet.auto.rule import Phase, State


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


def test_held_is_onecycle_from_its_peak_on() -> None:
    assert (held(100)[:30] == 1).all()
    np.testing.assert_allclose(held(100)[29:], onecycle(100)[29:])


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("peak", [0.0, 11.0, 29.5])
@pytest.mark.parametrize("ceiling", [math.inf, -0.5])
def test_factors_are_the_states(phase: Phase, peak: float, ceiling: float) -> None:
    state, steps = State(phase, 0.3, peak, ceiling), np.arange(40)
    for constants in (DEFAULT, DEFAULT._replace(least_rise=0.05)):
        expected = [state.factor(t, constants) for t in steps]
        np.testing.assert_allclose(factors(state, steps, constants), expected, rtol=1e-12)
