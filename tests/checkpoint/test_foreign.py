"""Foreign and damaged states: an error that says what it is and what to do, and nothing is changed by it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
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


def search() -> hdet.OneCycleLR:
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
    "nothing": ({}, "an empty dict"),
    "a list": ([1], "a list and no dict"),
    "none": (None, "a NoneType and no dict"),
    "cosine": (torchs(lambda o: lr_scheduler.CosineAnnealingLR(o, 5)), "a state of torch's CosineAnnealingLR"),
    "steps": (torchs(lambda o: lr_scheduler.StepLR(o, 5)), "a state of another scheduler"),
    "lambda": (torchs(lambda o: lr_scheduler.LambdaLR(o, float)), "a state of torch's LambdaLR"),
    "plateau": (torchs(lr_scheduler.ReduceLROnPlateau), "a state of torch's ReduceLROnPlateau"),
    "optimizer": (torchs(lambda o: o), "a state of an optimizer"),
    "model": (nn.Linear(2, 3).state_dict(), "a state of a model"),
    "scaler": (torch.amp.GradScaler("cpu").state_dict(), "a state of a GradScaler"),
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
        hdet.ArgumentError, match=rf"was given {words}, but a state of hdet\.\w+.* was expected; give it"
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


def test_what_is_said_of_damaged_numbers() -> None:
    scheduler = trained()
    for name, value, words in (
        ("learned", [1.0, math.nan], r"has learned=\[1.0, nan\], but it must be 2 finite numbers, one per knob"),
        ("learned", [1.0], "must be 2 finite numbers"),
        ("sync_every", 0, "has sync_every=0, but it must be an integer, at least 1"),
        ("controller_state", [["velocity", [0.0]]], "2 finite numbers, as many as here"),
        ("controller_arguments", [["sigma", 0.1]], r"has the entries \['sigma'\], but must have"),
        ("way", 3, r"must be one of \['replicas', 'search'\]"),
    ):
        state = copy.deepcopy(scheduler.state_dict())
        state["hdet"][name] = value
        with pytest.raises(hdet.ArgumentError, match=words + r".*; the checkpoint is damaged"):
            scheduler.load_state_dict(state)
        del state["hdet"][name]
        with pytest.raises(hdet.ArgumentError, match=f"the checkpoint's hdet state.* has no '{name}', which must be"):
            scheduler.load_state_dict(state)


def test_a_state_of_torch_is_taken() -> None:
    scheduler = trained()
    theirs = lr_scheduler.OneCycleLR(scheduler.optimizer, 0.1, 50)
    for _ in range(7):
        scheduler.optimizer.step()
        theirs.step()
    scheduler.load_state_dict(theirs.state_dict())
    assert scheduler.last_epoch == 7


# -- mutated at random ------------------------------------------------------------------------------------------------

STRANGE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=3),
    st.just(10**400),
    st.lists(st.one_of(st.floats(), st.text(max_size=2), st.none()), max_size=3),
    st.dictionaries(st.text(max_size=2), st.integers(), max_size=2),
    st.just(torch.ones(3)),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a state."""
    found = [path] if path else []
    rows = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in rows:
        found += places(item, (*path, key))
    return found


def mutated(state: Any, path: tuple[Any, ...], removes: bool, value: Any) -> Any:
    state = copy.deepcopy(state)
    target = state
    for key in path[:-1]:
        target = target[key]
    if removes:
        del target[path[-1]]
    else:
        target[path[-1]] = value
    return state


STATES = {name: copy.deepcopy(make().state_dict()) for name, make in KINDS.items()}
BARE: dict[str, Callable[[], Any]] = {**KINDS, "search": lambda: Searching().scheduler}


@pytest.mark.filterwarnings("ignore::hdet.ResumeWarning")
@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_no_damage_is_obscure_or_half_loaded(kind: str, data: st.DataObject) -> None:
    """Either it is refused and nothing has changed, or the scheduler goes on."""
    scheduler = BARE[kind]()
    before, own = repr(scheduler.state_dict()), rates(scheduler)
    path = data.draw(st.sampled_from(places(STATES[kind])))
    state = mutated(STATES[kind], path, data.draw(st.booleans()), data.draw(STRANGE))
    try:
        scheduler.load_state_dict(state)
    except hdet.ArgumentError:
        assert repr(scheduler.state_dict()) == before
        assert rates(scheduler) == own
        return
    scheduler.optimizer._opt_called = True
    try:
        scheduler.step()
    except ValueError as error:  # torch's own: the step counter is at the schedule's end
        if "total steps" not in str(error):
            raise
