"""The warm noisy start: how large the noise is, and who gets which."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hdet
from tests.models import batch, two_layer
from tests.processes import error_of, run_ranks


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


def test_the_noise_is_a_function_of_its_seed() -> None:
    first = noise_of(wide(), seed=2)
    assert all(torch.equal(a, b) for a, b in zip(first, noise_of(wide(), seed=2), strict=True))
    assert not torch.equal(first[0], noise_of(wide(), seed=3)[0])


def test_frozen_parameters_stay_and_do_not_count() -> None:
    model = nn.ParameterList([torch.full((1000,), 1e6), torch.ones(4000)])
    model[0].requires_grad_(False)
    frozen, trained = noise_of(model, nu=0.1)
    assert frozen.abs().max() == 0
    assert trained.std().item() == pytest.approx(0.1, rel=0.05)


def test_nothing_to_add() -> None:
    assert all(noise.abs().max() == 0 for noise in noise_of(two_layer(), nu=0.0))
    assert noise_of(nn.ReLU()) == []
    assert noise_of(nn.ParameterList([torch.zeros(3)]))[0].abs().max() == 0  # no weights, no noise


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.complex64])
def test_every_type(dtype: torch.dtype) -> None:
    """A complex weight of size 1 has the parts 1 and 0: their noise is 1 / sqrt(2) of that of a real one."""
    model = nn.ParameterList([nn.Parameter(torch.ones(20_000, dtype=dtype))])
    (noise,) = noise_of(model, nu=0.1)
    assert noise.dtype is dtype
    parts = torch.view_as_real(noise).unbind(-1) if dtype.is_complex else (noise,)
    expected = 0.1 * math.sqrt(0.5) if dtype.is_complex else 0.1
    assert [part.double().std().item() for part in parts] == pytest.approx([expected] * len(parts), rel=0.05)


def test_the_global_generators_are_neither_read_nor_seeded() -> None:
    before = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    noise_of(wide())
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), numpy.random.get_state()[1].tolist()) == before[1:]


@pytest.mark.parametrize(
    "arguments", [{"nu": -1.0}, {"nu": math.nan}, {"nu": "much"}, {"seed": 0.5}, {"group": "all"}, {"model": None}]
)
def test_bad_arguments(arguments: dict[str, Any]) -> None:
    model = two_layer()
    before = [p.detach().clone() for p in model.parameters()]
    name = next(iter(arguments))
    with pytest.raises(hdet.ArgumentError, match=rf"{name} must be .*but got {name}=.*;"):
        hdet.perturb_(**{"model": model, **arguments})
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_weights_that_are_none_are_refused_before_anything_changes() -> None:
    model = nn.ParameterList([torch.ones(3), torch.tensor([1.0, math.nan])])
    with pytest.raises(hdet.ArgumentError, match="finite weights to start from"):
        hdet.perturb_(model)
    assert torch.equal(model[0], torch.ones(3))


def test_who_gets_which_noise_on_four_ranks() -> None:
    answers = run_ranks(_on_four, 4)
    alone = two_layer()
    hdet.perturb_(alone, nu=0.05)
    whole = nn.utils.parameters_to_vector(alone.parameters())
    shared = [one["one model"] for one in answers]
    assert all(torch.equal(one, whole) for one in shared)  # as in one process
    every = [one["replicas"] for one in answers]
    assert all(not torch.equal(every[a], every[b]) for a in range(4) for b in range(a))
    assert torch.equal(every[0], whole)
    arms = [one["arms"] for one in answers]
    assert torch.equal(arms[0], arms[1])
    assert torch.equal(arms[2], arms[3])
    assert not torch.equal(arms[0], arms[2])
    assert torch.equal(arms[2], every[1])  # replica 1 is replica 1, on one rank or on two
    for one in answers:
        assert "parameter 0.weight is sharded" in one["sharded"]
        assert torch.equal(one["overwritten"], whole)  # DDP sends rank 0's: called before the wrap it is lost


def test_an_ensemble_begins_apart_and_is_averaged() -> None:
    """Replicas under DDP and in arms: apart in the first round, equal after it, as the mean of four starts."""
    for answer in zip(*run_ranks(_trained, 4), strict=True):
        first = [one[0] for one in answer]
        assert all(not torch.equal(first[0], other) for other in first[1:])
        ends = [one[1] for one in answer]
        assert all(torch.equal(ends[0], other) for other in ends[1:])


def _on_four(rank: int) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def vector(model: nn.Module) -> torch.Tensor:
        return nn.utils.parameters_to_vector(model.parameters()).detach()

    torch.manual_seed(rank)  # must make no difference
    everyone = DistributedDataParallel(two_layer())
    hdet.perturb_(everyone, nu=0.05)
    arms = hdet.arms(2)
    pairs = DistributedDataParallel(two_layer(), process_group=arms.gradients)
    hdet.perturb_(pairs, nu=0.05, group=arms)
    one = DistributedDataParallel(two_layer())
    hdet.perturb_(one, nu=0.05, group=hdet.arms(1))
    early = two_layer()
    hdet.perturb_(early, nu=0.05)
    sharded = fully_shard(two_layer(), mesh=init_device_mesh("cpu", (4,)))
    return {
        "replicas": vector(everyone),
        "arms": vector(pairs),
        "one model": vector(one),
        "overwritten": vector(DistributedDataParallel(early)),
        "sharded": str(error_of(lambda: hdet.perturb_(sharded))),
    }


def _trained(rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    rows = []
    for group in (None, hdet.arms(4)):
        model = two_layer()
        trained = DistributedDataParallel(model) if group is None else model
        hdet.perturb_(model, group=group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        scheduler = hdet.OneCycleLR(optimizer, 0.01, 20, sync_every=4, spread=0.0, group=group, auto_lr=False)
        vectors = []
        for t in range(4):
            x, y = batch(t, rank)
            loss = (trained(x) - y).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step(loss)
            vectors.append(nn.utils.parameters_to_vector(model.parameters()).detach().clone())
        rows.append((vectors[0], vectors[3]))
    return rows
