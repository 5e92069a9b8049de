"""What a second reviewer with fresh eyes found."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import hdet
from hdet.auto import pieces as pieces_module
from hdet.auto.pieces import Pieces
from hdet.rollback.snapshots import Snapshots
from tests.setups.problems import batch_of, final_loss, loss_of, network, train

STEPS = 150


@pytest.mark.parametrize("long", [8, 10**6])
def test_gradients_and_weights_may_lie_otherwise_in_memory_than_at_first(long: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(pieces_module, "PIECE", long)
    first = torch.arange(24.0).view(4, 6)
    pieces = Pieces([first])
    turned = first.t().contiguous().t()
    assert torch.equal(torch.cat([v.clone() for v in pieces.gathered([turned], 0)]), first.flatten())
    other = torch.zeros(6, 4).t()
    pieces.write_([other], pieces.copied([first]))
    assert torch.equal(other, first)


def test_a_gradient_with_the_conjugate_bit() -> None:
    w = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    c = torch.tensor([1 + 2j, 3 - 1j, 0.5j])
    (w.conj() * c).real.sum().backward()
    assert w.grad is not None
    (vector,) = Pieces([w]).copied([w.grad])
    assert vector.tolist() == torch.view_as_real(w.grad.resolve_conj()).flatten().tolist()


def test_a_round_that_is_resumed_is_sampled_as_seldom_as_others() -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-5)
    scheduler = hdet.OneCycleLR(optimizer, "auto", total_steps=3000)
    train(model, optimizer, scheduler, range(530))
    scheduler.load_state_dict(copy.deepcopy(scheduler.state_dict()))
    search: Any = scheduler._run
    sampled = 0
    for t in range(530, 620):
        sampled += search._samples
        train(model, optimizer, scheduler, range(t, t + 1))
    assert sampled <= 12


def test_state_that_has_changed_its_shape_is_put_back_as_it_was() -> None:
    p = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([p], lr=0.1)
    optimizer.state[p]["memory"] = torch.ones(1)
    snapshots = Snapshots()
    snapshots.keep(0, optimizer, None)
    optimizer.state[p]["memory"] = torch.zeros(4)
    snapshots.restore_(0, optimizer, None)
    assert optimizer.state[p]["memory"].tolist() == [1.0]


def test_a_layer_that_thaws_before_the_first_step_is_known() -> None:
    """No gradient moves anything for two steps, a layer thaws, and the next step is far too long."""
    model = network()
    first, *rest = list(model.parameters())
    first.requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e9)
    scheduler = hdet.OneCycleLR(optimizer, "auto", total_steps=STEPS)
    for t in range(STEPS):
        if t == 2:
            first.requires_grad_(True)
        optimizer.zero_grad()
        loss = loss_of(model, batch_of(t))
        loss.backward()
        if t < 2:
            for p in rest:
                p.grad = torch.zeros_like(p)
        optimizer.step()
        scheduler.step(loss.detach())
    assert final_loss(model) < final_loss(network())


class Remembering(torch.optim.SGD):
    """Makes its own memory where it has none."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p not in self.state:
                    self.state[p] = {"steps": 0}
                self.state[p]["steps"] += 1
        return super().step(closure)


def two() -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    model = network()
    first, *rest = list(model.parameters())
    return model, [Remembering([first], lr=1e-3), torch.optim.Adam(rest, lr=1e-3)]


def test_looking_at_the_memory_of_several_optimizers_makes_none() -> None:
    model, parts = two()
    scheduler = hdet.auto(parts, total_steps=STEPS)
    unknown = nn.Parameter(torch.zeros(1))
    state = scheduler.optimizer.state
    assert state.get(unknown) is None
    assert unknown not in state
    assert state.get(next(model.parameters())) is None
    assert not parts[0].state
    loss_of(model, batch_of(0)).backward()
    parts[0].step()  # would fail at an empty memory
    with pytest.raises(KeyError):
        state[unknown]


def test_a_copy_of_a_scheduler_of_several_optimizers_trains_on() -> None:
    model, parts = two()
    scheduler = hdet.auto(parts, total_steps=STEPS)
    _, copied = copy.deepcopy((model, scheduler))
    assert len(copied.optimizer.param_groups) == 2
    assert copied.optimizer.parts[0] is not parts[0]
    for act in ("state_dict", "add_param_group", "load_state_dict"):
        with pytest.raises(hdet.ArgumentError, match="of them"):
            getattr(scheduler.optimizer, act)(*([{}] if act != "state_dict" else []))


def test_an_optimizer_that_cannot_be_searched_is_refused_in_a_list_too() -> None:
    model, parts = two()
    with pytest.raises(hdet.ArgumentError, match="Rprop"):
        hdet.auto([parts[0], torch.optim.Rprop(list(model.parameters())[1:])], total_steps=STEPS)
