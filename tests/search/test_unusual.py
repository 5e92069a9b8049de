"""Set-ups that look ordinary and are not: closures, milestones, memory formats, complex weights, copies."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hdet
from hdet.rollback.snapshots import START, Snapshots
from hdet.search import pieces as pieces_module
from hdet.search.measure import Measure
from hdet.search.pieces import Pieces
from tests.problems import batch_of, final_loss, loss_of, network, train
from tests.setup_runs import plain_loss, searching

STEPS = 150


def by_closure(told: bool, closure: bool) -> float:
    """The final loss. ``told``: whether the scheduler is told the loss; without one the rate climbs more slowly."""
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-6)
    scheduler = searching(model, optimizer, 200)
    for t in range(200):

        def loss_with_gradients(t: int = t) -> Any:
            optimizer.zero_grad()
            loss = loss_of(model, batch_of(t))
            loss.backward()
            return loss

        if closure:
            loss = optimizer.step(loss_with_gradients)
        else:
            loss = loss_with_gradients()
            optimizer.step()
        scheduler.step(*([loss.detach()] if told else []))
    return final_loss(model)


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.filterwarnings("ignore::hdet.SearchWarning")
def test_a_closure_is_heard_when_its_gradients_are_there(told: bool) -> None:
    """Lightning always steps with one."""
    loss = by_closure(told, closure=True)
    assert loss == pytest.approx(by_closure(told, closure=False), rel=1e-6)
    assert loss < 1.5 * plain_loss(torch.optim.Adam, 1e-6, 200)


@pytest.mark.parametrize("micro", [3, 8])
def test_rounds_without_a_step_are_not_taken_for_a_captured_graph(micro: int) -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scheduler = hdet.auto(optimizer, total_steps=100 * micro)
    for t in range(60 * micro):
        loss = loss_of(model, batch_of(t))
        loss.backward()
        if t % micro == micro - 1:
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step(loss.detach())
    assert not scheduler.search.steps.captured  # type: ignore[union-attr]
    assert final_loss(model) < 0.5 * final_loss(network())


def test_a_restart_puts_buffers_back_too() -> None:
    model = network(nn.BatchNorm1d(32))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    snapshots = Snapshots()
    snapshots.keep(START, optimizer, model)
    was = [buffer.clone() for buffer in model.buffers()]
    with torch.no_grad():
        for buffer in model.buffers():
            buffer.fill_(7)
    snapshots.roll_back_(START, optimizer, model)
    assert all(torch.equal(now, before) for now, before in zip(model.buffers(), was, strict=True))


def test_a_buffer_that_has_grown_does_not_stop_going_back() -> None:
    model = network()
    model.register_buffer("cache", torch.zeros(4))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    snapshots = Snapshots()
    snapshots.keep(0, optimizer, model)
    model.register_buffer("cache", torch.ones(6))
    snapshots.roll_back_(0, optimizer, model)
    assert torch.equal(model.cache, torch.ones(6))  # type: ignore[arg-type]


def numerator(p: nn.Parameter, gradients: list[Tensor | None], rates: list[float]) -> float:
    """The rate that gradients ask for, on a way along the first one."""
    optimizer, measure, first = torch.optim.SGD([p], lr=rates[0]), Measure([0]), gradients[0]
    assert first is not None
    for gradient, rate in zip(gradients, rates, strict=True):
        optimizer.param_groups[0]["lr"] = rate
        p.grad = gradient
        measure.set_origin(optimizer)
        measure.sample(optimizer)
        with torch.no_grad():
            p.sub_(first * rate)
    return measure.measured([measure.row([float(value) for value in measure.scalars(optimizer)])]).estimated_rate


@pytest.mark.parametrize("phase", [1.0, 1j, (1 + 1j) / 2**0.5])
def test_the_reach_of_complex_weights_does_not_depend_on_their_phase(phase: complex) -> None:
    p = nn.Parameter(torch.zeros(2, dtype=torch.complex128))
    found = numerator(p, [torch.full_like(p, phase) for _ in range(3)], [1.0] * 3)
    assert found == pytest.approx(
        numerator(nn.Parameter(torch.zeros(2).double()), [torch.ones(2).double()] * 3, [1.0] * 3)
    )
    assert found > 0


def test_a_layer_that_is_not_used_has_a_gradient_of_zero() -> None:
    found = [
        numerator(nn.Parameter(torch.zeros(2)), [torch.ones(2), torch.ones(2), missing], [0.1, 0.1, 0.2])
        for missing in (None, torch.zeros(2))
    ]
    assert found[0] == found[1] > 0


@pytest.mark.parametrize("long", [8, 10**6])
def test_gradients_and_weights_may_lie_otherwise_in_memory_than_at_first(long: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(pieces_module, "PIECE", long)
    first = torch.arange(24.0).view(4, 6)
    pieces = Pieces([first])
    turned = first.t().contiguous().t()
    assert torch.equal(torch.cat([v.clone() for v in pieces.gathered([turned], 0)]), first.flatten())
    (other,) = pieces.as_tensors(pieces.copied([first]), [torch.zeros(6, 4).t()])
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
    scheduler = hdet.auto(optimizer, total_steps=3000)
    train(model, optimizer, scheduler, range(530))
    scheduler.load_state_dict(copy.deepcopy(scheduler.state_dict()))
    search: Any = scheduler.search
    sampled = 0
    for t in range(530, 620):
        sampled += search.steps._is_due
        train(model, optimizer, scheduler, range(t, t + 1))
    assert sampled <= 12


def test_state_that_has_changed_its_shape_is_put_back_as_it_was() -> None:
    p = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([p], lr=0.1)
    optimizer.state[p]["memory"] = torch.ones(1)
    snapshots = Snapshots()
    snapshots.keep(0, optimizer, None)
    optimizer.state[p]["memory"] = torch.zeros(4)
    snapshots.roll_back_(0, optimizer, None)
    assert optimizer.state[p]["memory"].tolist() == [1.0]


def test_a_layer_that_thaws_before_the_first_step_is_known() -> None:
    """No gradient moves anything for two steps, a layer thaws, and the next step is far too long."""
    model = network()
    first, *rest = list(model.parameters())
    first.requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e9)
    scheduler = hdet.auto(optimizer, total_steps=STEPS)
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
    assert scheduler.optimizer.state.get(next(model.parameters())) is None
    assert not parts[0].state
    loss_of(model, batch_of(0)).backward()
    parts[0].step()  # would fail at an empty memory


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
