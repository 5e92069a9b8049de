"""torch's own arguments: what torch takes is taken, and what it refuses it refuses in its own words."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.optim import lr_scheduler

import hdet
from tests.inputs.calls import CALLS, SCHEDULE, Call, optimizer_of
from tests.inputs.judge import complaint
from tests.inputs.odd import ODD

WITH_TORCHS = [call for call in CALLS if call.function is hdet.OneCycleLR]
_NO_NUMBERS = {"nan", "[nan]", "nan tensor"}
REFUSED = {
    "max_lr": {
        "-1",
        "-0.5",
        "inf",
        "-inf",
        "True",
        "False",
        "numpy bool",
        "truth tensor",
        "complex tensor",
        "numpy array without dimensions",
        *_NO_NUMBERS,
    },
    "pct_start": {"nan"},  # no step is the end of the warm-up
}
"""What torch takes and hdet does not, on purpose."""


@pytest.mark.parametrize("call", WITH_TORCHS, ids=lambda call: call.name)
@pytest.mark.parametrize("argument", sorted(SCHEDULE))
def test_whatever_torch_refuses_is_refused(call: Call, argument: str, tmp_path: Path) -> None:
    odd = {name: make for name, make in ODD.items() if (argument, name) != ("pct_start", "nan")}
    wrong = {name: complaint(call, {argument: make()}, tmp_path) for name, make in odd.items()}
    assert {name: words for name, words in wrong.items() if words is not None} == {}


def error_of(make: Callable[..., Any], arguments: dict[str, Any]) -> Exception | None:
    try:
        make(**arguments)
    except Exception as error:
        return error
    return None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("call", WITH_TORCHS, ids=lambda call: call.name)
@pytest.mark.parametrize("argument", sorted(SCHEDULE - {"optimizer"}))
def test_torch_refuses_in_its_own_words_and_nothing_is_changed(call: Call, argument: str) -> None:
    for name, odd in ODD.items():
        theirs = error_of(lr_scheduler.OneCycleLR, {**call.right(Path()), argument: odd()})
        if theirs is None or name in {'"0.1"', '"auto"', '"keep"', '""'}:
            continue  # hdet knows what a text may be
        given = {**call.right(Path()), argument: odd()}
        before = copy.deepcopy(given["optimizer"].state_dict())
        ours = error_of(hdet.OneCycleLR, given)
        assert isinstance(ours, (type(theirs), hdet.ArgumentError)), name
        assert given["optimizer"].state_dict() == before, name


def accepts(call: Call, kind: Callable[..., Any], spoilt: dict[str, Any]) -> bool:
    try:
        scheduler = kind(**{**call.right(Path()), **spoilt})
        for _ in range(2):
            for p in scheduler.optimizer.param_groups[0]["params"]:
                p.grad = torch.ones_like(p)
            scheduler.optimizer.step()
            scheduler.step()
    except Exception:
        return False
    return True


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("call", WITH_TORCHS, ids=lambda call: call.name)
@pytest.mark.parametrize("argument", sorted(SCHEDULE))
def test_whatever_torch_takes_is_taken(call: Call, argument: str) -> None:
    for name, odd in ODD.items():
        if accepts(call, lr_scheduler.OneCycleLR, {argument: odd()}) and name not in REFUSED.get(argument, ()):
            assert accepts(call, hdet.OneCycleLR, {argument: odd()}), f"{argument}={name}"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"max_lr": 1e300}, r"max_lr must be finite and not below 0, but got max_lr=1e\+300"),
        ({"max_lr": math.nan}, r"max_lr must be finite and not below 0, but got max_lr=nan; "),
        ({"max_lr": "0.1"}, r"max_lr must be a number or a list of numbers, but got max_lr='0.1'; .* hdet\.auto"),
    ],
)
def test_the_words(arguments: dict[str, Any], words: str) -> None:
    optimizer = optimizer_of()
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(hdet.ArgumentError, match=words):
        hdet.OneCycleLR(optimizer, **{"max_lr": 0.1, "total_steps": 50, **arguments})
    assert optimizer.state_dict() == before


def test_what_is_not_used_may_be_anything_as_in_torch(tmp_path: Path) -> None:
    unused = {"epochs": math.nan, "steps_per_epoch": numpy.ones(3), "base_momentum": None, "max_momentum": object()}
    journal = tmp_path / "run.jsonl"
    scheduler = hdet.OneCycleLR(optimizer_of(), 0.1, 50, **unused, cycle_momentum=False, journal=journal)  # type: ignore[arg-type]
    for _ in range(2):
        scheduler.optimizer.step()
        scheduler.step(0.5)
    assert hdet.read_journal(journal).header["arguments"]["cycle_momentum"] is False


def test_what_torch_finds_in_a_resumed_optimizer_may_be_anything() -> None:
    unused = {"div_factor": None, "final_div_factor": "", "base_momentum": None, "max_momentum": None}
    rates = []
    for kind in (lr_scheduler.OneCycleLR, hdet.OneCycleLR):
        optimizer = optimizer_of()
        lr_scheduler.OneCycleLR(optimizer, 0.1, 50)
        scheduler = kind(optimizer, None, 50, **unused, last_epoch=3)  # type: ignore[arg-type]
        optimizer.step()
        scheduler.step()
        rates.append(scheduler.get_last_lr())
    assert rates[0] == rates[1]


def test_numbers_of_other_kinds_are_numbers() -> None:
    rates = []
    for kind in (lr_scheduler.OneCycleLR, hdet.OneCycleLR):
        for number in (numpy.float32(0.5), numpy.array(0.5), torch.tensor(0.5), True):
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                scheduler = kind(optimizer_of(), 0.5, 50, div_factor=number, base_momentum=number, three_phase=number)
            scheduler.optimizer.step()
            scheduler.step()
            rates.append(float(scheduler.get_last_lr()[0]))
    assert rates[:4] == rates[4:]
