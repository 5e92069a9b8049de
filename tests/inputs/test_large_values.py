"""A wrong value is printed in a message, but never whole: a list of losses, a file's content, a dataset."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hdet
from hdet.errors import HdetError
from tests.inputs.calls import CALLS, Call, model_of, optimizer_of

MOST = 2000
"""Characters of a message."""
LARGE: dict[str, Callable[[], Any]] = {
    "list": lambda: [0.123456789] * 20_000,
    "text": lambda: "x" * 100_000,
    "integer": lambda: 10**10_000,  # which Python does not print
    "dict": lambda: {f"key {i}": i for i in range(5_000)},
}


class Wordy(nn.Module):
    """An object whose words are long."""

    def __repr__(self) -> str:
        return "w" * 100_000


LARGE["object"] = Wordy


def message_of(action: Callable[[], Any]) -> str:
    """Of the error that hdet raises; nothing if it takes the value, or torch refuses it."""
    try:
        action()
    except HdetError as error:
        return str(error)
    except Exception:
        return ""
    return ""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_no_argument_is_printed_whole(call: Call, tmp_path: Path) -> None:
    for argument in call.arguments:
        for kind, make in LARGE.items():
            given = {**call.right(tmp_path), argument: make()}
            assert len(message_of(lambda given=given: call(given))) < MOST, (argument, kind)


def _losses() -> dict[str, Callable[[Any], Any]]:
    scheduled, cosine = optimizer_of(), torch.optim.lr_scheduler.CosineAnnealingLR
    searching = hdet.auto(optimizer_of(), 50)
    by_schedule = hdet.auto(scheduled, schedule=cosine(scheduled, 50), total_steps=50)
    replicas = hdet.OneCycleLR(optimizer_of(), 0.1, 50, cycle_momentum=False)
    model = model_of()
    guard = hdet.Guard(optimizer_of(model), model)
    takers = {"auto": searching, "schedule": by_schedule, "replicas": replicas, "guard": guard}
    return {
        **{f"{name}.step": one.step for name, one in takers.items()},
        **{f"{name}.observe": one.observe for name, one in takers.items() if hasattr(one, "observe")},
        **{f"{name}.load_state_dict": one.load_state_dict for name, one in takers.items()},
        "auto.load_search_state_dict": searching.load_search_state_dict,
        "schedule.load_search_state_dict": by_schedule.load_search_state_dict,
    }


@pytest.mark.parametrize("kind", [kind for kind in LARGE if kind != "integer"])  # torch: an epoch
def test_no_loss_and_no_state_is_printed_whole(kind: str) -> None:
    for name, call in _losses().items():
        words = message_of(lambda call=call: call(LARGE[kind]()))
        assert 0 < len(words) < MOST, name


@pytest.mark.parametrize("wrong", [torch.ones(3), torch.zeros(()), None, "state", 0, [], [1, 2]])
def test_the_state_of_a_search_must_be_a_dict(wrong: Any) -> None:
    for name, load in _losses().items():
        if name.endswith("load_search_state_dict"):
            with pytest.raises(hdet.ArgumentError, match=r"must be a dict, but got .*search_state_dict\(\)"):
                load(wrong)
