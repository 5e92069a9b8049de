"""The hidden truth of the feed: rates, correlation, drift, and what the history tells."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lab.tasks.world import BASE_RATES, TOPICS, World


@pytest.fixture(scope="module")
def world() -> World:
    return World(0, 4000, 4000, 16)


@pytest.fixture(scope="module")
def samples(world: World) -> tuple[Tensor, ...]:
    index = torch.arange(60_000)
    return world.samples("train", 1, index, index * 16)


@pytest.mark.parametrize("seed", [0, 1])
def test_base_rates(seed: int) -> None:
    index = torch.arange(60_000)
    *_, labels = World(seed, 4000, 4000, 16).samples("train", 1, index, index * 16)
    assert labels.unique().tolist() == [0, 1]
    for rate, wanted in zip(labels.mean(0).tolist(), BASE_RATES, strict=True):
        assert rate == pytest.approx(wanted, rel=0.1)


def test_the_three_tasks_are_correlated(samples: tuple[Tensor, ...]) -> None:
    assert torch.corrcoef(samples[3].T).min() > 0.1


def test_a_sample_is_a_function_of_its_index(world: World) -> None:
    index = torch.arange(100, 150)
    many = world.samples("train", 3, index, index)
    for place in (0, 7, 49):
        one = world.samples("train", 3, index[place : place + 1], index[place : place + 1])
        assert all(torch.equal(a[place], b[0]) for a, b in zip(many, one, strict=True))
    other = world.samples("validation", 3, index, index)
    assert not torch.equal(many[0], other[0])


def test_the_history_tells_what_the_user_looks_for(samples: tuple[Tensor, ...]) -> None:
    _, history, item, labels = samples
    alike = (history % TOPICS == item[:, None] % TOPICS).sum(1)
    for label in labels.T:
        assert label[alike > 8].mean() > 1.5 * label[alike < 4].mean()
