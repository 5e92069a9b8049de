from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hdet
from tests.models import two_layer
from tests.ranks import run_ranks


def noise_of(model: nn.Module, **arguments: Any) -> list[torch.Tensor]:
    before = [p.detach().clone() for p in model.parameters()]
    hdet.perturb_(model, **arguments)
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


def test_one_level_per_tensor() -> None:
    first, second = noise_of(wide(), nu=0.1, scope="tensor")
    assert first.std().item() == pytest.approx(0.1, rel=0.05)
    assert second.std().item() == pytest.approx(0.1 / math.sqrt(1000), rel=0.1)


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.complex64])
def test_every_type(dtype: torch.dtype) -> None:
    model = nn.ParameterList([nn.Parameter(torch.ones(2000, dtype=dtype))])
    (noise,) = noise_of(model, nu=0.1)
    assert noise.dtype is dtype
    assert torch.view_as_real(noise).std().item() if dtype.is_complex else noise.double().std().item() > 0.05


@pytest.mark.parametrize("arguments", [{"nu": -1.0}, {"nu": math.nan}, {"nu": "much"}, {"scope": "layer"}])
def test_bad_arguments(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must be .*but got"):
        hdet.perturb_(two_layer(), **arguments)


def test_replicas_take_their_rank() -> None:
    weights = run_ranks(_perturbed, 2)
    assert not torch.equal(*weights)


def _perturbed(rank: int) -> torch.Tensor:
    ddp = DistributedDataParallel(two_layer())
    hdet.perturb_(ddp, nu=0.05)
    return next(ddp.parameters()).detach()
