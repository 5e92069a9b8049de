"""What a search has learned, in a checkpoint: it comes back as it was, and what is missing is noticed."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import SGD, Adam

import hdet
from hdet.rule.enums import Phase
from hdet.rule.judge import Block, LossHistory, Snapshot
from hdet.rule.state import State
from hdet.state import fields_of, from_fields
from tests.search.runs import built, search_of

numbers = st.floats()
histories = st.builds(
    LossHistory,
    lowest=numbers,
    gain=numbers,
    before=st.lists(numbers, max_size=2).map(tuple),
    recent=st.lists(st.builds(Block, numbers, st.integers(0, 100)), max_size=8).map(tuple),
    second_differences=st.lists(numbers, max_size=48).map(tuple),
    latest=st.lists(numbers, max_size=8).map(tuple),
    nonfinite_streak=st.integers(0, 10),
    suspect_level=numbers,
)
states = st.builds(
    State,
    phase=st.sampled_from(Phase),
    log_factor=st.floats(math.log(1e-15), math.log(1e15)),
    peak=st.floats(-1, 1e6),
    ceiling=numbers,
    history=histories,
    snapshots=st.just((Snapshot(7, 0),)),
    slowed_from=numbers,
    pace=numbers,
    rate=numbers,
)


@given(states)
def test_it_comes_back_as_it_was(state: State) -> None:
    plain = fields_of(state)
    assert json.loads(json.dumps(plain)) == plain or "nan" in repr(state)  # plain numbers and lists
    assert repr(from_fields(State, plain)) == repr(state)
    assert isinstance(from_fields(State, plain).phase, Phase)


@given(states)
def test_what_a_later_version_may_add_is_left_out(state: State) -> None:
    assert repr(from_fields(State, {**fields_of(state), "mood": 3.0})) == repr(state)


@pytest.mark.parametrize("name", State._fields)
def test_a_state_with_something_missing_is_refused(name: str) -> None:
    plain = fields_of(State())
    del plain[name]
    with pytest.raises(KeyError, match=name):
        from_fields(State, plain)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("phase", 3),
        ("phase", "first"),
        ("log_factor", None),
        ("log_factor", [1.0]),
        ("ceiling", "high"),
        ("history", 3),
        ("history", []),
        ("history", fields_of(State())["history"][1:]),
    ],
)
def test_what_is_not_of_its_type_is_refused(name: str, value: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        from_fields(State, {**fields_of(State()), name: value})


def test_a_search_that_has_not_begun_comes_back() -> None:
    _, _, scheduler = built()
    _, _, other = built(guess=1e-2)
    other.load_state_dict(scheduler.state_dict())
    assert (search_of(other).learned.phase, search_of(other).memory.rounds) == (Phase.FIRST, 0)
    assert other.get_last_lr() == scheduler.get_last_lr()


@pytest.mark.parametrize("steps", [0, 2])
def test_a_checkpoint_of_torch_is_refused_before_anything_changes(steps: int) -> None:
    """It knows no guess and no factor."""
    _, optimizer, scheduler = built()
    torchs = torch.optim.lr_scheduler.OneCycleLR(Adam([torch.ones(1)]), 0.1, 300)
    for _ in range(steps):
        torchs.optimizer.step()
        torchs.step()
    before = repr((scheduler.state_dict(), optimizer.state_dict()))
    with pytest.raises(hdet.ArgumentError, match=r"a state of the scheduler of hdet\.auto was expected; give it what"):
        scheduler.load_state_dict(torchs.state_dict())
    assert repr((scheduler.state_dict(), optimizer.state_dict())) == before


def test_a_search_that_has_stopped_is_saved_as_plain_values(tmp_path: Path) -> None:
    """``torch.load`` with ``weights_only`` refuses members of an enum."""
    with pytest.warns(hdet.SearchWarning, match="too short"):
        scheduler = hdet.auto(SGD([torch.zeros(2, requires_grad=True)], lr=0.1), total_steps=10)
    torch.save(scheduler.state_dict(), tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt", weights_only=True)["hdet"]["stopped_for"] == "too_short"
