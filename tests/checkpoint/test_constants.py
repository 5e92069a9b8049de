"""A run that is resumed in another version of hdet goes on with the constants that it began with."""

from __future__ import annotations

import copy
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import hdet
from hdet.rule.constants import DEFAULT, LIMITS, LOOKS, ROUNDS
from hdet.rule.decision import Rule
from hdet.schedulers import auto_scheduler
from hdet.state import STATE_VERSION
from tests.checkpoint.searching import STEPS, Searching
from tests.problems import quiet
from tests.rollback.guarded import Guarded

OTHERS = {
    "how far the rate climbs": {"constants": DEFAULT._replace(max_growth=1.3, min_rise=0.2)},
    "where rounds end, and what is sampled": {"constants": DEFAULT._replace(round_growth=0.4, max_samples=3)},
    "what a round may lose": {"limits": LIMITS._replace(lost=-1.0, noise=0.01)},
}


def rule_of(scheduler: hdet.AutoScheduler) -> Rule:
    return scheduler.search.rule


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_a_resumed_search_keeps_its_constants(
    other: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after an upgrade whose constants differ: bit-equal to a run that never knew of it."""
    with quiet():
        with monkeypatch.context() as earlier:
            earlier.setattr(auto_scheduler, "Rule", partial(Rule, **other))
            Searching().go(0, 20).save(tmp_path / "run.pt")
            whole = Searching().go(0, STEPS)
        resumed = Searching.loaded(tmp_path / "run.pt").go(20, STEPS)
    rule = rule_of(resumed.scheduler)
    assert {"constants": rule.constants, "limits": rule.limits} == {"constants": DEFAULT, "limits": LIMITS, **other}
    assert resumed.equals(whole)
    with quiet():
        assert not resumed.equals(Searching().go(0, STEPS))


@pytest.mark.parametrize(
    "change",
    [
        lambda constants: constants.pop(),
        lambda constants: constants.append(["mood", 3.0]),
        lambda constants: constants[0].__setitem__(1, "high"),
        lambda constants: constants[1].__setitem__(1, math.nan),
        lambda constants: constants[1].__setitem__(1, math.inf),
        lambda constants: constants[0].pop(),
    ],
)
@pytest.mark.parametrize("name", ["constants", "limits"])
def test_constants_of_another_rule_are_refused_before_anything_changes(name: str, change: Any) -> None:
    """One that is missing or unknown would change the run: a new version has to say what it means for old states."""
    scheduler = Searching().go(0, 10).scheduler
    before = scheduler.state_dict()
    other = copy.deepcopy(before)
    change(other["hdet"][name])
    with pytest.raises(hdet.ArgumentError, match="hdet state does not fit"):
        scheduler.load_state_dict(other)
    assert repr(scheduler.state_dict()) == repr(before)


def test_a_constant_of_a_later_rule_says_what_to_do() -> None:
    """A later version may have one more, in a state of the same format: nothing is damaged."""
    scheduler = Searching().go(0, 10).scheduler
    state = copy.deepcopy(scheduler.state_dict())
    state["hdet"]["hdet"] = "0.9.0"
    state["hdet"]["constants"].append(["mood", 3.0])
    with pytest.raises(hdet.ArgumentError, match=r"has \['mood'\], and .* has not; update hdet to 0\.9\.0 or later$"):
        scheduler.load_state_dict(state)


@pytest.mark.parametrize("name", ["min_round", "max_samples"])
def test_rounds_without_a_step_are_refused(name: str) -> None:
    """They would never end, and training would stand still."""
    scheduler = Searching().go(0, 10).scheduler
    state = copy.deepcopy(scheduler.state_dict())
    state["hdet"]["constants"] = [[one, 0 if one == name else value] for one, value in state["hdet"]["constants"]]
    with pytest.raises(hdet.ArgumentError, match=rf"no rule has such numbers: {{'{name}': 0}}"):
        scheduler.load_state_dict(state)


@pytest.mark.parametrize(
    ("version", "cure"),
    [
        (STATE_VERSION + 1, "update hdet to 0.9.0 or later"),
        (STATE_VERSION - 1, "load it with the hdet that wrote it"),
        ("new", "it is damaged or of something else: load an earlier one, or the right one"),
    ],
)
def test_a_state_of_another_version_says_what_to_do(version: Any, cure: str) -> None:
    scheduler = Searching().go(0, 10).scheduler
    state, search = scheduler.state_dict(), scheduler.search_state_dict()
    state["hdet"] |= {"version": version, "hdet": "0.9.0"}
    own = f"has version = {version!r} (written by hdet 0.9.0), but hdet {hdet.__version__} reads version"
    with pytest.raises(hdet.ArgumentError) as refused:
        scheduler.load_state_dict(state)
    assert str(refused.value) == f"the checkpoint's hdet state {own} {STATE_VERSION}; {cure}"
    with pytest.raises(hdet.ArgumentError) as refused:
        scheduler.load_search_state_dict({**search, "version": version, "hdet": "0.9.0"})
    assert str(refused.value) == f"the state of a search {own} {STATE_VERSION}; {cure}"


@pytest.mark.parametrize("forgives", [False, True])
def test_a_resumed_guard_judges_as_before(forgives: bool, tmp_path: Path) -> None:
    """Here, a rise that is no more than noise was divergence."""
    nervous = {"look_limits": LOOKS._replace(noise=0.0, leap=0.0), "round_limits": ROUNDS}

    def resumed(limits: dict[str, Any]) -> hdet.Guard:
        first = Guarded().go(0, 40)
        first.watching._state = first.watching._state._replace(**limits)
        first.save(tmp_path / "run.pt")
        second = Guarded(seed=1)
        hdet.load(tmp_path / "run.pt", **second.parts)
        if forgives:
            second.watching.forgive()
        return second.go(40, 100).watching

    with quiet():
        assert resumed({}).rollbacks == 0
        guard = resumed(nervous)
    assert guard.rollbacks > 0
    assert guard.state_dict()["look_limits"] == list(nervous["look_limits"])
