"""Optimizers in a wrapper, as frameworks have them: the search is that of the optimizer inside, or it is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch.optim import Adam, Optimizer

import hdet
from tests.setups.problems import batch_of, final_loss, loss_of, network, train
from tests.setups.runs import FACES, plain_loss, searching

STEPS = 200
GUESS = 1e-6


class Plain:
    """No optimizer of torch's by its class, but it steps one."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    def step(self) -> None:
        self.optimizer.step()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()


class ByName(Optimizer):
    """As Accelerate's: an optimizer of torch's by its class, which was never initialised as one."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    @property
    def defaults(self) -> Any:  # type: ignore[override]
        return self.optimizer.defaults

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "a class of one's own": Plain,
    "an Optimizer by name": ByName,
    "two of them": lambda optimizer: Plain(ByName(optimizer)),
}


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("name", WRAPPERS)
@pytest.mark.filterwarnings("error")
def test_a_wrapped_optimizer_ends_where_the_plain_loop_ends(name: str, face: str) -> None:
    model = network()
    optimizer = WRAPPERS[name](Adam(model.parameters(), lr=GUESS))
    train(model, optimizer, searching(model, optimizer, STEPS, face), range(STEPS))
    assert final_loss(model) == pytest.approx(plain_loss(Adam, GUESS, STEPS, face), rel=1e-6)


def test_several_optimizers_of_which_some_are_wrapped() -> None:
    losses = []
    for wrap in (lambda optimizer: optimizer, ByName):
        model = network()
        first, *rest = model.parameters()
        parts: list[Any] = [wrap(Adam([first], lr=GUESS)), Adam(rest, lr=GUESS)]
        scheduler = searching(model, parts, STEPS)
        for t in range(STEPS):
            model.zero_grad()
            loss = loss_of(model, batch_of(t))
            loss.backward()
            for part in parts:
                part.step()
            scheduler.step(loss.detach())
        losses.append(final_loss(model))
    assert losses[0] == losses[1] < 0.3 * final_loss(network())


def test_knobs_and_replayed_schedules_take_a_wrapped_optimizer(tmp_path: Any) -> None:
    model, path = network(), tmp_path / "run.jsonl"
    inner = Adam(model.parameters(), lr=1e-3)
    wrapped = Plain(inner)
    assert [knob.group for knob in hdet.knobs.lr(wrapped)] == [0]  # type: ignore[arg-type]
    scheduler = searching(model, wrapped, 50, journal=path)
    train(model, inner, scheduler, range(50))
    assert hdet.schedule_from(path, wrapped).optimizer is inner  # type: ignore[arg-type]


class Hidden(Optimizer):
    """Keeps what steps to itself, and cannot be listened to."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._own, self.param_groups, self.defaults = optimizer, optimizer.param_groups, optimizer.defaults

    def step(self, closure: Any = None) -> Any:
        return self._own.step(closure)


@pytest.mark.parametrize("face", FACES)
def test_where_no_hook_can_be_set_it_is_refused_and_nothing_is_changed(face: str) -> None:
    model = network()
    optimizer = Hidden(Adam(model.parameters(), lr=GUESS))
    before = dict(optimizer.param_groups[0])
    with pytest.raises(hdet.ArgumentError, match=r"Hidden .*step hooks.* give the optimizer inside"):
        searching(model, optimizer, STEPS, face)
    assert dict(optimizer.param_groups[0]) == before
