"""Foreign and damaged states: an error that says what it is and what to do, and nothing is changed by it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import hdet
from tests.checkpoint.searching import Searching


def trained() -> hdet.OneCycleLR:
    optimizer = torch.optim.SGD([{"params": [nn.Parameter(torch.ones(2))]} for _ in range(2)], lr=0.1, momentum=0.9)
    return hdet.OneCycleLR(optimizer, 0.1, 50)


def decaying() -> hdet.OneCycleLR:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9)
    return hdet.OneCycleLR(optimizer, 0.1, 50, decay="exponential", auto_lr=hdet.Normalised())


def search() -> hdet.AutoScheduler:
    return Searching().go(0, 12).scheduler


def on_a_schedule() -> Any:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    return hdet.auto(optimizer, schedule=lr_scheduler.CosineAnnealingLR(optimizer, 50), total_steps=50)


def ensemble() -> hdet.Ensemble:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1, weight_decay=0.1)
    knobs = [hdet.knobs.lr(optimizer), hdet.knobs.optimizer(optimizer, "weight_decay", spread=0.3)]
    return hdet.Ensemble(optimizer, lr_scheduler.CosineAnnealingLR(optimizer, 50), knobs, sync_every=5)


KINDS: dict[str, Callable[[], Any]] = {f.__name__: f for f in (trained, decaying, search, on_a_schedule, ensemble)}


def torchs(make: Callable[[torch.optim.Optimizer], Any]) -> dict[str, Any]:
    return dict(make(torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9)).state_dict())


FOREIGN: dict[str, tuple[Any, str]] = {
    "nothing": ({}, r"a dict with the keys \[\]"),
    "a list": ([1], "a list"),
    "none": (None, "a NoneType"),
    "cosine": (torchs(lambda o: lr_scheduler.CosineAnnealingLR(o, 5)), r"a dict with the keys \['T_max'"),
    "steps": (torchs(lambda o: lr_scheduler.StepLR(o, 5)), r"a dict with the keys \[.*'gamma'"),
    "lambda": (torchs(lambda o: lr_scheduler.LambdaLR(o, float)), r"a dict with the keys \[.*'base_lrs'"),
    "plateau": (torchs(lr_scheduler.ReduceLROnPlateau), r"a dict with the keys \[.*'best'"),
    "optimizer": (torchs(lambda o: o), r"a dict with the keys \['param_groups', 'state'\]"),
    "model": (nn.Linear(2, 3).state_dict(), r"a dict with the keys \['bias', 'weight'\]"),
    "scaler": (torch.amp.GradScaler("cpu").state_dict(), r"a dict with the keys \[.*'growth_factor'"),
    "other": ({"epoch": 3}, r"a dict with the keys \['epoch'\]"),
}


def rates(scheduler: Any) -> list[float]:
    return [float(group["lr"]) for group in scheduler.optimizer.param_groups]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("foreign", FOREIGN)
def test_states_of_others(kind: str, foreign: str) -> None:
    scheduler, (state, words) = KINDS[kind](), FOREIGN[foreign]
    before = copy.deepcopy(scheduler.state_dict())
    with pytest.raises(
        hdet.ArgumentError, match=rf"was given {words}.*, but a state of .*hdet\.\w+.* was expected; give it"
    ):
        scheduler.load_state_dict(state)
    assert repr(scheduler.state_dict()) == repr(before)


@pytest.mark.parametrize(("into", "of"), [(a, b) for a in KINDS for b in KINDS if a != b])
def test_states_of_each_other(into: str, of: str) -> None:
    scheduler, state = KINDS[into](), KINDS[of]().state_dict()
    before, own = copy.deepcopy(scheduler.state_dict()), rates(scheduler)
    with pytest.raises(hdet.ArgumentError, match=r"; (build|give|the checkpoint is damaged or of something else)"):
        scheduler.load_state_dict(state)
    assert repr(scheduler.state_dict()) == repr(before)
    assert rates(scheduler) == own


def test_what_is_said_of_something_missing() -> None:
    scheduler = trained()
    for name in ("learned", "sync_every", "controller_state", "controller_arguments", "spreads"):
        state = copy.deepcopy(scheduler.state_dict())
        del state["hdet"][name]
        words = f"the checkpoint's hdet state does not fit .*{name}.*; the checkpoint is damaged"
        with pytest.raises(hdet.ArgumentError, match=words):
            scheduler.load_state_dict(state)


def test_a_state_of_torch_is_taken() -> None:
    scheduler = trained()
    theirs = lr_scheduler.OneCycleLR(scheduler.optimizer, 0.1, 50)
    for _ in range(7):
        scheduler.optimizer.step()
        theirs.step()
    scheduler.load_state_dict(theirs.state_dict())
    assert scheduler.last_epoch == 7


# -- something is missing ---------------------------------------------------------------------------------------------


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every entry of a state that has a name: in a dict, or in a list of pairs."""
    found = [path] if path else []
    if isinstance(value, dict):
        rows = list(value.items())
    elif isinstance(value, list) and all(isinstance(one, list) and one and isinstance(one[0], str) for one in value):
        rows = list(enumerate(value))
    else:
        return found
    for key, item in rows:
        found += places(item, (*path, key))
    return found


def without(state: Any, path: tuple[Any, ...]) -> Any:
    state = copy.deepcopy(state)
    target = state
    for key in path[:-1]:
        target = target[key]
    del target[path[-1]]
    return state


STATES = {name: copy.deepcopy(make().state_dict()) for name, make in KINDS.items()}
BARE: dict[str, Callable[[], Any]] = {**KINDS, "search": lambda: Searching().scheduler}


@pytest.mark.filterwarnings("ignore::hdet.ResumeWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_a_state_without_an_entry_is_refused_or_goes_on(kind: str) -> None:
    """Either it is refused and nothing has changed, or the scheduler goes on."""
    for path in places(STATES[kind]):
        scheduler = BARE[kind]()
        before, own = repr(scheduler.state_dict()), rates(scheduler)
        try:
            scheduler.load_state_dict(without(STATES[kind], path))
        except hdet.ArgumentError:
            assert repr(scheduler.state_dict()) == before, path
            assert rates(scheduler) == own, path
        else:
            scheduler.optimizer._opt_called = True
            scheduler.step()


MANGLED = ["", "x", [], [None], ["x"], {}, [{}], True, math.nan, 1.5, 10**400, torch.ones(2), [0.1, 0.1]]
"""What few values of a search's schedule are."""


@pytest.mark.filterwarnings("ignore::hdet.SearchWarning")
@pytest.mark.parametrize("kind", ["search", "on_a_schedule"])
def test_a_mangled_value_of_a_schedule_is_refused_or_goes_on(kind: str) -> None:
    """Either it is refused and nothing has changed, or rates are numbers afterwards."""
    state = STATES[kind]
    paths = [("last_epoch",), ("total_steps",), ("_last_lr",), ("schedule",)]
    paths += [("schedule", key) for key in state["schedule"]]
    refused = set()
    for path in paths:
        for value in MANGLED:
            mangled = copy.deepcopy(state)
            (mangled if len(path) == 1 else mangled["schedule"])[path[-1]] = value
            scheduler = BARE[kind]()
            before, own = repr(scheduler.state_dict()), rates(scheduler)
            try:
                scheduler.load_state_dict(mangled)
            except hdet.ArgumentError:
                refused.add(path)
                assert repr(scheduler.state_dict()) == before, (path, value)
                assert rates(scheduler) == own, (path, value)
            else:
                for _ in range(2):
                    scheduler.optimizer._opt_called = True
                    scheduler.step()
                assert all(map(math.isfinite, rates(scheduler))), (path, value)
    assert refused == set(paths) - {("total_steps",)}  # that of the schedule counts
