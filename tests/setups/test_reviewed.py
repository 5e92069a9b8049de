"""What a reviewer found: set-ups that looked right and were not."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ConstantLR, SequentialLR

import hdet
from hdet.algorithm.auto.reach import estimate
from hdet.engine.probed.gradients import Gradients
from hdet.engine.probed.origin import Origin
from hdet.engine.probed.slots import Slots
from hdet.engine.probed.way import ProbedWay
from tests.ranks import error_of, run_ranks
from tests.setups.problems import batch_of, final_loss, loss_of, network


def trained_by_closure(closure: bool) -> list[float]:
    """Rates of a run; Lightning always steps with a closure."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scheduler = hdet.OneCycleLR(optimizer, "auto", total_steps=120, cycle_momentum=False)
    rates = []

    def loss_with_gradients() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, batch_of(len(rates)))
        loss.backward()
        return loss

    for _ in range(120):
        if closure:
            optimizer.step(loss_with_gradients)
        else:
            loss_with_gradients()
            optimizer.step()
        rates.append(float(optimizer.param_groups[0]["lr"]))
        scheduler.step()
    return rates


def test_a_closure_is_heard_when_its_gradients_are_there() -> None:
    assert trained_by_closure(True) == trained_by_closure(False)


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
        loss_of(model, batch_of(t)).backward()
        if t % micro == micro - 1:
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()
    way = scheduler._run.way
    assert isinstance(way, ProbedWay)
    assert not way._witness._watch.captured
    assert final_loss(model) < 0.5 * final_loss(network())


def test_a_restart_puts_buffers_back_too() -> None:
    model = network(nn.BatchNorm1d(32))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    slots = Slots()
    slots.keep_start(optimizer, model)
    was = [buffer.clone() for buffer in model.buffers()]
    with torch.no_grad():
        for buffer in model.buffers():
            buffer.fill_(7)
    slots.restart_(optimizer, model)
    assert all(torch.equal(now, before) for now, before in zip(model.buffers(), was, strict=True))


def test_a_buffer_that_has_grown_does_not_stop_going_back() -> None:
    model = network()
    model.register_buffer("cache", torch.zeros(4))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    slots = Slots()
    slots.keep(0, optimizer, model)
    model.register_buffer("cache", torch.ones(6))
    slots.restore_(0, optimizer, model)
    assert torch.equal(model.cache, torch.ones(6))  # type: ignore[arg-type]


class TwoWeights(torch.optim.Adam):
    """Evaluates other weights than it trains, as Schedule-Free does."""

    def train(self) -> None:
        self.param_groups[0]["train_mode"] = True

    def eval(self) -> None:
        self.param_groups[0]["train_mode"] = False


@pytest.mark.parametrize("two", [True, False])
def test_the_optimizers_memory_is_shown_with_earlier_weights(two: bool) -> None:
    """Schedule-Free makes the weights that it evaluates from its state. Nobody else looks at it: it is left alone."""
    model = network()
    optimizer = TwoWeights(model.parameters(), lr=1e-2)
    optimizer.param_groups[0]["train_mode"] = two
    loss_of(model, batch_of(0)).backward()
    optimizer.step()
    first, slots = next(model.parameters()), Slots()
    slots.keep(0, optimizer, model)
    kept = optimizer.state[first]["exp_avg"].clone()
    optimizer.step()
    now = optimizer.state[first]["exp_avg"].clone()
    with slots.shown(0, optimizer, model):
        assert torch.equal(optimizer.state[first]["exp_avg"], kept if two else now)
    assert torch.equal(optimizer.state[first]["exp_avg"], now)
    assert not torch.equal(now, kept)


@pytest.mark.parametrize("phase", [1.0, 1j, (1 + 1j) / 2**0.5])
def test_the_reach_of_complex_weights_does_not_depend_on_their_phase(phase: complex) -> None:
    p = nn.Parameter(torch.zeros(2, dtype=torch.complex128))
    seen, start = Gradients(), Origin([p])
    for _ in range(3):
        p.grad = torch.full_like(p, phase)
        seen.add(start, [p.detach()], [p], 1.0)
        with torch.no_grad():
            p.sub_(p.grad)
    sums = [float(value) for value in seen.sums(start, [p])]
    assert estimate(seen.tally(sums)) == pytest.approx(1.0)


def test_a_layer_that_is_not_used_has_a_gradient_of_zero() -> None:
    found = []
    for missing in (None, torch.zeros(2)):
        p = nn.Parameter(torch.zeros(2))
        seen, start = Gradients(), Origin([torch.zeros(2)])
        for k, rate in enumerate((0.1, 0.3, 0.9)):
            p.grad = torch.ones(2) if k == 0 else missing
            seen.add(start, [p.detach()], [p], rate)
            with torch.no_grad():
                p.sub_(0.1)
        found.append(estimate(seen.tally([float(value) for value in seen.sums(start, [p])])))
    assert found[0] == found[1]


def probe_on_a_defaultdict(rank: int, breaks: bool) -> Any:
    model = network()

    def batch(k: int) -> Any:
        made: Any = defaultdict(list)
        made["pair"] = batch_of(k)
        return _Stubborn(made) if breaks else made

    probe = hdet.ProbeBatch(model, lambda m, b: loss_of(m, b["pair"]), batch)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scheduler = hdet.OneCycleLR(optimizer, "auto", total_steps=60, probe=probe)

    def train() -> None:
        for t in range(5):
            optimizer.zero_grad()
            loss_of(model, batch_of(t)).backward()
            optimizer.step()
            scheduler.step()

    if not breaks:
        train()
        return None
    return str(error_of(train))


class _Stubborn(dict):  # type: ignore[type-arg]
    """A batch that cannot be copied."""

    def __copy__(self) -> _Stubborn:
        raise TypeError("no copies")


def test_any_mapping_is_a_batch_and_one_that_cannot_be_sent_is_told_to_all_ranks() -> None:
    probe_on_a_defaultdict(0, breaks=False)
    for message in run_ranks(probe_on_a_defaultdict, 2, True, group_timeout=20.0):
        assert "no copies" in message
