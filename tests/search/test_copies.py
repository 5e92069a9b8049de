"""A copy of a run, by deepcopy or pickle, trains as the original does: it carries what the search holds in tensors."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hdet
from tests.problems import network
from tests.search.runs import train

Copying = Callable[[Any], Any]
STEPS = 200
pytestmark = [
    pytest.mark.filterwarnings("ignore:training diverged:hdet.SearchWarning"),
    pytest.mark.filterwarnings("ignore:Seems like `optimizer.step:UserWarning"),  # torch, of a copied optimizer
]


class Both:
    """Two optimizers that are stepped together, as :func:`train` needs it."""

    def __init__(self, parts: list[torch.optim.Optimizer]) -> None:
        self.parts = parts

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for part in self.parts for group in part.param_groups]

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad()

    def step(self) -> None:
        for part in self.parts:
            part.step()


def onecycle(model: nn.Module) -> tuple[Any, Any]:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return optimizer, hdet.auto(optimizer, total_steps=STEPS, model=model)


def scheduled(model: nn.Module) -> tuple[Any, Any]:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    return optimizer, hdet.auto(optimizer, schedule=schedule, total_steps=STEPS, model=model)


def several(model: nn.Module) -> tuple[Any, Any]:
    layers = list(model.children())
    first = torch.optim.SGD(layers[0].parameters(), lr=1e-3, momentum=0.9)
    parts = [first, torch.optim.Adam(layers[-1].parameters(), lr=1e-3)]
    return Both(parts), hdet.auto(parts, total_steps=STEPS, model=model)


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
@pytest.mark.parametrize("make", [onecycle, scheduled, several])
@pytest.mark.parametrize("at", [0, 1, 10, 40, 150])
def test_a_copy_trains_as_the_original(make: Callable[[nn.Module], tuple[Any, Any]], at: int, copied: Copying) -> None:
    model = network()
    optimizer, scheduler = make(model)
    train(model, optimizer, scheduler, range(at))
    another = copied((model, optimizer, scheduler))
    rates = train(model, optimizer, scheduler, range(at, STEPS))
    assert train(*another, range(at, STEPS)) == rates
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), another[0].parameters(), strict=True))
    assert another[2].found == scheduler.found


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_a_copy_goes_back_as_the_original(copied: Copying) -> None:
    model = network()
    runs = [(model, *onecycle(model))]
    train(*runs[0], range(40))
    runs.append(copied(runs[0]))
    for own, *_ in runs:
        with torch.no_grad():
            next(iter(own.parameters())).view(-1)[0] = torch.nan
    rates = [train(*run, range(40, STEPS)) for run in runs]
    assert rates[0] == rates[1]
    assert [run[2].found.rolled_back for run in runs] == [1, 1]


def test_a_scheduler_that_is_copied_alone_brings_its_optimizer() -> None:
    model = network()
    optimizer, scheduler = onecycle(model)
    train(model, optimizer, scheduler, range(40))
    other = copy.deepcopy(scheduler)
    assert other.optimizer is not optimizer
    rates = train(model, optimizer, scheduler, range(40, STEPS))
    assert train(other.search.model, other.optimizer, other, range(40, STEPS)) == rates
