"""A search that was interrupted or copied goes on, and damaged states are refused."""

from __future__ import annotations

import copy
import gc
import json
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hdet
from hdet.errors import ArgumentError
from hdet.search.steps import Sampling
from tests.problems import network
from tests.search.runs import built, final_loss, search_of, train, two_groups

pytestmark = [
    pytest.mark.filterwarnings("ignore:resumed at step:hdet.errors.ResumeWarning"),
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning"),
]


@pytest.mark.parametrize("with_search", [True, False])
@pytest.mark.parametrize("stop", [1, 10, 26, 70, 150])
def test_resume_goes_on_as_if_nothing_had_happened(stop: int, with_search: bool, tmp_path: Path) -> None:
    """With what the search holds in tensors; without it, a way and snapshots of its own are made."""

    def made() -> tuple[nn.Module, torch.optim.Optimizer, hdet.AutoScheduler]:
        model = network()
        optimizer = torch.optim.Adam(two_groups(model), lr=1e-3)
        return model, optimizer, hdet.auto(optimizer, total_steps=200)

    model, optimizer, scheduler = made()
    train(model, optimizer, scheduler, range(stop))
    before = scheduler.search.learned.peak_factor
    parts = [model.state_dict(), optimizer.state_dict(), scheduler.state_dict(), scheduler.search_state_dict()]
    torch.save(parts, tmp_path / "saved.pt")
    json.dumps(scheduler.state_dict()["hdet"], default=str)
    rest = train(model, optimizer, scheduler, range(stop, 200))

    resumed, optimizer, scheduler = made()
    *states, search = torch.load(tmp_path / "saved.pt")
    for part, state in zip((resumed, optimizer, scheduler), states, strict=True):
        part.load_state_dict(state)  # type: ignore[attr-defined]
    if with_search:
        scheduler.load_search_state_dict(search)
    assert scheduler.search.learned.peak_factor == before
    again = train(resumed, optimizer, scheduler, range(stop, 200))
    if with_search:  # losses of the round that was interrupted are lost, and matter to the judge alone
        assert again == rest
        assert all(map(torch.equal, resumed.state_dict().values(), model.state_dict().values()))
    else:
        assert final_loss(resumed) < 0.7 * final_loss(network())


def test_an_earlier_checkpoint_is_searched_on_from() -> None:
    model, optimizer, scheduler = built(steps=100)
    train(model, optimizer, scheduler, range(7))
    early = copy.deepcopy([model.state_dict(), optimizer.state_dict(), scheduler.state_dict()])
    search = search_of(scheduler)
    found = search.learned.peak_factor
    train(model, optimizer, scheduler, range(7, 80))
    assert search.steps.sampling is Sampling.NONE
    for part, state in zip((model, optimizer, scheduler), early, strict=True):
        part.load_state_dict(state)  # type: ignore[attr-defined]
    assert search.steps.sampling is Sampling.SOME
    assert search.learned.peak_factor == found
    train(model, optimizer, scheduler, range(7, 11))
    assert search.learned.peak_factor != found


def test_a_run_that_has_ended_is_searched_on_from_an_earlier_checkpoint() -> None:
    model, optimizer, scheduler = built(steps=60)
    train(model, optimizer, scheduler, range(5))
    early = copy.deepcopy(scheduler.state_dict())
    train(model, optimizer, scheduler, range(5, 60))
    scheduler.load_state_dict(early)
    assert search_of(scheduler).steps.sampling is Sampling.SOME


def test_a_pickled_search_is_equal_though_it_holds_no_numbers() -> None:
    model, optimizer, scheduler = built()
    train(model, optimizer, scheduler, range(5))
    assert pickle.loads(pickle.dumps(search_of(scheduler))) == search_of(scheduler)


def damaged(state: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    return {**state, "hdet": {**state["hdet"], name: value}}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("version", 5),
        ("way", "replicas"),
        ("way", "probed"),
        ("learned", [["log_factor", 0.0]]),
        ("learned", None),
        ("begun", "one"),
        ("rounds", None),
        ("peaks", ["high"]),
        ("knobs", ["lr[0]", "lr[1]"]),
    ],
)
def test_a_damaged_state_is_refused_before_anything_changes(name: str, value: Any) -> None:
    model, optimizer, scheduler = built(steps=100)
    train(model, optimizer, scheduler, range(15))
    good = scheduler.state_dict()
    with pytest.raises(ArgumentError):
        scheduler.load_state_dict(damaged(good, name, value))
    assert repr(scheduler.state_dict()) == repr(good)


@pytest.mark.parametrize(
    "damage",
    [
        lambda s: s.update(version=5),
        lambda s: s.update(step=3),
        lambda s: s.pop("measure"),
        lambda s: s["measure"].pop("rates"),
        lambda s: s["measure"].update(origin=[torch.ones(1)]),
        lambda s: s["measure"].update(places=[99]),
        lambda s: s.update(kept=[["a", "b"]]),
        lambda s: s["snapshots"][0][1].pop("states"),
        lambda s: s["snapshots"][0][1].update(weights=[]),
    ],
)
def test_a_damaged_search_is_refused_before_anything_changes(damage: Callable[[Any], None]) -> None:
    model, optimizer, scheduler = built(steps=100)
    train(model, optimizer, scheduler, range(15))
    held = scheduler.search_state_dict()
    bad = {**held, "measure": dict(held["measure"])}
    bad["snapshots"] = [[slot, dict(row)] for slot, row in held["snapshots"]]
    damage(bad)
    search = search_of(scheduler)
    before = (search.steps.measure, search.steps.snapshots, search.learned)
    with pytest.raises(ArgumentError, match=r"the state of a search (does not fit|has version = 5)"):
        scheduler.load_search_state_dict(bad)
    assert (search.steps.measure, search.steps.snapshots, search.learned) == before


def test_checkpoints_of_other_schedulers() -> None:
    _, optimizer, searching = built(0.01, 100)
    trained = hdet.OneCycleLR(optimizer, 0.01, total_steps=100)
    torchs = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=100)
    for one, other in ((trained, searching), (searching, trained), (searching, torchs)):
        before = repr(one.state_dict())
        name = "hdet.auto" if one is searching else "hdet.OneCycleLR"
        with pytest.raises(ArgumentError, match=rf"but a state of .*{name}.* was expected; give it"):
            one.load_state_dict(other.state_dict())
        assert repr(one.state_dict()) == before


def test_a_copy_finds_the_rate_too() -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1.0)
    scheduler = hdet.auto(optimizer, total_steps=200, model=model)
    copied = copy.deepcopy(scheduler)
    found = search_of(copied).model
    assert found is not None
    assert found is not model
    train(found, copied.optimizer, copied, range(200))
    assert final_loss(found) < 0.5 * final_loss(network())


def test_copies_of_a_scheduler_go_their_own_way() -> None:
    model, optimizer, scheduler = built(steps=100)
    train(model, optimizer, scheduler, range(10))
    for other in (copy.deepcopy(scheduler), pickle.loads(pickle.dumps(scheduler.state_dict()))):
        state = other if isinstance(other, dict) else other.state_dict()
        search = dict(state["hdet"]["learned"])
        assert search["log_factor"] == pytest.approx(math.log(scheduler.search.learned.peak_factor))
        assert repr(search) == repr(dict(scheduler.state_dict()["hdet"]["learned"]))


def test_nothing_is_left_on_the_optimizer() -> None:
    _, optimizer, scheduler = built(steps=100)
    count = len(optimizer._optimizer_step_pre_hooks)
    assert count > 0
    scheduler.load_state_dict(scheduler.state_dict())
    assert len(optimizer._optimizer_step_pre_hooks) <= count
    del scheduler
    gc.collect()
    assert not optimizer._optimizer_step_pre_hooks
