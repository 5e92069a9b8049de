"""The optimizer's step hook: once a step, whatever the optimizer does with it."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from hdet.errors import ArgumentError
from hdet.optimizer import refuse_without_hooks
from hdet.rule.constants import DEFAULT
from hdet.search.steps import Steps


class Owner(Steps):
    """Sees the gradient of each step, and does nothing with it."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__([0], DEFAULT, None)
        self.seen: list[float | None] = []
        self.begin(optimizer)

    def _before_step(self, optimizer: Optimizer) -> None:
        gradient = optimizer.param_groups[0]["params"][0].grad
        self.seen.append(None if gradient is None else gradient.item())


def made(kind: type[SGD] = SGD) -> tuple[nn.Parameter, SGD]:
    p = nn.Parameter(torch.ones(()))
    return p, kind([p], lr=0.1)


def test_it_sees_the_gradient_of_every_step() -> None:
    p, optimizer = made()
    owner = Owner(optimizer)
    for gradient in (3.0, 4.0):
        p.grad = torch.tensor(gradient)
        optimizer.step()
    assert owner.seen == [3.0, 4.0]


@pytest.mark.parametrize("by_name", [True, False])
def test_a_closure_is_called_first_and_its_loss_is_given_back(by_name: bool) -> None:
    p, optimizer = made()
    owner = Owner(optimizer)
    calls = []

    def closure() -> Tensor:
        calls.append(len(owner.seen))
        p.grad = torch.tensor(5.0)
        return torch.tensor(7.0)

    loss = optimizer.step(closure=closure) if by_name else optimizer.step(closure)
    assert float(loss) == 7.0
    assert (calls, owner.seen) == ([0], [5.0])


class TwiceClosing(SGD):
    """Calls its closure twice, as some do."""

    def step(self, closure: Any = None) -> Any:
        closure()
        return closure()


class Nested(SGD):
    """Its step is its base class's, which calls hooks too."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize("kind", [TwiceClosing, Nested])
def test_one_step_is_one_step(kind: type[SGD]) -> None:
    p, optimizer = made(kind)
    owner = Owner(optimizer)

    def closure() -> Tensor:
        p.grad = torch.tensor(2.0)
        return p.detach()

    for _ in range(3):
        optimizer.step(closure)
    assert owner.seen == [2.0] * 3


def test_it_goes_with_its_owner() -> None:
    _, optimizer = made()
    owner = Owner(optimizer)
    assert len(optimizer._optimizer_step_pre_hooks) == 2  # and that of its snapshots
    del owner
    gc.collect()
    assert len(optimizer._optimizer_step_pre_hooks) == len(optimizer._optimizer_step_post_hooks) == 0
    optimizer.step()


def test_a_step_that_raises_is_followed_by_others() -> None:
    p, optimizer = made()
    owner = Owner(optimizer)

    def fails() -> Tensor:
        raise KeyError("data")

    with pytest.raises(KeyError):
        optimizer.step(fails)
    owner.end_step(optimizer)  # as the scheduler does
    p.grad = torch.tensor(1.0)
    optimizer.step()
    optimizer.step()
    assert owner.seen == [1.0, 1.0]


def test_hooks_do_not_run_for_a_copy() -> None:
    _, optimizer = made()
    owner = Owner(optimizer)
    other = copy.deepcopy(optimizer)
    other.step()
    assert owner.seen == []


def test_what_cannot_have_hooks_is_refused() -> None:
    refuse_without_hooks(made()[1])

    class Wrapper:
        """Of an optimizer that it hides."""

    with pytest.raises(ArgumentError, match="Wrapper cannot have step hooks"):
        refuse_without_hooks(Wrapper())  # type: ignore[arg-type]
