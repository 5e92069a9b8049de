"""What a reviewer found: set-ups that looked right and were not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ConstantLR, SequentialLR

import hdet
from hdet.auto.measure import Measure
from hdet.rollback.snapshots import START, Snapshots
from tests.setups.problems import batch_of, final_loss, loss_of, network
from tests.setups.runs import plain_loss, searching


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.filterwarnings("ignore::hdet.SearchWarning")
def test_a_closure_is_heard_when_its_gradients_are_there(told: bool) -> None:
    """Lightning always steps with one."""
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-6)
    scheduler = searching(model, optimizer, 200)
    for t in range(200):

        def loss_with_gradients(t: int = t) -> Any:
            optimizer.zero_grad()
            loss = loss_of(model, batch_of(t))
            loss.backward()
            return loss

        loss = optimizer.step(loss_with_gradients)
        scheduler.step(*([loss.detach()] if told else []))
    assert final_loss(model) == pytest.approx(plain_loss(torch.optim.Adam, 1e-6, 200), rel=1e-6)


def test_what_another_scheduler_trained_survives_the_milestone() -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    first = ConstantLR(optimizer, 1.0)
    second = hdet.OneCycleLR(optimizer, "auto", total_steps=200)
    both = SequentialLR(optimizer, [first, second], milestones=[150])
    losses = []
    for t in range(156):
        optimizer.zero_grad()
        loss_of(model, batch_of(t)).backward()
        optimizer.step()
        both.step()
        losses.append(final_loss(model))
    assert losses[-1] < 1.1 * losses[148] < 0.7 * final_loss(network())
    assert int(optimizer.state[next(model.parameters())]["step"]) == 156


@pytest.mark.parametrize("micro", [3, 8])
def test_rounds_without_a_step_are_not_taken_for_a_captured_graph(micro: int) -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scheduler = hdet.OneCycleLR(optimizer, "auto", total_steps=100 * micro)
    for t in range(60 * micro):
        loss = loss_of(model, batch_of(t))
        loss.backward()
        if t % micro == micro - 1:
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step(loss.detach())
    assert not scheduler._run._hook.captured  # type: ignore[union-attr]
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
    snapshots.restore_(START, optimizer, model)
    assert all(torch.equal(now, before) for now, before in zip(model.buffers(), was, strict=True))


def test_a_buffer_that_has_grown_does_not_stop_going_back() -> None:
    model = network()
    model.register_buffer("cache", torch.zeros(4))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    snapshots = Snapshots()
    snapshots.keep(0, optimizer, model)
    model.register_buffer("cache", torch.ones(6))
    snapshots.restore_(0, optimizer, model)
    assert torch.equal(model.cache, torch.ones(6))  # type: ignore[arg-type]


def asked(p: nn.Parameter, gradients: list[Tensor | None], rates: list[float]) -> float:
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
    return measure.measured([measure.row([float(value) for value in measure.scalars(optimizer)])]).reach


@pytest.mark.parametrize("phase", [1.0, 1j, (1 + 1j) / 2**0.5])
def test_the_reach_of_complex_weights_does_not_depend_on_their_phase(phase: complex) -> None:
    p = nn.Parameter(torch.zeros(2, dtype=torch.complex128))
    found = asked(p, [torch.full_like(p, phase) for _ in range(3)], [1.0] * 3)
    assert found == pytest.approx(asked(nn.Parameter(torch.zeros(2).double()), [torch.ones(2).double()] * 3, [1.0] * 3))
    assert found > 0


def test_a_layer_that_is_not_used_has_a_gradient_of_zero() -> None:
    found = [
        asked(nn.Parameter(torch.zeros(2)), [torch.ones(2), torch.ones(2), missing], [0.1, 0.1, 0.2])
        for missing in (None, torch.zeros(2))
    ]
    assert found[0] == found[1] > 0
