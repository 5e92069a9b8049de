"""Snapshots: everything that training changes is restored, for any optimizer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.rollback.snapshots import START, Snapshots

MAKES: dict[str, Callable[[list[Tensor]], Optimizer]] = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.1),
    "amsgrad": lambda ps: torch.optim.AdamW(ps, lr=0.1, amsgrad=True),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=0.1, momentum=0.5, centered=True),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.1),
}


def made(make: Callable[[list[Tensor]], Optimizer]) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    return model, make(list(model.parameters()))


def step(model: nn.Module, optimizer: Optimizer, seed: int = 0) -> None:
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(seed))
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def everything(model: nn.Module, optimizer: Optimizer) -> tuple[Any, Any]:
    return copy.deepcopy((dict(model.state_dict()), optimizer.state_dict()))


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("kind", MAKES)
def test_everything_is_as_it_was_and_training_goes_on_from_there(kind: str, steps: int) -> None:
    """Before the first step an optimizer remembers nothing."""
    model, optimizer = made(MAKES[kind])
    for k in range(steps):
        step(model, optimizer, k)
    snapshots = Snapshots()
    snapshots.keep(0, optimizer, model)
    before = everything(model, optimizer)
    for k in range(3):
        step(model, optimizer, 10 + k)
    after = everything(model, optimizer)
    assert not equal(after, before)
    snapshots.roll_back_(0, optimizer, model)
    assert equal(everything(model, optimizer), before)
    for k in range(3):
        step(model, optimizer, 10 + k)
    assert equal(everything(model, optimizer), after)


def test_a_snapshot_can_be_put_back_again_and_again() -> None:
    model, optimizer = made(MAKES["adam"])
    snapshots = Snapshots()
    for slot in (0, 1):
        step(model, optimizer, slot)
        snapshots.keep(slot, optimizer, model)
    after_one = everything(model, optimizer)
    snapshots.roll_back_(0, optimizer, model)
    step(model, optimizer, 1)
    assert equal(everything(model, optimizer), after_one)
    snapshots.roll_back_(1, optimizer, model)
    assert equal(everything(model, optimizer), after_one)


def test_weights_stay_the_tensors_that_they_are() -> None:
    model, optimizer = made(MAKES["adam"])
    step(model, optimizer)
    memory = [t.data_ptr() for t in [*model.parameters(), *model.buffers()]]
    moments = [id(state["exp_avg"]) for state in optimizer.state.values()]
    snapshots = Snapshots()
    snapshots.keep(0, optimizer, model)
    step(model, optimizer)
    snapshots.roll_back_(0, optimizer, model)
    assert [t.data_ptr() for t in [*model.parameters(), *model.buffers()]] == memory
    assert [id(state["exp_avg"]) for state in optimizer.state.values()] == moments


def test_without_a_model_buffers_stay() -> None:
    model, optimizer = made(MAKES["sgd"])
    snapshots = Snapshots()
    snapshots.keep(0, optimizer, None)
    before, mean = [p.detach().clone() for p in model.parameters()], model[1].running_mean.clone()  # type: ignore[index, union-attr]
    step(model, optimizer)
    snapshots.roll_back_(0, optimizer, None)
    assert all(map(torch.equal, model.parameters(), before))
    assert not torch.equal(model[1].running_mean, mean)  # type: ignore[index, union-attr, arg-type]


class Counting(torch.optim.SGD):
    """Keeps numbers in its groups, as Schedule-Free and Prodigy do: one from the beginning, one from a step on."""

    def __init__(self, ps: list[Tensor]) -> None:
        super().__init__(ps, lr=0.1, momentum=0.9)
        for group in self.param_groups:
            group["k"] = 0

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] += 1
            group["weight_sum"] = group.get("weight_sum", 0.0) + 0.5
        return super().step(closure)


@pytest.mark.parametrize("saved", [False, True])
def test_only_what_the_optimizers_own_step_changes_in_a_group_is_put_back(saved: bool) -> None:
    """Rates, momenta and whatever else others write stay, also what they have put there since."""
    model, optimizer = made(Counting)
    snapshots = Snapshots()
    snapshots.watch(optimizer)
    group = optimizer.param_groups[0]
    snapshots.keep(0, optimizer, model)
    for _ in range(3):
        step(model, optimizer)
    snapshots.keep(1, optimizer, model)
    step(model, optimizer)
    others = {"lr": 0.7, "momentum": 0.5, "weight_decay": 0.1, "dampening": 0.2, "swa_lr": 0.01, "rho": 0.05}
    group.update(others)
    if saved:
        snapshots = Snapshots.loaded(snapshots.saved(optimizer), optimizer)
    snapshots.roll_back_(1, optimizer, model)
    assert (group["k"], group["weight_sum"]) == (3, 1.5)
    snapshots.roll_back_(0, optimizer, model)
    assert group["k"] == 0
    assert "weight_sum" not in group
    assert {name: group[name] for name in others} == others


def test_numbers_of_a_group_are_put_back_into_that_group() -> None:
    """Of several optimizers a group may be added to the first."""
    model, optimizer = made(Counting)
    snapshots = Snapshots()
    snapshots.watch(optimizer)
    step(model, optimizer)
    snapshots.keep(0, optimizer, model)
    step(model, optimizer)
    optimizer.add_param_group({"params": [torch.zeros(1, requires_grad=True)], "k": 7})
    optimizer.param_groups.reverse()
    snapshots.roll_back_(0, optimizer, model)
    assert [group["k"] for group in optimizer.param_groups] == [7, 1]


def test_slots_are_freed_and_their_memory_is_used_again() -> None:
    model, optimizer = made(MAKES["adam"])
    step(model, optimizer)
    snapshots = Snapshots()
    for slot in (START, 0, 1):
        snapshots.keep(slot, optimizer, model)
    assert snapshots.present(optimizer) == {START, 0, 1}
    snapshots.keep_only({0, 1})
    assert snapshots.present(optimizer) == {0, 1}
    memory = [w.data_ptr() for w in snapshots._copies[0].weights]
    snapshots.keep(0, optimizer, model)
    assert [w.data_ptr() for w in snapshots._copies[0].weights] == memory


def test_what_both_have_is_put_back_after_layers_were_frozen_added_or_replaced() -> None:
    model, optimizer = made(MAKES["adam"])
    step(model, optimizer)
    snapshots = Snapshots()
    snapshots.keep(0, optimizer, model)
    first, last = model[0].weight, model[2].weight
    kept = [p.detach().clone() for p in (first, last)]
    moments = optimizer.state[last]["exp_avg"].clone()
    first.requires_grad_(False)
    new = torch.ones(2, requires_grad=True)
    optimizer.add_param_group({"params": [new]})
    step(model, optimizer)
    with torch.no_grad():
        for p in (first, last, new):
            p.fill_(3.0)
    snapshots.roll_back_(0, optimizer, model)
    assert [torch.equal(p, was) for p, was in zip((first, last), kept, strict=True)] == [True, True]
    assert torch.equal(optimizer.state[last]["exp_avg"], moments)
    assert new.tolist() == [3.0, 3.0]
    other = torch.optim.Adam([torch.ones(2, requires_grad=True)])
    assert snapshots.present(optimizer) == {0}
    assert snapshots.present(other) == frozenset()


def test_a_snapshot_that_is_retired_is_not_overwritten() -> None:
    model, optimizer = made(MAKES["adam"])
    snapshots, after = Snapshots(host=(2,)), {}
    for t in range(1, 4):
        step(model, optimizer, t)
        after[t] = everything(model, optimizer)
        snapshots.keep(t % 2, optimizer, model)
        if t == 2:
            snapshots.retire(1, 2)  # that of the first step
    for slot, t in ((2, 1), (0, 2), (1, 3)):
        snapshots.roll_back_(slot, optimizer, model)
        assert equal(everything(model, optimizer), after[t]), slot


def test_buffers_that_came_since_or_became_longer_stay() -> None:
    model, optimizer = made(MAKES["sgd"])
    model.register_buffer("cache", torch.zeros(2))
    snapshots = Snapshots()
    snapshots.keep(0, optimizer, model)
    model.cache = torch.ones(5)
    model.register_buffer("more", torch.ones(1))
    snapshots.roll_back_(0, optimizer, model)
    assert model.cache.tolist() == [1.0] * 5
    assert model.more.tolist() == [1.0]


@pytest.mark.parametrize("kind", MAKES)
def test_what_was_saved_is_put_back_by_another(kind: str) -> None:
    model, optimizer = made(MAKES[kind])
    step(model, optimizer)
    first = Snapshots()
    first.keep(0, optimizer, model)
    before = everything(model, optimizer)
    step(model, optimizer, 1)
    second = Snapshots.loaded(copy.deepcopy(first.saved(optimizer)), optimizer)
    assert second.present(optimizer) == {0}
    second.roll_back_(0, optimizer, model)
    assert equal(everything(model, optimizer), before)


def test_what_was_saved_of_other_shapes_is_refused() -> None:
    model, optimizer = made(MAKES["sgd"])
    first = Snapshots()
    first.keep(0, optimizer, model)
    rows = first.saved(optimizer)
    rows[0][1] = {**rows[0][1], "weights": [torch.ones(1), *rows[0][1]["weights"][1:]]}
    with pytest.raises(ValueError, match="it holds tensors of shapes"):
        Snapshots.loaded(rows, optimizer)


def test_parameters_that_are_gone_are_not_saved() -> None:
    model, optimizer = made(MAKES["sgd"])
    snapshots = Snapshots()
    snapshots.keep(0, optimizer, model)
    optimizer.param_groups[0]["params"] = optimizer.param_groups[0]["params"][1:]
    assert snapshots.saved(optimizer) == []


def test_a_step_that_is_counted_on_the_host_is_restored_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adam without ``capturable`` counts there, also for weights on a device. A state that was cleared is made anew."""
    monkeypatch.setattr("hdet.rollback.snapshots.has_room", lambda needed: True)
    for options, place in (({}, "cpu"), ({"capturable": True}, "meta")):
        weight = nn.Parameter(torch.ones(3, device="meta"))
        optimizer = torch.optim.Adam([weight], **options)  # type: ignore[arg-type]
        state = {"step": torch.tensor(5.0, device=place), "exp_avg": torch.zeros(3, device="meta")}
        optimizer.state[weight] = dict(state)
        snapshots = Snapshots(host=())
        snapshots.keep(0, optimizer, None)
        optimizer.state.clear()
        snapshots.roll_back_(0, optimizer, None)
        assert {name: value.device.type for name, value in optimizer.state[weight].items()} == {
            "step": place,
            "exp_avg": "meta",
        }
