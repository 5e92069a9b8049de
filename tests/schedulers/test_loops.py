"""Loops in which the scheduler steps more or less often than the optimizer, and a SequentialLR as the schedule."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ConstantLR, LinearLR, SequentialLR
from torch.optim.lr_scheduler import OneCycleLR as TorchOneCycle

import hdet
from tests.problems import (
    Records,
    batch_of,
    final_loss,
    found_rate,
    loss_of,
    network,
    quiet,
    recorded,
    train,
)
from tests.setup_runs import searching

Make = Callable[[Any, float], torch.optim.Optimizer]


def seldom(model: nn.Module, optimizer: Any, scheduler: Any, updates: int, n: int) -> None:
    """The scheduler is stepped at every n-th optimizer step."""
    for t in range(updates):
        optimizer.zero_grad()
        loss = loss_of(model, batch_of(t))
        loss.backward()
        optimizer.step()
        if (t + 1) % n == 0:
            scheduler.step(loss.detach())


def often(model: nn.Module, optimizer: Any, scheduler: Any, updates: int, n: int) -> None:
    """Gradients are accumulated by hand over n micro-batches, and the scheduler is stepped at each of them."""
    for t in range(updates):
        optimizer.zero_grad()
        for i in range(n):
            x, y = batch_of(t)
            part = slice(i * len(x) // n, (i + 1) * len(x) // n)
            loss = loss_of(model, (x[part], y[part]))
            (loss / n).backward()
            if i == n - 1:
                optimizer.step()
            scheduler.step(loss.detach())


def adam(params: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=lr)


def sgd(params: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=lr, momentum=0.9)


def auto(make: Make, guess: float, steps: int, journal: Path, loop: Callable[..., None], *more: Any) -> float:
    model = network()
    optimizer = make(model.parameters(), guess)
    scheduler = hdet.auto(optimizer, total_steps=steps, journal=journal)
    with quiet():
        loop(model, optimizer, scheduler, *more)
    return final_loss(model)


@cache
def one_to_one(make: Make, guess: float, updates: int) -> tuple[float, float]:
    """The final loss and the found rate of a loop with a step of each."""
    with TemporaryDirectory() as folder:
        journal = Path(folder) / "run.jsonl"
        return auto(make, guess, updates, journal, train, range(updates)), found_rate(journal, guess)


@pytest.mark.parametrize(("make", "guess"), [(adam, 1e-6), (sgd, 1e-6), (sgd, 10.0)])
@pytest.mark.parametrize(
    ("loop", "n", "updates", "steps"),
    [
        pytest.param(seldom, 2, 300, 150, id="2-optimizer-steps"),
        pytest.param(seldom, 4, 480, 120, id="4-optimizer-steps"),
        pytest.param(often, 2, 300, 600, id="2-scheduler-steps"),
        pytest.param(often, 4, 300, 1200, id="4-scheduler-steps"),
    ],
)
def test_it_learns_as_much_as_one_to_one(
    loop: Any, n: int, updates: int, steps: int, make: Make, guess: float, tmp_path: Path
) -> None:
    """Rounds count the optimizer's steps, whatever ``total_steps`` counts. One that is stepped seldom begins lower:
    the first round has several steps, and how far they come together is taken for one.
    """
    plain, rate = one_to_one(make, guess, updates)
    found = auto(make, guess, steps, tmp_path / "run.jsonl", loop, updates, n)
    assert found < (9 if loop is seldom else 3) * plain
    assert 1 / 10 < found_rate(tmp_path / "run.jsonl", guess) / rate < 3


@pytest.mark.parametrize(("make", "guess"), [(adam, 1e-6), (sgd, 10.0)])
@pytest.mark.parametrize(("n", "told"), [(2, "at each"), (3, "at the last"), (2, "never")])
def test_calls_without_a_step_between_them_only_move_the_schedule(make: Make, guess: float, n: int, told: str) -> None:
    """As Accelerate steps it, once for each process: ``total_steps`` counts calls, and the same rates are found."""
    ends = []
    for calls in (1, n):
        model = network()
        optimizer = make(model.parameters(), guess)
        journal = Records()
        scheduler = searching(model, optimizer, calls * 200, journal=journal)
        rates = []
        with quiet():
            for t in range(200):
                optimizer.zero_grad()
                loss = loss_of(model, batch_of(t))
                loss.backward()
                optimizer.step()
                rates.append(float(optimizer.param_groups[0]["lr"]))
                for call in range(calls):
                    tells = told == "at each" or (told == "at the last" and call == calls - 1)
                    scheduler.step(*([loss.detach()] if tells else []))
        rounds = [(-(-r["step"] // calls), r["event"]) for r in journal.rounds if r["step"] < calls * 190]
        ends.append((rounds, rates[:150], final_loss(model)))
    (rounds, rates, loss), (others, other_rates, other_loss) = ends
    assert others == rounds
    # The rise is counted in calls, and each rate is one call late. What the gradients ask for after the peak follows
    # from weights that have come another way by then.
    assert other_rates[:60] == pytest.approx(rates[:60], rel=0.05)
    assert other_rates == pytest.approx(rates, rel=0.1)
    assert other_loss == pytest.approx(loss, rel=0.1)


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("first", ["linear", "constant"])
def test_a_sequential_lr_is_followed_as_a_whole(first: str, told: bool) -> None:
    """A warm-up in front of a OneCycle, which the search follows; torch's own warnings are torch's."""
    expected, theirs = _in_sequence(first, auto=False)
    loss, ours = _in_sequence(first, auto=True, told=told)
    assert [kind for kind, _ in set(ours) - set(theirs)] == []
    assert loss < 1.5 * expected


def _in_sequence(first: str, auto: bool, told: bool = False) -> tuple[float, list[tuple[str, str]]]:
    """The final loss of 199 steps, and all warnings."""

    def sequence(optimizer: torch.optim.Optimizer) -> SequentialLR:
        before: Any = LinearLR(optimizer, 0.1, total_iters=30) if first == "linear" else ConstantLR(optimizer, 1.0)
        after = TorchOneCycle(optimizer, 0.01, total_steps=170, cycle_momentum=False)
        return SequentialLR(optimizer, [before, after], milestones=[30])

    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with recorded() as caught:
        scheduler: Any = hdet.auto(optimizer, schedule=sequence, total_steps=200) if auto else sequence(optimizer)
        for t in range(199):
            optimizer.zero_grad()
            loss = loss_of(model, batch_of(t))
            loss.backward()
            optimizer.step()
            scheduler.step(*([loss.detach()] if told else []))
    return final_loss(model), sorted({(w.category.__name__, str(w.message)) for w in caught})
