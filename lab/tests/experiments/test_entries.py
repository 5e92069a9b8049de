"""lab/experiments/entries.py: Schedule-Free on a stack against the letters, and averages that begin anew."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from entries import NADAMW, Averages, ScheduleFree

SETTINGS = [NADAMW._replace(betas=(0.9, 0.99), decay=0.1), NADAMW._replace(betas=(0.8, 0.95), decay=0.0)]
RATES = [0.01, 0.03, 0.02, 0.05, 0.05]


def _gradients() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 2, 4, dtype=torch.float64, generator=generator) for _ in RATES]


def _letters(column: int, start: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """y and x of one run, as Defazio and others print them, with the package's weights."""
    (beta1, beta2), decay = SETTINGS[column].betas, SETTINGS[column].decay
    x, z, second, highest, weights = start.clone(), start.clone(), torch.zeros_like(start), 0.0, 0.0
    y = start.clone()
    for t, (rate, gradient) in enumerate(zip(RATES, _gradients(), strict=True), 1):
        g = gradient[0, column]
        second = beta2 * second + (1 - beta2) * g * g
        update = g / ((second / (1 - beta2**t)).sqrt() + 1e-8) + decay * y
        z = z - rate * update
        highest = max(highest, rate)
        weights += highest**2
        x = x + highest**2 / weights * (z - x)
        y = (1 - beta1) * z + beta1 * x
    return y, x


def test_a_stack_of_schedule_free_runs_is_the_letters() -> None:
    theta = torch.linspace(-1, 1, 8, dtype=torch.float64).reshape(1, 2, 4).clone()
    start, optimizer = theta.clone(), ScheduleFree(theta, SETTINGS)
    for rate, gradient in zip(RATES, _gradients(), strict=True):
        optimizer.step_(theta, gradient, torch.full_like(theta, rate))
    for column in range(2):
        y, x = _letters(column, start[0, column])
        torch.testing.assert_close(theta[0, column], y)
        torch.testing.assert_close(optimizer.averaged(theta)[0, column], x)


def test_the_letters_are_those_of_the_package() -> None:
    package = pytest.importorskip("schedulefree")
    start = torch.linspace(-1, 1, 4, dtype=torch.float64)
    weight = torch.nn.Parameter(start.clone())
    optimizer = package.AdamWScheduleFree([weight], betas=SETTINGS[0].betas, weight_decay=SETTINGS[0].decay)
    optimizer.train()
    for rate, gradient in zip(RATES, _gradients(), strict=True):
        weight.grad = gradient[0, 0].clone()
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
    y, x = _letters(0, start)
    torch.testing.assert_close(weight.detach(), y)
    optimizer.eval()
    torch.testing.assert_close(weight.detach(), x)


def test_the_average_of_a_run_that_was_rolled_back_begins_anew() -> None:
    theta = torch.ones(1, 2, 3)
    runs = SimpleNamespace(runs={(0, k): SimpleNamespace(rolled_back=0) for k in range(2)})
    averages = Averages(runs, theta, [0, 1], [4, 4])  # type: ignore[arg-type]
    theta += 1
    averages.step()
    assert averages.weights.tolist() == [[[1.25] * 3, [1.25] * 3]]
    runs.runs[0, 1].rolled_back = 1
    averages.step()
    assert averages.weights.tolist() == [[[1.4375] * 3, [2.0] * 3]]
