"""A rate that somebody else writes is noticed at the next step and said, and the search goes on at its own."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler, swa_utils

import hdet
from tests.problems import network
from tests.search.runs import final_loss, train

STEPS = 120
WORDS = "the optimizer's lr was .* at step {}, but the search had written .*, and has written that again"
Run = tuple[nn.Module, Any, Any]
pytestmark = [
    pytest.mark.quick,
    pytest.mark.filterwarnings("ignore:training diverged:hdet.SearchWarning"),
    pytest.mark.filterwarnings("ignore:Seems like `optimizer.step:UserWarning"),  # torch, of a copied optimizer
]


def onecycle(guess: float = 1e-4) -> Run:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=guess)
    return model, optimizer, hdet.auto(optimizer, total_steps=STEPS)


def as_tensor(guess: float = 1e-4) -> Run:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(guess), foreach=False, capturable=False)
    return model, optimizer, hdet.auto(optimizer, total_steps=STEPS)


def scheduled(guess: float = 1e-4) -> Run:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=guess)
    schedule = lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    return model, optimizer, hdet.auto(optimizer, schedule=schedule, total_steps=STEPS)


def endless(guess: float = 1e-4) -> Run:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=guess)
    return model, optimizer, hdet.auto(optimizer)


MAKE: dict[str, Callable[..., Run]] = {
    "OneCycle": onecycle,
    "tensor": as_tensor,
    "schedule": scheduled,
    "no end": endless,
}


def other_run(make: Callable[..., Run]) -> dict[str, Any]:
    """The state of another optimizer, from another guess."""
    model, optimizer, scheduler = make(1e-2)
    train(model, optimizer, scheduler, range(30))
    found: dict[str, Any] = optimizer.state_dict()
    return found


def by_hand(optimizer: Any, _: Any) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 4e-3


def in_place(optimizer: Any, _: Any) -> None:
    for group in optimizer.param_groups:
        group["lr"] = group["lr"].fill_(4e-3) if isinstance(group["lr"], torch.Tensor) else 4e-3


def by_a_checkpoint(optimizer: Any, make: Any) -> None:
    """Of another run: only its rates and the levels of its schedule, so that the moments do not differ."""
    state = optimizer.state_dict()
    optimizer.load_state_dict({**state, "param_groups": other_run(make)["param_groups"]})


@contextmanager
def foreign() -> Iterator[list[str]]:
    """What is said of rates of others."""
    told: list[str] = []
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        yield told
    told += [str(one.message) for one in seen if "search had written" in str(one.message)]


def test_the_warning_points_at_the_users_line_though_torch_calls_the_hook() -> None:
    model, optimizer, _ = onecycle()
    by_hand(optimizer, None)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    with pytest.warns(hdet.SearchWarning, match=WORDS.format(0)) as told:
        optimizer.step()
    assert told[0].filename == __file__


@pytest.mark.parametrize("write", [by_hand, in_place, by_a_checkpoint])
@pytest.mark.parametrize("at", [0, 1, 40])
@pytest.mark.parametrize("name", MAKE)
def test_the_run_is_as_if_nothing_had_been_written(name: str, at: int, write: Callable[..., None]) -> None:
    make = MAKE[name]
    undisturbed, run = make(), make()
    expected = train(*undisturbed, range(STEPS))
    rates = train(*run, range(at))
    write(run[1], make)
    with foreign() as told:
        rates += train(*run, range(at, STEPS))
    assert rates == expected
    assert final_loss(run[0]) == final_loss(undisturbed[0])
    assert run[2].found == undisturbed[2].found
    (words,) = told
    assert f"at step {at}, but" in words
    assert "load its scheduler too" in words


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda run: pickle.loads(pickle.dumps(run))])
@pytest.mark.parametrize("name", MAKE)
def test_of_a_copy(name: str, copied: Callable[[Run], Run]) -> None:
    run = MAKE[name]()
    train(*run, range(10))
    with foreign() as told:
        other = copied(run)
        train(*other, range(10, 15))
    assert told == []
    by_hand(other[1], None)
    with foreign() as told:
        train(*other, range(15, 20))
    assert len(told) == 1


def test_every_event_is_said_and_one_that_lasts_is_said_once() -> None:
    run = onecycle()
    with foreign() as told:
        for begin in range(0, 60, 20):
            by_hand(run[1], None)
            train(*run, range(begin, begin + 20))
    assert [words.partition(" at step ")[2].split(",")[0] for words in told] == ["0", "20", "40"]
    with foreign() as told:
        for t in range(60, 80):
            by_hand(run[1], None)
            train(*run, range(t, t + 1))
    assert len(told) == 1


def test_only_the_group_that_was_written_is_written_again() -> None:
    """The ratios of the guesses are the user's, and stay."""
    model = network()
    layers = list(model.children())
    groups = [{"params": layers[0].parameters(), "lr": 1e-3}, {"params": layers[-1].parameters(), "lr": 1e-4}]
    optimizer = torch.optim.Adam(groups)
    scheduler = hdet.auto(optimizer, total_steps=STEPS)
    optimizer.param_groups[1]["lr"] = 7.0
    with pytest.warns(hdet.SearchWarning, match=WORDS.format(0)):
        rates = train(model, optimizer, scheduler, range(20))
    assert all(second == pytest.approx(first / 10) for first, second in rates)


def test_of_several_optimizers() -> None:
    model = network()
    layers = list(model.children())
    parts = [torch.optim.SGD(layers[0].parameters(), 1e-3), torch.optim.Adam(layers[-1].parameters(), 1e-4)]
    scheduler = hdet.auto(parts, total_steps=STEPS)
    own = parts[1].param_groups[0]["lr"]
    parts[1].param_groups[0]["lr"] = 3.0
    with pytest.warns(hdet.SearchWarning, match=WORDS.format(0)):
        parts[0].step()  # before the first part's step all rates are there again
    assert parts[1].param_groups[0]["lr"] == own
    scheduler.step(1.0)


# -- those who may ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [(1, 2), (2, 1)], ids=["optimizer first", "scheduler first"])
@pytest.mark.parametrize("guess", [1e-4, 1e-2])
@pytest.mark.parametrize("name", MAKE)
@pytest.mark.filterwarnings("ignore::hdet.ResumeWarning")
def test_a_run_is_resumed_in_either_order(name: str, guess: float, order: tuple[int, int]) -> None:
    first, second = MAKE[name](), MAKE[name](guess)
    train(*first, range(30))
    states = copy.deepcopy([part.state_dict() for part in first])
    with foreign() as told:
        second[0].load_state_dict(states[0])
        for number in order:
            second[number].load_state_dict(states[number])
        second[2].load_search_state_dict(first[2].search_state_dict())
        assert train(*second, range(30, 60)) == train(*first, range(30, 60))
    assert told == []


def test_rates_that_are_written_back() -> None:
    """As frameworks do that read rates and write them again; and others that change them between two steps."""
    run = onecycle()
    expected = train(*onecycle(), range(STEPS))
    rates = []
    with foreign() as told:
        for t in range(STEPS):
            (group,) = run[1].param_groups
            own, group["lr"] = group["lr"], 3.0
            group["lr"] = float(str(own))
            rates += train(*run, range(t, t + 1))
    assert rates == expected
    assert told == []


def test_a_step_that_does_not_count() -> None:
    """torch.distributed.checkpoint makes one at the rate 0, and writes the rates back."""
    run = onecycle()
    with foreign() as told:
        for t in range(10):
            (group,) = run[1].param_groups
            own, group["lr"] = group["lr"], 0.0
            run[1].step()
            group["lr"] = own
            train(*run, range(t, t + 1))
    assert told == []


@pytest.mark.parametrize("name", MAKE)
def test_a_group_that_is_added(name: str) -> None:
    run = MAKE[name]()
    head = nn.Linear(2, 2)
    with foreign() as told:
        train(*run, range(10))
        own = torch.tensor(5e-5) if name == "tensor" else 5e-5
        run[1].add_param_group({"params": list(head.parameters()), "lr": own})
        train(*run, range(10, 30))
    assert told == []


@pytest.mark.parametrize("first", [True, False])
def test_it_is_no_part_of_a_sequence(first: bool) -> None:
    """It owns the rate of the whole run. This is said when the sequence is built, and not in mid-run."""
    _, optimizer, own = onecycle()
    constant = lr_scheduler.ConstantLR(optimizer, 0.5, STEPS)
    both: list[Any] = [own, constant] if first else [constant, own]
    with pytest.raises(hdet.ArgumentError, match=r"cannot be a part of a SequentialLR; give the others to it"):
        lr_scheduler.SequentialLR(optimizer, both, milestones=[20])


def test_another_scheduler_that_takes_over() -> None:
    """A scheduler that is not stepped any more writes nothing."""
    model, optimizer, scheduler = onecycle()
    train(model, optimizer, scheduler, range(60))
    averaging = swa_utils.SWALR(optimizer, swa_lr=1e-5, anneal_epochs=1)
    with foreign() as told:
        rates = train(model, optimizer, averaging, range(60, 80), tells=lambda loss, t: None)
    assert told == []
    assert {rate for (rate,) in rates[2:]} == {1e-5}


def test_a_scaler_that_leaves_steps_out() -> None:
    model, optimizer, scheduler = onecycle()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    with foreign() as told:
        for t in range(20):
            optimizer.zero_grad()
            loss = model(torch.randn(8, 6, generator=torch.Generator().manual_seed(t))).square().mean()
            scaler.scale(loss * (torch.inf if t % 5 == 2 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
    assert told == []


def test_a_checkpoint_without_its_scheduler(tmp_path: Path) -> None:
    first, second = onecycle(), onecycle(1e-6)
    train(*first, range(40))
    hdet.save(tmp_path / "run.pt", model=first[0], optimizer=first[1], scheduler=first[2])
    hdet.load(tmp_path / "run.pt", ignore=("scheduler",), model=second[0], optimizer=second[1])
    with foreign() as told:
        train(*second, range(STEPS))
    assert len(told) == 1
    assert final_loss(second[0]) < 2 * final_loss(_finished(first)[0])


def _finished(run: Run) -> Run:
    train(*run, range(40, STEPS))
    return run
