"""The peak of a schedule is found in advance, where a plain loop over all steps finds it, and the same everywhere."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim import lr_scheduler as torchs

import hdet
from hdet.optimizer import CombinedOptimizer
from hdet.schedulers.given_schedule import Peak, planned
from tests.processes import run_ranks

LONG = 25_000


def peak_of(optimizer: Optimizer, schedule: Any, steps: int) -> Peak:
    return planned(optimizer, schedule, steps)[0]


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


SHAPES["mine"] = Mine


def two_groups() -> SGD:
    return SGD([{"params": [nn.Parameter(torch.ones(1))], "lr": lr} for lr in (0.1, 0.01)])


def a_schedule(name: str, rise: int, n: int) -> tuple[SGD, Any]:
    optimizer = two_groups()
    return optimizer, SHAPES[name](optimizer, rise, n)


@pytest.mark.parametrize("rise", [300, 14_321])
@pytest.mark.parametrize("way", ["made", "function"])
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.filterwarnings("ignore")
def test_it_is_where_all_steps_show_it(name: str, way: str, rise: int) -> None:
    if (name, way) == ("mine", "made"):
        pytest.skip("refused")
    optimizer, schedule = a_schedule(name, rise, LONG)
    before = copy.deepcopy((optimizer.state_dict(), schedule.state_dict()))
    if way == "made":
        peak = peak_of(optimizer, schedule, LONG)
    else:
        peak = peak_of(two_groups(), lambda o: SHAPES[name](o, rise, LONG), LONG)
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
    for name, before in [("warmed up", 0), ("linear", 1)]:
        peaks = []
        for done in (0, 5000):
            optimizer, schedule = a_schedule(name, 14_321, LONG)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for _ in range(done):
                    schedule.step()
            peaks.append(peak_of(optimizer, schedule, LONG - done).step)
        assert peaks == [14_321 - before, 9321 - before]


@pytest.mark.filterwarnings("ignore")
def test_the_third_of_three_parts_is_asked_at_its_own_steps() -> None:
    optimizer = SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    low, middle = (torchs.ConstantLR(optimizer, factor, LONG) for factor in (0.1, 0.2))
    rise = torchs.LinearLR(optimizer, start_factor=0.3, total_iters=3000)
    schedule = torchs.SequentialLR(optimizer, [low, middle, rise], milestones=[5000, 12_000])
    peak = peak_of(optimizer, schedule, LONG)
    assert (peak.step, peak.rates) == (15_000, pytest.approx([0.1]))


@pytest.mark.parametrize("first", ["warmed up", "linear", "mine"])
@pytest.mark.parametrize("second", ["warmed up", "linear", "mine"])
def test_of_several_each_has_its_own_rates_there(first: str, second: str) -> None:
    both = [two_groups(), two_groups()]
    names = iter([first, second])
    rises = iter([12_000, 300])
    peak = peak_of(CombinedOptimizer([*both]), lambda o: SHAPES[next(names)](o, next(rises), LONG), LONG)
    apart = []
    for name, rise in ((first, 12_000), (second, 300)):
        optimizer, schedule = a_schedule(name, rise, LONG)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(peak.step):
                schedule.step()
        apart += [group["lr"] for group in optimizer.param_groups]
    assert abs(peak.step - 12_000) <= 1
    assert peak.rates == pytest.approx(apart)


WARM, TOTAL = 100_000, 1_000_000


def long_rise(t: int) -> float:
    return t / WARM if t < WARM else (TOTAL - t) / (TOTAL - WARM)


LONG_WARM_UPS: dict[str, Any] = {
    "function": long_rise,
    "held": lambda t: min(1.0, t / WARM),
    "lambda": lambda o: torchs.LambdaLR(o, long_rise),
    "sequential": lambda o: warmed(o, WARM, TOTAL),
    "in three": lambda o: in_three(o, WARM, TOTAL),
    "one cycle": lambda o: torchs.OneCycleLR(o, 0.1, TOTAL, pct_start=(WARM + 1) / TOTAL, cycle_momentum=False),
    "mine": lambda o: Mine(o, WARM + 1, TOTAL),
}


@pytest.mark.parametrize("name", LONG_WARM_UPS)
def test_a_warm_up_of_100_000_steps(name: str) -> None:
    scheduler = hdet.auto(two_groups(), schedule=LONG_WARM_UPS[name], total_steps=TOTAL)
    near = 5 if name == "one cycle" else 0  # rates that differ by less than 1e-9 are equal
    assert scheduler.state_dict()["schedule"]["peak"] == pytest.approx(WARM, abs=near)


@pytest.mark.filterwarnings("ignore")
def test_a_warm_up_of_100_000_steps_of_one_that_was_made() -> None:
    for make in (LONG_WARM_UPS["lambda"], LONG_WARM_UPS["sequential"]):
        optimizer = two_groups()
        assert peak_of(optimizer, make(optimizer), TOTAL).step == WARM


class Stepped(Mine):
    """Counts all steps of all of them."""

    steps = 0

    def step(self) -> None:
        Stepped.steps += 1
        super().step()


@pytest.mark.parametrize(
    ("rise", "groups", "most"), [(10, 1, 50_000), (10, 50, 8500), (10_000, 50, 18_500), (10**8, 2, 2**17)]
)
def test_the_work_is_bounded(rise: int, groups: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stepped, "steps", 0)
    optimizer = SGD([{"params": [nn.Parameter(torch.ones(1))]} for _ in range(groups)], lr=0.1)
    assert peak_of(optimizer, lambda o: Stepped(o, rise, 10**9), 10**9).step == min(rise, 2**17) - 1
    assert 0.9 * most < Stepped.steps <= most + 10


def fifty_groups() -> tuple[nn.Module, SGD]:
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*(nn.Linear(2, 2) for _ in range(25))))
    return model, SGD([{"params": [p]} for p in model.parameters()], lr=1e-3)


RISE_OF_RANKS = 10_000


def of_ranks(name: str, optimizer: Optimizer) -> Any:
    """Schedules on which ranks disagreed when they had a second to look at them."""
    if name == "lambdas":
        shapes = [lambda t, g=g: min((t + 1) / RISE_OF_RANKS, 1.0) / (g + 1) for g in range(50)]
        return torchs.LambdaLR(optimizer, shapes)
    return warmed(optimizer, RISE_OF_RANKS - 1, 10 * RISE_OF_RANKS)


def _looked_ahead(rank: int, name: str) -> tuple[int, list[float]]:
    model, optimizer = fifty_groups()
    scheduler = hdet.auto(optimizer, schedule=lambda o: of_ranks(name, o), total_steps=10 * RISE_OF_RANKS)
    for _ in range(3):
        loss = model(torch.ones(2, 2)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step(loss)  # raises if they disagree
    state = scheduler.state_dict()["schedule"]
    return state["peak"], state["peak_lrs"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lambdas", "sequence"])
def test_ranks_with_fifty_groups_agree(name: str) -> None:
    one, two = run_ranks(_looked_ahead, 2, name)
    assert one == two
    assert one[0] == RISE_OF_RANKS - 1


# -- nothing is copied ------------------------------------------------------------------------------------------------


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
    schedule = scheduler.state_dict()["schedule"]["schedule"]
    assert schedule["model"] is model


@pytest.mark.filterwarnings("ignore")
def test_a_chain_may_have_one_part() -> None:
    optimizer = SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    schedule = torchs.ChainedScheduler([torchs.LinearLR(optimizer, start_factor=0.01, total_iters=14_000)])
    assert peak_of(optimizer, schedule, LONG).step == 14_000


@pytest.mark.parametrize("name", SHAPES)
def test_a_rate_that_is_a_tensor_stays_as_it_is(name: str) -> None:
    """torch writes into it."""
    optimizer = SGD([nn.Parameter(torch.ones(1))], lr=torch.tensor(0.1))
    schedule = SHAPES[name](optimizer, 10, 100)
    before = [(key, id(value), float(value)) for key, value in optimizer.param_groups[0].items() if "lr" in key]
    peak_of(optimizer, schedule if name != "mine" else lambda o: Mine(o, 10, 100), 100)
    assert [(key, id(value), float(value)) for key, value in optimizer.param_groups[0].items() if "lr" in key] == before
