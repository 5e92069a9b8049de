"""``highest=``: a rate that is never exceeded, in any step of any setup."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import Adam
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR

import hdet
from tests.problems import batch_of, loss_of, network, quiet
from tests.processes import error_of, run_ranks

STEPS = 120
FREE = 0.01
"""Without a bound these runs find more than twice as much."""


def optimizer_of(model: nn.Module, *guesses: float, **more: Any) -> Adam:
    """With a parameter group for each guess."""
    tensors = list(model.parameters())
    parts = [tensors] if len(guesses) == 1 else [tensors[:2], tensors[2:]]
    return Adam([{"params": part, "lr": guess} for part, guess in zip(parts, guesses, strict=True)], **more)


def scheduler_of(optimizer: Adam, face: str = "one", steps: int | None = STEPS, **more: Any) -> Any:
    if face == "one":
        return hdet.auto(optimizer, total_steps=steps, **more)
    if face == "several":
        return hdet.auto([optimizer], total_steps=steps, **more)
    shape = {"cosine": lambda: CosineAnnealingLR(optimizer, STEPS), "rising": lambda: LambdaLR(optimizer, _rising)}
    return hdet.auto(optimizer, schedule=shape[face](), total_steps=steps, **more)


def _rising(t: int) -> float:
    """To three times the rate that was given."""
    return 3 * min((t + 1) / 40, (STEPS - t) / 40)


FACES = ["one", "several", "cosine", "rising"]


def train(model: nn.Module, optimizer: Any, scheduler: Any, steps: int, *, tells: bool = True) -> list[list[float]]:
    """The rates of every step."""
    rates = []
    with quiet():
        for t in range(steps):
            rates.append([float(group["lr"]) for group in optimizer.param_groups])
            optimizer.zero_grad()
            loss = loss_of(model, batch_of(t))
            loss.backward()
            optimizer.step()
            scheduler.step(*([loss.detach()] if tells else []))
    return rates


def highest_of(rates: Sequence[Sequence[float]]) -> list[float]:
    return [max(column) for column in zip(*rates, strict=True)]


@pytest.mark.parametrize("tells", [True, False])
@pytest.mark.parametrize("guess", [1e-6, 1e-2, 100.0])
@pytest.mark.parametrize("face", FACES)
def test_no_step_is_above_it(face: str, guess: float, *, tells: bool) -> None:
    model = network()
    optimizer = optimizer_of(model, guess)
    scheduler = scheduler_of(optimizer, face, highest=FREE)
    rates = train(model, optimizer, scheduler, STEPS, tells=tells)
    (most,) = highest_of(rates)
    assert 0.9 * FREE < most <= FREE
    found = scheduler.found
    assert found.rate == pytest.approx(FREE)
    assert (found.status, found.why) == ("settled", "at the bound you gave")
    assert "settled (at the bound you gave)" in str(found)
    assert rates[-1][0] < 0.2 * FREE  # and it falls from there


def test_a_bound_that_is_not_reached_changes_nothing() -> None:
    free, bound = [
        train(model, optimizer := optimizer_of(model, 1e-4), scheduler_of(optimizer, **more), STEPS)
        for model, more in ((network(), {}), (network(), {"highest": 10.0}))
    ]
    assert free == bound


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize(
    ("highest", "used"),
    [
        (FREE, [FREE, FREE / 10]),
        ([None, 1e-4], [1e-3, 1e-4]),
        ([FREE, 1e-4], [1e-3, 1e-4]),
        ([math.inf, 1e-4], [1e-3, 1e-4]),
    ],
)
def test_groups_keep_their_ratio(highest: Any, used: list[float], face: str) -> None:
    model = network()
    optimizer = optimizer_of(model, 1e-3, 1e-4)
    scheduler = scheduler_of(optimizer, face, highest=highest)
    rates = train(model, optimizer, scheduler, STEPS)
    assert all(first == pytest.approx(10 * second) for first, second in rates)
    assert scheduler.found.rates == pytest.approx(used)
    assert all(most <= bound * (1 + 1e-12) for most, bound in zip(highest_of(rates), used, strict=True))


@pytest.mark.parametrize("late", [10, 80])
def test_a_group_that_is_added_is_bound_too(late: int) -> None:
    model = network()
    optimizer = optimizer_of(model, 1e-4)
    scheduler = scheduler_of(optimizer, highest=FREE)
    train(model, optimizer, scheduler, late)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))], "lr": 1e-3})  # ten times the others
    rates = train(model, optimizer, scheduler, STEPS - late)[1:]  # the scheduler has not seen it in the first
    assert max(highest_of(rates)) <= FREE
    assert max(scheduler.found.rates) <= FREE * (1 + 1e-12)


def test_a_list_leaves_a_group_that_is_added_free() -> None:
    model = network()
    optimizer = optimizer_of(model, 1e-4)
    scheduler = scheduler_of(optimizer, highest=[FREE])
    train(model, optimizer, scheduler, 10)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))], "lr": 3e-4})  # three times the others
    first, second = highest_of(train(model, optimizer, scheduler, STEPS - 10))
    assert first <= FREE < second


def test_after_a_roll_back_and_after_finish() -> None:
    model = network()
    optimizer = optimizer_of(model, 1.0)
    scheduler = scheduler_of(optimizer, steps=None, highest=FREE)
    rates = train(model, optimizer, scheduler, 80)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(math.nan)
    rates += train(model, optimizer, scheduler, 100)
    assert scheduler.found.rolled_back == 1
    scheduler.finish(60)
    rates += train(model, optimizer, scheduler, 60)
    assert max(highest_of(rates)) <= FREE


@pytest.mark.parametrize("face", ["one", "several"])
def test_a_guess_that_is_kept_is_bound_too(face: str) -> None:
    model = network()
    optimizer = optimizer_of(model, 0.1)
    with quiet():
        scheduler = scheduler_of(optimizer, face, 30, highest=FREE)
    rates = train(model, optimizer, scheduler, 30)
    assert highest_of(rates) == [FREE]
    assert rates[-1][0] < 0.1 * FREE
    assert scheduler.found.rate == pytest.approx(FREE)


def test_rates_that_are_tensors() -> None:
    model = network()
    optimizer = Adam(model.parameters(), lr=torch.tensor(1e-4))
    (most,) = highest_of(train(model, optimizer, scheduler_of(optimizer, highest=FREE), STEPS))
    assert most == pytest.approx(FREE, rel=1e-6)


def test_the_bound_of_the_scheduler_that_goes_on_counts() -> None:
    """So a run can be given one when it is resumed."""
    model = network()
    optimizer = optimizer_of(model, 1e-4)
    scheduler = scheduler_of(optimizer)
    train(model, optimizer, scheduler, 60)
    state = copy.deepcopy(scheduler.state_dict())
    assert scheduler.get_last_lr()[0] > 1e-3
    second = scheduler_of(optimizer, highest=1e-3)
    second.load_state_dict(state)
    rates = train(model, optimizer, second, STEPS - 60)
    assert max(highest_of(rates)) <= 1e-3


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize(
    "highest", [0, -0.1, math.nan, "0.1", True, [0.1], [0.1] * 3, [0.1, 0.0], [0.1, "x"], [], torch.ones(2)]
)
def test_what_cannot_be_meant_is_refused(highest: object, face: str) -> None:
    model = network()
    optimizer = optimizer_of(model, 1e-3, 1e-4)
    before = copy.deepcopy(optimizer.param_groups)
    with pytest.raises(hdet.ArgumentError, match=r"highest must be .* but got highest=.*; "):
        scheduler_of(optimizer, face, highest=highest)
    if face in ("one", "several"):  # a schedule of torch writes its own values when it is made
        assert [set(group) for group in optimizer.param_groups] == [set(group) for group in before]


def _different(rank: int, resumed: bool) -> str:
    model = network()
    optimizer = optimizer_of(model, 1e-3)
    scheduler = scheduler_of(optimizer, highest=FREE * (1 + rank))
    if resumed:
        scheduler.load_state_dict(copy.deepcopy(scheduler.state_dict()))
    return str(error_of(lambda: train(model, optimizer, scheduler, 5)))


@pytest.mark.slow
@pytest.mark.parametrize("resumed", [False, True])
def test_ranks_with_different_bounds_are_told(resumed: bool) -> None:
    for words in run_ranks(_different, 2, resumed):
        assert "replicas disagree on highest, which must be equal on all of them" in words
        assert "rank 1: highest = 0.02" in words


@pytest.mark.parametrize("bound", [np.float32(0.5), [None, np.float64(0.5)], Fraction(1, 2), 1])
def test_a_bound_of_another_kind_of_number_is_in_the_journal(bound: Any, tmp_path: Path) -> None:
    optimizer = optimizer_of(network(), 1e-3, 1e-3)
    hdet.auto(optimizer, total_steps=STEPS, highest=bound, journal=str(tmp_path / "run.jsonl")).step(1.0)
    found = hdet.read_journal(str(tmp_path / "run.jsonl")).header["arguments"]["highest"]
    assert found == ([None, 0.5] if isinstance(bound, list) else float(bound))
