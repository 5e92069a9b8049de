"""The peak of a schedule is found in advance: where a plain loop over all steps finds it, and in less than a second."""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim import lr_scheduler as torchs

import hdet
from hdet.schedulers import peak as peaks
from hdet.schedulers.peak import peak_of

LONG = 25_000


@pytest.fixture(autouse=True)
def time_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is found does not depend on how busy the machine is; the test of the limit sets it again."""
    monkeypatch.setattr(peaks, "_SECONDS", 100.0)


class Mine:
    """A schedule of the user's own, with a state in an object of its own."""

    def __init__(self, optimizer: Optimizer, rise: int, length: int) -> None:
        self.optimizer, self.rise, self.length, self.seen = optimizer, rise, length, [0]
        self.write()

    def write(self) -> None:
        for group in self.optimizer.param_groups:
            t = self.seen[-1]
            group["lr"] = 0.1 * min((t + 1) / self.rise, (self.length - t) / (self.length - self.rise))

    def step(self) -> None:
        self.seen[-1] += 1
        self.write()

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


def warmed(optimizer: Optimizer, rise: int, n: int) -> Any:
    warm_up = torchs.LinearLR(optimizer, start_factor=0.01, total_iters=rise)
    return torchs.SequentialLR(optimizer, [warm_up, torchs.CosineAnnealingLR(optimizer, n)], milestones=[rise])


def in_three(optimizer: Optimizer, rise: int, n: int) -> Any:
    parts = [
        torchs.LinearLR(optimizer, start_factor=0.01, total_iters=rise),
        torchs.ConstantLR(optimizer, 1.0),
        torchs.PolynomialLR(optimizer, n),
    ]
    return torchs.SequentialLR(optimizer, parts, milestones=[rise, rise + 500])


def chained(optimizer: Optimizer, rise: int, n: int) -> Any:
    warm_up = torchs.LinearLR(optimizer, start_factor=0.01, total_iters=rise)
    return torchs.ChainedScheduler([warm_up, torchs.CosineAnnealingLR(optimizer, 4 * n)])


def restarted(optimizer: Optimizer, rise: int, n: int) -> Any:
    """As transformers' cosine with hard restarts: each of them reaches the same height."""

    def shape(t: int) -> float:
        return t / rise if t < rise else 0.5 * (1 + torch.cos(torch.tensor(3.14159 * ((t - rise) / 900 % 1.0))).item())

    return torchs.LambdaLR(optimizer, shape)


def one_cycle(optimizer: Optimizer, rise: int, n: int) -> Any:
    return torchs.OneCycleLR(optimizer, 0.1, n + 1, pct_start=rise / n, cycle_momentum=False)


SHAPES: dict[str, Callable[[Optimizer, int, int], Any]] = {
    "cosine": lambda o, rise, n: torchs.CosineAnnealingLR(o, n),
    "steps": lambda o, rise, n: torchs.StepLR(o, n // 4),
    "cyclic": lambda o, rise, n: torchs.CyclicLR(o, 0.01, 0.1, step_size_up=rise, cycle_momentum=False),
    "warm restarts": lambda o, rise, n: torchs.CosineAnnealingWarmRestarts(o, rise),
    "linear": lambda o, rise, n: torchs.LambdaLR(o, lambda t: min((t + 1) / rise, (n - t) / (n - rise))),
    "hard restarts": restarted,
    "one cycle": one_cycle,
    "warmed up": warmed,
    "in three": in_three,
    "chained": chained,
}


def a_schedule(name: str, rise: int, n: int) -> tuple[SGD, Any]:
    optimizer = SGD([{"params": [nn.Parameter(torch.ones(1))], "lr": lr} for lr in (0.1, 0.01)])
    return optimizer, Mine(optimizer, rise, n) if name == "mine" else SHAPES[name](optimizer, rise, n)


@pytest.mark.parametrize("rise", [300, 14_321])
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.filterwarnings("ignore")
def test_it_is_where_all_steps_show_it(name: str, rise: int) -> None:
    optimizer, schedule = a_schedule(name, rise, LONG)
    before = copy.deepcopy((optimizer.state_dict(), schedule.state_dict()))
    peak = peak_of([(optimizer, schedule)], LONG, 1, 0)
    assert repr((optimizer.state_dict(), schedule.state_dict())) == repr(before)
    rates = []
    for _ in range(LONG):
        rates.append([group["lr"] for group in optimizer.param_groups])
        schedule.step()
    highest = max(own[0] for own in rates)
    assert peak.rates[0] == pytest.approx(highest, rel=1e-3)
    assert peak.rates == pytest.approx(rates[peak.step], rel=1e-6)
    expected = next(t for t, own in enumerate(rates) if own[0] >= highest * (1 - 1e-9))
    assert abs(peak.step - expected) <= 1e-3 * LONG


def test_one_that_has_begun_is_asked_for_what_is_to_come() -> None:
    peaks = []
    for done in (0, 5000):
        optimizer, schedule = a_schedule("warmed up", 14_321, LONG)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(done):
                schedule.step()
        peaks.append(peak_of([(optimizer, schedule)], LONG - done, 1, 0).step)
    assert peaks == [14_321, 9321]


@pytest.mark.filterwarnings("ignore")
def test_the_third_of_three_parts_is_asked_at_its_own_steps() -> None:
    optimizer = SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    low, middle = (torchs.ConstantLR(optimizer, factor, LONG) for factor in (0.1, 0.2))
    rise = torchs.LinearLR(optimizer, start_factor=0.3, total_iters=3000)
    schedule = torchs.SequentialLR(optimizer, [low, middle, rise], milestones=[5000, 12_000])
    peak = peak_of([(optimizer, schedule)], LONG, 1, 0)
    assert (peak.step, peak.rates) == (15_000, pytest.approx([0.1]))


def test_of_several_each_has_its_own_rates_there() -> None:
    made = [a_schedule("warmed up", 12_000, LONG), a_schedule("linear", 300, LONG)]
    peak = peak_of(made, LONG, 1, 0)
    assert peak.step == 12_000
    expected = (LONG - 12_000) / (LONG - 300)
    assert peak.rates == pytest.approx([0.1, 0.01, 0.1 * expected, 0.01 * expected])


def test_one_of_your_own_is_followed_from_the_highest_rate_that_was_seen() -> None:
    optimizer, schedule = a_schedule("mine", 300, LONG)
    assert peak_of([(optimizer, schedule)], LONG, 1, 0).step == 299
    optimizer, schedule = a_schedule("mine", 25_000, 2 * LONG)
    peak = peak_of([(optimizer, schedule)], 2 * LONG, 1, 0)
    assert (peak.step, schedule.seen) == (19_999, [0])
    assert peak.rates == pytest.approx([0.08, 0.08])


class Slow(torchs.LambdaLR):
    """A millisecond for every step."""

    def __init__(self, optimizer: Optimizer, n: int) -> None:
        super().__init__(optimizer, lambda t: time.sleep(1e-3) or 1 - t / n)  # type: ignore[func-returns-value]


@pytest.mark.parametrize("name", [*SHAPES, "mine", "slow"])
@pytest.mark.parametrize("n", [1_000_000, 1_000_000_000])
def test_no_schedule_takes_more_than_a_second(name: str, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert peaks._SECONDS <= 0.6
    optimizer = SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    schedule = Slow(optimizer, n) if name == "slow" else a_schedule(name, n // 50, n)[1]
    began = time.perf_counter()
    hdet.auto(optimizer_of(schedule), schedule=schedule, total_steps=n)
    assert time.perf_counter() - began < 5.0  # a second, on a machine that is not busy


def optimizer_of(schedule: Any) -> Optimizer:
    found: Optimizer = schedule.optimizer
    return found


class Counted(nn.Linear):
    """Tells how often it was copied."""

    copies = 0

    def __deepcopy__(self, memo: Any) -> Counted:
        type(self).copies += 1
        return self


class Holding(torchs.LambdaLR):
    """Holds a model, its parameters, and a method of it."""

    def __init__(self, optimizer: Optimizer, model: Any) -> None:
        self.model, self.held = model, {"parameters": list(model.parameters()), "method": model.extra_repr}
        super().__init__(optimizer, lambda t: 1.0)


def test_a_model_that_a_schedule_holds_is_not_copied() -> None:
    model = Counted(4, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    scheduler = hdet.auto(optimizer, schedule=Holding(optimizer, model), total_steps=100)
    assert Counted.copies == 0
    assert scheduler.schedule.model is model


@pytest.mark.filterwarnings("ignore")
def test_a_chain_may_have_one_part() -> None:
    optimizer = SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    schedule = torchs.ChainedScheduler([torchs.LinearLR(optimizer, start_factor=0.01, total_iters=14_000)])
    assert peak_of([(optimizer, schedule)], LONG, 1, 0).step == 14_000


def test_a_rate_that_is_a_tensor_stays_as_it_is() -> None:
    """torch writes into it."""
    optimizer = SGD([nn.Parameter(torch.ones(1))], lr=torch.tensor(0.1))
    schedule = torchs.LinearLR(optimizer, start_factor=0.5, total_iters=10)
    before = float(optimizer.param_groups[0]["lr"])
    assert peak_of([(optimizer, schedule)], 20, 1, 0).step == 10
    assert float(optimizer.param_groups[0]["lr"]) == before
