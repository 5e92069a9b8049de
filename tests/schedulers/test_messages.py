"""Arguments that are nearly right: the message has the line to write instead."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hdet
from tests.problems import network


def cure(**arguments: Any) -> str:
    """What building an Ensemble says."""
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=0.1)
    before = float(optimizer.param_groups[0]["lr"])
    made = {name: value(model, optimizer) if callable(value) else value for name, value in arguments.items()}
    with pytest.raises(hdet.ArgumentError) as error:
        hdet.Ensemble(optimizer, **made)
    assert float(optimizer.param_groups[0]["lr"]) == before
    return str(error.value)


def test_one_knob_that_is_not_in_a_list() -> None:
    message = cure(knobs=lambda _, optimizer: hdet.knobs.optimizer(optimizer, "weight_decay", spread=0.3))
    assert "knobs=[" in message


def test_sync_every_auto_where_replicas_train() -> None:
    message = cure(sync_every="auto")
    assert "sync_every" in message
    assert "leave it out" in message or any(digit in message for digit in "123456789")


def test_sync_every_auto_in_a_trained_one_cycle() -> None:
    optimizer = torch.optim.Adam(network().parameters(), lr=1e-3)
    with pytest.raises(hdet.ArgumentError, match="sync_every") as error:
        hdet.OneCycleLR(optimizer, 0.1, total_steps=100, sync_every="auto")
    assert "leave it out" in str(error.value) or "for instance" in str(error.value)


@pytest.mark.parametrize(
    "arguments", [{"sync_every": 20}, {"auto_lr_start": 30}, {"spread": 0.1}, {"auto_lr": hdet.Normalised()}]
)
def test_what_only_replicas_that_train_apart_have(arguments: dict[str, Any]) -> None:
    optimizer = torch.optim.Adam(network().parameters(), lr=1e-3)
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{next(iter(arguments))}'"):
        hdet.auto(optimizer, total_steps=100, **arguments)


@pytest.mark.parametrize(
    "arguments", [{"rollback": False}, {"highest": 0.1}, {"schedule": None}, {"schedule_every": 2}]
)
def test_what_only_a_search_has(arguments: dict[str, Any]) -> None:
    optimizer = torch.optim.Adam(network().parameters(), lr=1e-3)
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{next(iter(arguments))}'"):
        hdet.OneCycleLR(optimizer, 0.1, total_steps=100, **arguments)
    for name in ("finish", "found", "search_state_dict"):
        assert not hasattr(hdet.OneCycleLR, name)


@pytest.mark.parametrize("max_lr", ["auto", "automatic", "0.1"])
def test_a_onecycle_that_is_to_find_its_rate(max_lr: Any) -> None:
    """The message has the line to write."""
    optimizer = torch.optim.Adam(network().parameters(), lr=1e-3)
    before = repr(optimizer.state_dict())
    words = rf"max_lr must be a number.*got max_lr='{max_lr}'; .*write scheduler = hdet\.auto\(optimizer, total_steps="
    with pytest.raises(hdet.ArgumentError, match=words):
        hdet.OneCycleLR(optimizer, max_lr, total_steps=100)
    assert repr(optimizer.state_dict()) == before


@pytest.mark.parametrize("place", [0, 1])
def test_a_search_in_a_sequence(place: int) -> None:
    """It owns the rate from the first step to the last, and takes the whole sequence instead."""
    optimizer = torch.optim.SGD(network().parameters(), lr=1e-3)
    parts: list[Any] = [torch.optim.lr_scheduler.ConstantLR(optimizer), hdet.auto(optimizer, total_steps=100)]
    words = r"cannot be a part of a SequentialLR; .*hdet\.auto\(optimizer, schedule=lambda o: SequentialLR\("
    with pytest.raises(hdet.ArgumentError, match=words):
        torch.optim.lr_scheduler.SequentialLR(optimizer, parts[:: 1 if place else -1], milestones=[30])


@pytest.mark.parametrize("argument", ["probe", "fanout", "copies_on_device"])
def test_what_is_not_needed_any_more(argument: str) -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for face in (hdet.auto, hdet.OneCycleLR, hdet.Ensemble):
        more = {"max_lr": 0.1} if face is hdet.OneCycleLR else {}
        with pytest.raises(TypeError, match=argument):
            face(optimizer, total_steps=100, **{argument: None}, **more)  # type: ignore[operator]


def test_a_schedule_that_goes_by_what_it_is_told() -> None:
    optimizer = torch.optim.Adam(network().parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    with pytest.raises(hdet.ArgumentError, match=r"ReduceLROnPlateau .*for instance CosineAnnealingLR"):
        hdet.auto(optimizer, schedule=schedule, total_steps=100)


def test_a_schedule_of_ones_own_cannot_be_finished() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    scheduler = hdet.auto(optimizer, schedule=schedule, total_steps=100)
    before = repr(scheduler.state_dict())
    words = r"finish\(\) is for runs without schedule=, .*a schedule of 100 steps; leave schedule= out"
    with pytest.raises(hdet.ArgumentError, match=words):
        scheduler.finish(10)
    assert repr(scheduler.state_dict()) == before
