"""What the entry trains with: its optimizer against the letters, and an average that stands in and steps back."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from lab.algoperf.training import AVERAGED, Average, NAdamW

STEPS = 2000


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()


def _trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randn(8, 3, dtype=torch.float64, generator=generator)
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()


def test_nadamw_is_adamw_with_a_second_helping_of_the_gradient() -> None:
    weight = nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
    late = nn.Parameter(torch.ones(2, dtype=torch.float64))  # its gradients begin at the third step
    optimizer = NAdamW([weight, late], lr=0.1, betas=(0.8, 0.9), weight_decay=0.5)
    theta, first, second = [1.0, -2.0], [0.0, 0.0], [0.0, 0.0]
    for t in range(1, 6):
        gradient = [t * 0.3, -1.0 / t]
        weight.grad = torch.tensor(gradient, dtype=torch.float64)
        late.grad = torch.ones_like(late) if t >= 3 else None
        optimizer.step()
        for i, g in enumerate(gradient):
            first[i] = 0.8 * first[i] + 0.2 * g
            second[i] = 0.9 * second[i] + 0.1 * g * g
            ahead = (0.8 * first[i] + 0.2 * g) / (1 - 0.8**t)
            step = ahead / (math.sqrt(second[i] / (1 - 0.9**t)) + 1e-8)
            theta[i] = theta[i] * (1 - 0.1 * 0.5) - 0.1 * step
    assert weight.tolist() == pytest.approx(theta, rel=1e-12)
    assert optimizer.state[late]["step"] == 3


def test_the_average_is_exponential_and_leaves_training_as_it_is() -> None:
    model = _model()
    plain = copy.deepcopy(model)
    average = Average(model, STEPS)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.01) for one in (model, plain)]
    expected = _floats(model)
    weight = 1 - (1 - 1 / (AVERAGED * STEPS)) ** average.every
    for _ in range(5):
        for one, optimizer in zip((model, plain), optimizers, strict=True):
            _trained(one, optimizer, average.every)
        average.look(0)
        expected = [torch.lerp(old, new, weight) for old, new in zip(expected, _floats(model), strict=True)]
        average.show()
        average.show()  # twice is once
        for mine, theirs in zip(_floats(model), expected, strict=True):
            torch.testing.assert_close(mine, theirs)
        average.hide()
        average.hide()
        assert all(map(torch.equal, _floats(model), _floats(plain)))
    assert not all(map(torch.equal, expected, _floats(plain)))


def _floats(model: nn.Module) -> list[Tensor]:
    return [t.detach().clone() for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()]


def test_a_rollback_begins_the_average_anew() -> None:
    model = _model()
    average = Average(model, STEPS)
    with torch.no_grad():
        model[0].weight.fill_(math.nan)  # type: ignore[union-attr, operator]
    average.look(0)
    earlier = _model()
    model.load_state_dict(earlier.state_dict())
    average.look(1)
    average.show()
    assert all(map(torch.equal, _floats(model), _floats(earlier)))


def test_a_checkpoint_of_an_evaluation_goes_on_from_the_trained_weights() -> None:
    model = _model()
    average, optimizer = Average(model, STEPS), torch.optim.SGD(model.parameters(), lr=0.01)
    _trained(model, optimizer, 10)
    average.look(0)
    trained = _floats(model)
    average.show()
    saved = copy.deepcopy((model.state_dict(), average.state_dict()))
    other = _model()
    other.load_state_dict(saved[0])
    loaded = Average(other, STEPS)
    loaded.load_state_dict(saved[1])
    loaded.hide()
    assert all(map(torch.equal, _floats(other), trained))
    loaded.show()
    average.show()
    assert all(map(torch.equal, _floats(other), _floats(model)))
