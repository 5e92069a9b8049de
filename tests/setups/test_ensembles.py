"""Groups that are added while an Ensemble trains, and schedules that fall from their first step on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import hdet
from tests.setups.problems import batch_of, final_loss, loss_of, network
from tests.setups.runs import fixed_loss

STEPS = 200
ADDED = 80


def run(late: bool, **arguments: Any) -> tuple[float, nn.Sequential, Any, torch.optim.Optimizer]:
    """``late``: the first layer joins the optimizer in the middle of the run, as a layer that is thawed."""
    model: Any = network()
    model[0].requires_grad_(not late)
    optimizer = torch.optim.Adam(model[2].parameters() if late else model.parameters(), lr=0.01)
    made = {name: value(model, optimizer) if callable(value) else value for name, value in arguments.items()}
    ensemble = hdet.Ensemble(optimizer, total_steps=STEPS, **made)
    for t in range(STEPS):
        if late and t == ADDED:
            model[0].requires_grad_(True)
            optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.01})
        optimizer.zero_grad()
        loss = loss_of(model, batch_of(t))
        loss.backward()
        optimizer.step()
        ensemble.step(loss.detach())
    return final_loss(model), model, ensemble, optimizer


@pytest.mark.parametrize("fanout", ["trained", "probed"])
def test_a_group_that_is_added_trains(fanout: str) -> None:
    arguments: dict[str, Any] = {"fanout": fanout}
    if fanout == "probed":
        arguments["probe"] = lambda model, _: probe_of(model)
    else:
        arguments["sync_every"] = 20
    without = _only_last_layer()
    loss, model, ensemble, optimizer = run(True, **arguments)
    first: Any = network()[0]
    assert not torch.equal(model[0].weight, first.weight)
    assert loss < 0.8 * without
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    assert len(rates) == 2
    assert 1e-4 < rates[1] < 1
    assert len(ensemble.base_values) == 2


def test_with_a_schedule_that_writes_every_group() -> None:
    loss, _, _, optimizer = run(
        True,
        fanout="probed",
        probe=lambda model, _: probe_of(model),
        schedule=lambda _, optimizer: _Cooling(optimizer),
    )
    assert loss < 0.9 * _only_last_layer()
    assert len(optimizer.param_groups) == 2


def test_a_schedule_that_falls_from_its_first_step_does_not_end_the_search() -> None:
    """The run climbs until a third of it all the same, and searches until there."""
    loss, *_ = run(
        False,
        fanout="probed",
        probe=lambda model, _: probe_of(model),
        schedule=lambda _, optimizer: _Cooling(optimizer),
    )
    assert loss < 1.5 * fixed_loss(torch.optim.Adam, 0.03, STEPS)


class _Cooling:
    """A schedule that writes every group's rate, however many there are."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.t = optimizer, 0

    def step(self) -> None:
        self.t += 1
        for group in self.optimizer.param_groups:
            group["lr"] = 0.01 * (1 - self.t / (STEPS + 1))

    def state_dict(self) -> dict[str, Any]:
        return {"t": self.t}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.t = state["t"]


@pytest.mark.parametrize("guess", [1e-6, 1.0])
def test_a_group_whose_rate_is_not_searched_keeps_it_and_does_not_count(guess: float) -> None:
    """In the optimizer or in one of its own: its steps say nothing of the rate that is searched."""
    found = []
    for own in (False, True):
        model: Any = network()
        first, last = ({"params": list(model[i].parameters()), "lr": lr} for i, lr in ((0, 0.1), (2, guess)))
        other = torch.optim.Adam([first] if own else [{"params": [nn.Parameter(torch.zeros(1))]}])
        optimizer = torch.optim.Adam([last] if own else [last, first])
        knobs = [hdet.knobs.lr(optimizer, groups=[0])]
        ensemble = hdet.Ensemble(optimizer, knobs=knobs, fanout="probed", total_steps=STEPS)
        for t in range(60):
            model.zero_grad()
            loss_of(model, batch_of(t)).backward()
            optimizer.step()
            other.step()
            ensemble.step()
        assert float((other if own else optimizer).param_groups[-1]["lr"]) == 0.1
        found.append(float(optimizer.param_groups[0]["lr"]))
    assert found[0] == pytest.approx(found[1], rel=1e-4)


def _only_last_layer() -> float:
    model: Any = network()
    optimizer = torch.optim.Adam(model[2].parameters(), lr=0.03)
    schedule = LambdaLR(optimizer, lambda t: 1 - t / (STEPS + 1))
    for t in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, batch_of(t)).backward()
        optimizer.step()
        schedule.step()
    return final_loss(model)


@pytest.mark.parametrize("fanout", ["trained", "probed"])
def test_a_checkpoint_after_a_group_was_added(fanout: str) -> None:
    arguments: dict[str, Any] = {"fanout": fanout}
    if fanout == "probed":
        arguments["probe"] = lambda model, _: probe_of(model)
    _, model, ensemble, optimizer = run(True, **arguments)
    state = ensemble.state_dict()
    if fanout == "probed":
        arguments["probe"] = probe_of(model)
    again = hdet.Ensemble(optimizer, total_steps=STEPS, **arguments)
    again.load_state_dict(state)
    assert again.base_values == pytest.approx(ensemble.base_values)
