"""A guarded run that is cut anywhere goes on bit by bit; what is no state of it is refused."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hdet
from tests.problems import quiet
from tests.rollback.guarded import Guarded, Spoil, adam, blow_up, flip, not_a_number

STEPS = 90
SPOILT: dict[int, Spoil] = {33: not_a_number, 61: flip, 71: blow_up}


def tensor(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=torch.tensor(3e-3))


@pytest.mark.slow
@pytest.mark.parametrize("make", [adam, tensor])
def test_a_run_that_is_cut_anywhere_is_bit_equal(tmp_path: Path, make: Any) -> None:
    """Inside rounds, just before and after rollbacks, and while the rate recovers."""
    with quiet():
        whole = Guarded(make).go(0, STEPS, SPOILT)
        assert whole.watching.rollbacks >= 2
        first = Guarded(make)
        for cut in range(1, STEPS):
            first.go(cut - 1, cut, SPOILT)
            first.save(tmp_path / "run.pt")
            if cut % 4 == 1 or cut in (40, 70, 80):
                second = Guarded(make, seed=1)
                hdet.load(tmp_path / "run.pt", **second.parts)
                second.go(cut, STEPS, SPOILT)
                assert second.equals(whole), cut
                assert second.applied == whole.applied[cut:], cut
                assert repr(second.watching.state_dict()["slowed"]) == repr(whole.watching.state_dict()["slowed"])


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda parts: pickle.loads(pickle.dumps(parts))])
@pytest.mark.parametrize("cut", [0, 35, 45])
def test_a_copy_guards_its_own_optimizer(cut: int, copied: Any) -> None:
    """Copies of optimizers have no hooks. The last cut is where the rate recovers."""
    with quiet():
        first, second = Guarded().go(0, cut, SPOILT), Guarded(guarded=False)
        parts = copied((first.model, first.optimizer, first.schedule, first.guard))
        second.model, second.optimizer, second.schedule, second.guard = parts
        assert second.go(cut, STEPS, SPOILT).equals(first.go(cut, STEPS, SPOILT))
        assert second.watching.rollbacks == first.watching.rollbacks >= 2


def test_without_its_state_it_begins_again(tmp_path: Path) -> None:
    """Only the snapshots are missing until the first step."""
    first = Guarded().go(0, 45)
    first.save(tmp_path / "run.pt")
    second = Guarded(seed=1)
    parts = {name: part for name, part in second.parts.items() if name != "guard"}
    hdet.load(tmp_path / "run.pt", **parts, ignore=("guard",))
    with pytest.warns(hdet.RollbackWarning, match="rolled back to step 0,"):
        second.go(45, 60, {46: not_a_number})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("version", 1),
        ("begun", "a"),
        ("looks", []),
        ("rounds", 3),
        ("slowed", 3),
        ("slowed", [1, 0, 1.0, 1.0]),
        ("hold", [1]),
        ("strange", "a"),
        ("losses", ["a"]),
        ("usual", [[1.0]]),
        ("kept", [[1]]),
        ("kept", None),
        ("unproven", [1]),
        ("readings", [[1.0]]),
        ("readings", [[[0, "loss", "a"]]]),
        ("snapshots", [[0, {}]]),
        ("snapshots", 3),
    ],
)
def test_a_damaged_state_is_refused_and_changes_nothing(name: str, value: Any) -> None:
    ran = Guarded().go(0, 25)
    before = copy.deepcopy(ran.watching.state_dict())
    with pytest.raises(hdet.ArgumentError, match=r"state of a hdet\.Guard"):
        ran.watching.load_state_dict({**before, name: value})
    assert repr(ran.watching.state_dict()) == repr(before)


def test_the_state_of_another_model_is_refused_before_anything_is_changed(tmp_path: Path) -> None:
    Guarded().go(0, 25).save(tmp_path / "run.pt")
    model = nn.Linear(6, 1)
    guard = hdet.Guard(torch.optim.Adam(model.parameters()), model)
    with pytest.raises(hdet.ArgumentError, match=r"state of a hdet\.Guard does not fit"):
        hdet.load(tmp_path / "run.pt", guard=guard, ignore=[name for name in Guarded().parts if name != "guard"])
    with pytest.raises(hdet.ArgumentError, match="must be a dict, but got 3"):
        guard.load_state_dict(3)  # type: ignore[arg-type]
