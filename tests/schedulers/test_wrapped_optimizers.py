"""Optimizers in a wrapper, as frameworks have them: the search is that of the optimizer inside, or it is refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from torch.optim import Adam, Optimizer

import hdet
from hdet.rule.enums import Phase
from tests.problems import batch_of, final_loss, loss_of, network, train
from tests.setup_runs import FACES, plain_loss, searching, trained

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
        trained(model, parts, searching(model, parts, STEPS), STEPS)
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


class Derived(Adam):
    """Its own step calls Adam's, and torch calls hooks in both."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize("how", ["alone", "by a closure", "several"])
def test_a_step_that_calls_its_base_class_is_one_step(how: str) -> None:
    plain = plain_loss(Adam, GUESS, STEPS)  # and torch has seen Adam itself
    model = network()
    first, *rest = model.parameters()
    parts = [[first], rest] if how == "several" else [[first, *rest]]
    optimizers = [Derived(part, lr=GUESS) for part in parts]
    scheduler = searching(model, optimizers, STEPS)

    def loss_and_gradients(t: int) -> Any:
        model.zero_grad()
        loss = loss_of(model, batch_of(t))
        loss.backward()
        return loss.detach()

    for t in range(STEPS):
        if how == "by a closure":
            loss = optimizers[0].step(partial(loss_and_gradients, t))
        else:
            loss = loss_and_gradients(t)
            for optimizer in optimizers:
                optimizer.step()
        scheduler.step(loss)
    assert final_loss(model) == pytest.approx(plain, rel=1e-6)


def test_a_step_that_fails_is_followed_by_steps_that_are_heard() -> None:
    class Fails(Derived):
        fails = False

        def step(self, closure: Any = None) -> Any:
            if self.fails:
                raise MemoryError("out of memory")
            return super().step(closure)

    model = network()
    optimizer = Fails(model.parameters(), lr=GUESS)
    scheduler = searching(model, optimizer, STEPS)
    for part in (range(10), range(10, STEPS)):
        train(model, optimizer, scheduler, part)
        optimizer.fails = True
        with pytest.raises(MemoryError):
            optimizer.step()
        optimizer.fails = False
    assert final_loss(model) < 1.2 * plain_loss(Adam, GUESS, STEPS)


class PassesOn(Optimizer):
    """It has the groups and the state of another one, which it steps, and whose hooks are its own."""

    def __init__(self, base: Optimizer) -> None:
        self.__dict__.update(base.__dict__)
        self.base = base
        self.step = base.step  # type: ignore[method-assign]


def test_the_steps_of_an_optimizer_that_passes_its_hooks_on_are_heard() -> None:
    model = network()
    optimizer = PassesOn(Adam(model.parameters(), lr=1e-3))
    scheduler = hdet.auto(optimizer, total_steps=50)
    for k in range(20):
        optimizer.zero_grad()
        loss = loss_of(model, batch_of(k))
        loss.backward()
        optimizer.step()
        scheduler.step(loss)
    assert scheduler.search.steps.made == 20
    assert scheduler.search.learned.phase is not Phase.FIRST
