"""While nothing is to be found, a step costs nothing: the hook sleeps, and the run rests between the ends of rounds."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import hdet

STEPS = 200


class Calls:
    """Counts calls of a method."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> None:
        self.count = 0
        inner = getattr(owner, name)

        def counted(*args: object, **kwargs: object) -> object:
            self.count += 1
            return inner(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)


def searching(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer, hdet.OneCycleLR]:
    torch.manual_seed(seed)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(32, 4)
    probe = hdet.ProbeBatch(
        model, lambda m, batch: (m(batch) - batch.sum(1, keepdim=True)).square().mean(), lambda k: x
    )
    scheduler = hdet.OneCycleLR(optimizer, "auto", total_steps=STEPS, probe=probe, cycle_momentum=False)
    return model, optimizer, scheduler


def train(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: hdet.OneCycleLR, steps: int) -> None:
    for _ in range(steps):
        x = torch.ones(8, 4)
        optimizer.zero_grad()
        (model(x) - 4.0).square().mean().backward()
        optimizer.step()
        scheduler.step()


def test_steps_of_the_descent_ask_nothing_but_at_the_ends_of_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    run = searching()
    way = run[2]._run.way
    seen = Calls(monkeypatch, way, "after_step")
    train(*run, 130)
    assert seen.count > 50, "while it searches, steps are listened to"
    assert not way._looks
    before = seen.count
    train(*run, STEPS - 131)
    ends = [t for t in way.rounds.ends if 130 < t < STEPS]
    assert seen.count - before <= len(ends) + 1
    assert not way._witness.sees_steps


def test_what_is_loaded_or_copied_is_awake() -> None:
    run = searching()
    train(*run, 130)
    assert 130 in run[2]._run._rest
    assert len(copy.deepcopy(run[2]._run)._rest) == 0
    run[2].load_state_dict(run[2].state_dict())
    assert len(run[2]._run._rest) == 0
    assert run[2]._run.way._witness.sees_steps
    train(*run, STEPS - 130)
