"""``scheduler.found`` and the lines of the log say what a search has found."""

from __future__ import annotations

import copy
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hdet
from hdet.report import numbers as say
from hdet.report.data import load_run
from hdet.report.verdict import advice
from hdet.rule.found import Found
from tests.problems import batch_of, loss_of, network
from tests.processes import run_ranks

STEPS = 120


def run_of(guess: float = 1e-6, face: str = "auto") -> tuple[nn.Module, torch.optim.Optimizer, hdet.AutoScheduler]:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=guess)
    if face == "auto":
        return model, optimizer, hdet.auto(optimizer, total_steps=STEPS)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    return model, optimizer, hdet.auto(optimizer, schedule=schedule, total_steps=STEPS)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: hdet.AutoScheduler, begin: int, end: int
) -> None:
    for t in range(begin, end):
        optimizer.zero_grad()
        loss = loss_of(model, batch_of(t))
        loss.backward()
        optimizer.step()
        scheduler.step(loss.detach())


@pytest.mark.parametrize("face", ["auto", "schedule"])
def test_a_run_says_what_it_found(face: str, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer, scheduler = run_of(face=face)
    assert str(scheduler.found) == "found nothing yet"
    with caplog.at_level(logging.INFO, "hdet"):
        highest = 0.0
        for t in range(STEPS):
            train(model, optimizer, scheduler, t, t + 1)
            highest = max(highest, optimizer.param_groups[0]["lr"])
    found = scheduler.found
    assert found is not None
    assert found.status in ("settled", "unsure")  # its steps are unusually long
    assert (found.settled, found.rolled_back, found.why == "") == (found.status == "settled", 0, found.settled)
    assert found.rate == pytest.approx(highest, rel=0.3)  # a schedule may have fallen a little where the rate arrives
    lines = [record.message for record in caplog.records]
    peak = f"max_lr={found.rate:.2g} begins a new OneCycle with that peak, and " if face == "auto" else ""
    assert lines[-1] == (
        f"{found}; use again: {peak}hdet.schedule_from(journal, optimizer) replays the rates of the run step by step"
    )
    assert sum(line.startswith("the rate has settled at step ") for line in lines[:-1]) == found.settled
    assert len(lines) < 10


def test_a_rate_that_still_rises_has_not_settled() -> None:
    model, optimizer, scheduler = run_of()
    train(model, optimizer, scheduler, 0, 7)
    found = scheduler.found
    assert found is not None
    assert not found.settled
    assert 0 < found.rate < math.inf


def test_roll_backs_are_counted_and_kept_in_a_checkpoint() -> None:
    model, optimizer, scheduler = run_of()
    train(model, optimizer, scheduler, 0, 60)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(math.nan)
    with pytest.warns(hdet.SearchWarning, match="rolled back to step"):
        train(model, optimizer, scheduler, 60, 75)
    assert scheduler.found is not None
    assert scheduler.found.rolled_back == 1
    _, _, another = run_of()
    another.load_state_dict(copy.deepcopy(scheduler.state_dict()))
    assert another.found is not None
    assert another.found.rolled_back == 1


def test_a_guess_that_is_kept_is_not_searched_any_more() -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with pytest.warns(hdet.SearchWarning, match="too short"):
        scheduler = hdet.auto(optimizer, total_steps=20)
    train(model, optimizer, scheduler, 0, 20)
    found = scheduler.found
    assert found is not None
    assert (found.status, found.settled) == ("too short", False)
    words = "the run has fewer steps than the search needs, and uses the given rate"
    assert str(found) == f"at 0.01, too short ({words}), never rolled back"


def _found(rank: int) -> Found | None:
    model, optimizer, scheduler = run_of()
    train(nn.parallel.DistributedDataParallel(model), optimizer, scheduler, 0, 40)
    return scheduler.found


def test_ranks_have_found_the_same() -> None:
    mine, theirs = run_ranks(_found, 2)
    assert mine == theirs
    assert mine is not None


@pytest.mark.parametrize("face", ["auto", "schedule"])
def test_a_notebook_shows_what_was_found(face: str) -> None:
    model, optimizer, scheduler = run_of(face=face)
    assert "step 0 of 120: found nothing yet" in scheduler._repr_html_()
    train(model, optimizer, scheduler, 0, STEPS)
    shown = scheduler._repr_html_()
    assert f"step 120 of 120: {scheduler.found}" in shown
    assert f"the rate is {optimizer.param_groups[0]['lr']:.2g}" in shown
    assert '<progress value="120" max="120">' in shown
    assert len(shown) < 500


def in_groups(face: str, *guesses: float, **arguments: Any) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """A run with a parameter group for each layer, and a guess for each."""
    model = network()
    layers = [layer for layer in model.children() if list(layer.parameters())]
    groups = [
        {"params": layer.parameters(), "lr": guess} for layer, guess in zip(layers, (*guesses, 0.0), strict=False)
    ]
    optimizer = torch.optim.Adam(groups)
    if face == "auto":
        return model, optimizer, hdet.auto(optimizer, total_steps=STEPS, **arguments)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 0.5 * (1 - 0.9 * t / STEPS))
    return model, optimizer, hdet.auto(optimizer, schedule=schedule, total_steps=STEPS, **arguments)


@pytest.mark.parametrize("face", ["auto", "schedule"])
@pytest.mark.parametrize("guesses", [(1e-4, 1e-5), (0.0, 1e-4)])
def test_every_group_has_its_rate(
    guesses: tuple[float, float], face: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "run.jsonl"
    model, optimizer, scheduler = in_groups(face, *guesses, journal=path)
    with caplog.at_level(logging.INFO, "hdet"):
        train(model, optimizer, scheduler, 0, STEPS)
    found, lead = scheduler.found, 0 if guesses[0] else 1
    factor = scheduler.search.learned.peak_factor
    share = 1.0 if face == "auto" else 0.5
    assert found.rates == pytest.approx([guess * factor * share for guess in guesses])
    assert found.rate == found.rates[lead]
    words = f"[{', '.join(f'{rate:.2g}' for rate in found.rates)}]"
    assert str(found).startswith(f"found {words}")
    assert str(found).endswith("rolled back once" if found.rolled_back else "never rolled back")
    assert caplog.records[-1].message.startswith(str(found))
    assert (f"max_lr={words}" in caplog.records[-1].message) == (face == "auto")
    now = f"[{', '.join(f'{rate:.2g}' for rate in scheduler.get_last_lr())}]"
    assert f"{found}; the rate is {now}" in scheduler._repr_html_()
    told = advice(load_run(path))
    assert told is not None
    peaks = f"[{', '.join(say.rate(rate) for rate in found.rates)}]"
    assert told.found == f"Found {peaks}."
    assert (told.uses[0][0] == f"max_lr={peaks}") == (face == "auto")
    again = torch.optim.Adam([{"params": [p]} for p in list(model.parameters())[:2]])
    hdet.OneCycleLR(again, list(found.rates), total_steps=STEPS)
    assert [group["max_lr"] for group in again.param_groups] == list(found.rates)


@pytest.mark.parametrize("late", [10, 100])
@pytest.mark.parametrize("resumed", [False, True])
def test_a_group_that_is_added_has_its_rate_too(late: int, *, resumed: bool) -> None:
    model, optimizer, scheduler = run_of(1e-4)
    train(model, optimizer, scheduler, 0, late)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))], "lr": 1e-6})
    train(model, optimizer, scheduler, late, 110)
    assert scheduler.found is not None
    if resumed:
        scheduler.load_state_dict(copy.deepcopy(scheduler.state_dict()))
    train(model, optimizer, scheduler, 110, STEPS)
    first, second = scheduler.found.rates
    assert first == pytest.approx(scheduler.found.rate)
    assert second == pytest.approx(first / 100, rel=1e-3)
