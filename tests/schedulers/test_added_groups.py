"""Groups that are added while an Ensemble or a search on any schedule trains, and schedules that never rise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR

import hdet
from tests.problems import final_loss, network, train
from tests.setup_runs import fixed_loss

STEPS = 200
ADDED = 80


def replicas(optimizer: Optimizer) -> Any:
    return hdet.Ensemble(optimizer, total_steps=STEPS, sync_every=20)


def search(optimizer: Optimizer) -> Any:
    return hdet.auto(optimizer, schedule=CosineAnnealingLR(optimizer, STEPS), total_steps=STEPS)


def cooling(optimizer: Optimizer) -> Any:
    return hdet.auto(optimizer, schedule=_Cooling, total_steps=STEPS)


FACES = [replicas, search, cooling]


def run(face: Callable[[Optimizer], Any], late: bool) -> tuple[nn.Sequential, Any, Optimizer]:
    """``late``: the first layer joins the optimizer in the middle of the run, as a layer that is thawed."""
    model: Any = network()
    model[0].requires_grad_(not late)
    optimizer = Adam(model[2].parameters() if late else model.parameters(), lr=0.01)
    scheduler = face(optimizer)
    for t in range(STEPS):
        if late and t == ADDED:
            model[0].requires_grad_(True)
            optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.01})
        train(model, optimizer, scheduler, range(t, t + 1))
    return model, scheduler, optimizer


class _Cooling:
    """A schedule that writes every group's rate, however many there are, and falls from its first step on."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self.t = optimizer, 0

    def step(self) -> None:
        self.t += 1
        for group in self.optimizer.param_groups:
            group["lr"] = 0.01 * (1 - self.t / (STEPS + 1))

    def state_dict(self) -> dict[str, Any]:
        return {"t": self.t}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.t = state["t"]


@pytest.mark.parametrize("face", FACES)
def test_a_group_that_is_added_trains(face: Any) -> None:
    model, scheduler, optimizer = run(face, late=True)
    first: Any = network()[0]
    assert not torch.equal(model[0].weight, first.weight)  # type: ignore[arg-type]
    assert final_loss(model) < 0.8 * _only_last_layer()
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    assert len(rates) == 2
    if face is search:  # torch's schedule knows its first groups alone
        return
    assert rates[0] == pytest.approx(rates[1])
    again = face(optimizer)
    again.load_state_dict(scheduler.state_dict())
    assert [float(group["lr"]) for group in optimizer.param_groups] == pytest.approx(rates)


def test_a_schedule_that_falls_from_its_first_step_does_not_end_the_search() -> None:
    """The run climbs until a third of it all the same, and searches until there."""
    assert final_loss(run(cooling, late=False)[0]) < 1.5 * fixed_loss(Adam, 0.03, STEPS)


def _only_last_layer() -> float:
    model: Any = network()
    optimizer = Adam(model[2].parameters(), lr=0.03)
    train(model, optimizer, LambdaLR(optimizer, lambda t: 1 - t / (STEPS + 1)), range(STEPS))
    return final_loss(model)
