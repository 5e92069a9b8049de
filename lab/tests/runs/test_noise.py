from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.models import two_layer
from torch import nn

from lab.runs.noise import perturb_


def noise_of(model: nn.Module, **arguments: Any) -> list[torch.Tensor]:
    before = [p.detach().clone() for p in model.parameters()]
    perturb_(model, **{"nu": 0.01, "seed": 0, "replica": 0, **arguments})
    return [p.detach() - b for p, b in zip(model.parameters(), before, strict=True)]


def wide() -> nn.Module:
    """Two tensors of very different size: weights of norm 100 and of norm 1."""
    return nn.ParameterList([torch.full((100, 100), 1.0), torch.full((40, 25), 1 / math.sqrt(1000))])


def test_one_level_for_the_model() -> None:
    first, second = noise_of(wide(), nu=0.1)
    level = 0.1 * math.sqrt((10_000 + 1) / 11_000)
    assert first.std().item() == pytest.approx(level, rel=0.05)
    assert second.std().item() == pytest.approx(level, rel=0.1)
    assert abs(first.mean().item()) < 5 * level / 100


def test_noise_is_a_function_of_seed_and_replica() -> None:
    first = noise_of(wide(), replica=1, seed=2)
    assert all(torch.equal(a, b) for a, b in zip(first, noise_of(wide(), replica=1, seed=2), strict=True))
    for other in ({"replica": 0, "seed": 2}, {"replica": 1, "seed": 3}, {"replica": 2, "seed": 1}):
        assert not torch.equal(first[0], noise_of(wide(), **other)[0])


def test_frozen_parameters_and_zero_nu_leave_the_weights() -> None:
    model = two_layer()
    next(model.parameters()).requires_grad_(False)
    assert noise_of(model)[0].abs().max() == 0
    assert all(noise.abs().max() == 0 for noise in noise_of(two_layer(), nu=0.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_every_type(dtype: torch.dtype) -> None:
    model = nn.ParameterList([nn.Parameter(torch.ones(2000, dtype=dtype))])
    (noise,) = noise_of(model, nu=0.1)
    assert noise.dtype is dtype
    assert noise.double().std().item() > 0.05


def test_the_global_rng_is_neither_read_nor_seeded() -> None:
    before = torch.get_rng_state()
    noise_of(wide())
    assert torch.equal(torch.get_rng_state(), before)
