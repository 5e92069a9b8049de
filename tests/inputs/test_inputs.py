"""Bad input, generated: whatever is passed where, hdet accepts it or says which argument is wrong.

``HDET_INPUTS=10000 pytest tests/inputs`` tries as many; without it there are a few hundred.
"""

from __future__ import annotations

import ast
import inspect
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

import hdet
from hdet import ArgumentError
from tests.inputs.calls import CALLS, NOT_CALLED, Call, optimizer_of
from tests.inputs.judge import complaint
from tests.inputs.odd import ODD
from tests.patience import PATIENCE

EXAMPLES = int(os.environ.get("HDET_INPUTS", "300"))


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Texts that are passed as paths are files in here."""
    before, here = Path.cwd(), tmp_path_factory.mktemp("inputs")
    os.chdir(here)
    yield here
    os.chdir(before)


def plain_values() -> st.SearchStrategy[Any]:
    numbers = st.floats() | st.integers(-(2**53), 2**53) | st.integers(-3, 60) | st.integers(-(10**500), 10**500)
    texts = st.text(max_size=8) | st.binary(max_size=4)
    leaves = st.none() | st.booleans() | numbers | texts
    return (
        leaves | st.lists(leaves, max_size=3) | st.tuples(leaves, leaves) | st.dictionaries(texts, leaves, max_size=2)
    )


def values() -> st.SearchStrategy[tuple[str, Any]]:
    """A value and how to speak of it. Odd ones are made anew, since some can be used once."""
    odd = st.sampled_from(sorted(ODD)).map(lambda name: (name, ODD[name]()))
    return odd | plain_values().map(lambda value: (repr(value), value))


NUMBERS = [
    *("True", "10**400", "-10**400", "10**5000", "[10**400]", "(0, 10**400)", "numpy float", "numpy int", "numpy bool"),
    *("numpy array without dimensions", "scalar tensor", "integer tensor", "truth tensor", "complex tensor"),
    "[scalar tensor]",
]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_numbers_of_every_kind_are_accepted_or_refused_by_name(call: Call, folder: Path) -> None:
    """For every argument: numbers that no float holds, and those that look like lists."""
    tried = {(name, odd): complaint(call, {name: ODD[odd]()}, folder) for name in call.arguments for odd in NUMBERS}
    assert {case: words for case, words in tried.items() if words is not None} == {}


@st.composite
def spoilt_calls(draw: st.DrawFn) -> tuple[Call, dict[str, tuple[str, Any]]]:
    """A callable, and one or two of its arguments with values that it did not ask for."""
    call = draw(st.sampled_from(CALLS))
    names = draw(st.lists(st.sampled_from(call.arguments), min_size=1, max_size=2, unique=True))
    return call, {name: draw(values()) for name in names}


@pytest.mark.timeout(3600)
@settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck), database=None)
@given(spoilt_calls())
def test_whatever_is_passed_is_accepted_or_refused_by_name(
    folder: Path, spoilt: tuple[Call, dict[str, tuple[str, Any]]]
) -> None:
    call, named = spoilt
    wrong = complaint(call, {name: value for name, (_, value) in named.items()}, folder)
    text = ", ".join(f"{name}={words}" for name, (words, _) in named.items())
    assert wrong is None, f"{call.name}({text}): {wrong}"


def test_what_is_right_is_accepted(folder: Path) -> None:
    for call in CALLS:
        assert complaint(call, {}, folder) is None, call.name


@pytest.mark.slow
def test_many_inputs_need_no_framework(tmp_path: Path) -> None:
    """As where none is installed: ``HDET_INPUTS=...`` leaves out what is not there."""
    code = """
import sys
from importlib.machinery import PathFinder
from pathlib import Path
class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, *more):
        frameworks = ("lightning", "pytorch_lightning", "transformers")
        return None if name.split(".")[0] in frameworks else super().find_spec(name, *more)
sys.meta_path[sys.meta_path.index(PathFinder)] = Without
from tests.inputs import calls, judge
print({call.name: judge.complaint(call, {}, Path(sys.argv[1])) for call in calls.CALLS})
"""
    settings = {**os.environ, "HDET_INPUTS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", code, str(tmp_path)]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, env=settings, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert set(ast.literal_eval(done.stdout).values()) == {None}


def test_every_public_callable_is_tried() -> None:
    public = {name for name in hdet.__all__ if not _is_error(getattr(hdet, name))} - NOT_CALLED
    tried = {re.split("[(,]", call.name)[0] for call in CALLS}
    assert public <= tried, f"add to tests/inputs/calls.py: {public - tried}"
    knobs = {f"knobs.{name}" for name in hdet.knobs.__all__ if inspect.isfunction(getattr(hdet.knobs, name))}
    assert knobs - {"knobs.check_optimizer"} <= tried


def _is_error(thing: object) -> bool:
    return isinstance(thing, type) and issubclass(thing, BaseException)


def onecycle(**more: Any) -> hdet.OneCycleLR:
    return hdet.OneCycleLR(optimizer_of(), **{"max_lr": 0.1, "total_steps": 50, "cycle_momentum": False, **more})


def auto(**more: Any) -> hdet.AutoScheduler:
    return hdet.auto(optimizer_of(), **{"total_steps": 50, **more})


def scheduled(**more: Any) -> object:
    return hdet.auto(optimizer_of(), **{"schedule": lambda one: CosineAnnealingLR(one, 50), "total_steps": 50, **more})


def ensemble(**more: Any) -> hdet.Ensemble:
    return hdet.Ensemble(optimizer_of(), **more)


@pytest.mark.parametrize("make", [auto, scheduled])
@pytest.mark.parametrize("argument", ["pct_start", "epochs", "auto_lr", "sync_every", "spread", "last_epoch"])
def test_arguments_of_onecycle_are_none_of_auto(make: Callable[..., object], argument: str) -> None:
    with pytest.raises(TypeError, match=argument):
        make(**{argument: 1})


@pytest.mark.parametrize(
    ("make", "argument", "value"),
    [
        (onecycle, "max_lr", math.inf),
        (onecycle, "max_lr", -0.1),
        (onecycle, "max_lr", [-0.1]),
        (onecycle, "max_lr", torch.tensor(math.inf)),
        (onecycle, "auto_lr_start", ""),
        (onecycle, "sync_every", ""),
        (onecycle, "max_lr", "auto"),
        (auto, "total_steps", 0),
        (auto, "total_steps", 2.5),
        (auto, "schedule_every", 2),
        (auto, "rollback", None),
        (auto, "highest", 0),
        (auto, "highest", [0.1, 0.1]),
        (auto, "journal", ""),
        (auto, "model", nn.Linear),
        (auto, "group", "all"),
        (onecycle, "seed", 0.5),
        (onecycle, "seed", True),
        (onecycle, "journal", torch.ones(())),
        (onecycle, "journal", hdet.Journal),
        (onecycle, "journal", ""),
        (scheduled, "schedule", lambda one: hdet.auto(one, 50)),
        (scheduled, "schedule_every", 0),
        (scheduled, "schedule_every", True),
        (scheduled, "total_steps", None),
        (ensemble, "optimizer_state", False),
        (ensemble, "optimizer_state", ""),
        (ensemble, "knobs", "lr"),
    ],
)
def test_values_that_mean_nothing_are_refused(make: Callable[..., object], argument: str, value: object) -> None:
    with pytest.raises(ArgumentError, match=rf"\b{argument}\b"):
        make(**{argument: value})
