"""States go to and fro between torch's OneCycleLR and hdet's, whatever torch takes as arguments."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adam, lr_scheduler

import hdet

TORCH, OURS = lr_scheduler.OneCycleLR, hdet.OneCycleLR
CASES = 300


class Case:
    """Arguments that torch takes, and a step at which the run is cut."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.kind, self.groups = rng.choice([SGD, Adam]), rng.randint(1, 3)
        total = rng.choice([1, 2, 3, 4, 6, 10, rng.randint(1, 40)])
        length = {"total_steps": total} if rng.random() < 0.7 else {"epochs": total, "steps_per_epoch": 2}
        self.arguments: dict[str, Any] = {
            **length,
            "max_lr": self._per_group(lambda: rng.choice([0.0, 1, 10 ** rng.uniform(-6, 1)])),
            "pct_start": rng.choice([0.0, 0.1, 0.3, 0.5, 0.6, 1.0, rng.random()]),
            "anneal_strategy": rng.choice(["cos", "linear"]),
            "cycle_momentum": rng.choice([True, False, 1, 0, None]),
            "base_momentum": self._per_group(rng.random),
            "max_momentum": self._per_group(rng.random),
            "div_factor": rng.choice([25.0, 1, 0.5, math.inf]),
            "final_div_factor": rng.choice([1e4, 1, math.inf]),
            "three_phase": rng.choice([True, False, 1]),
        }
        self.total = total if "total_steps" in length else 2 * total
        self.cut = rng.randint(0, self.total)

    def _per_group(self, draw: Callable[[], float]) -> Any:
        return draw() if self.rng.random() < 0.6 else [draw() for _ in range(self.groups)]

    def make(self, scheduler: type[TORCH], **more: Any) -> Any:
        rows = [{"params": [torch.nn.Parameter(torch.ones(2))], "lr": 0.1} for _ in range(self.groups)]
        optimizer = self.kind(rows, lr=0.1, **({"momentum": 0.9} if self.kind is SGD else {}))
        return scheduler(optimizer, **self.arguments, **more)


def train(scheduler: Any, steps: int) -> list[Any]:
    """The rates and momenta of each step."""
    rows = []
    for _ in range(steps):
        scheduler.optimizer.step()
        scheduler.step()
        rows.append([_numbers(group) for group in scheduler.optimizer.param_groups])
    return rows


def _numbers(group: dict[str, Any]) -> tuple[Any, ...]:
    return group["lr"], group.get("momentum"), group.get("betas")


def saved(scheduler: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    return copy.deepcopy((scheduler.optimizer.state_dict(), scheduler.state_dict()))


def restored(scheduler: Any, states: tuple[dict[str, Any], dict[str, Any]]) -> Any:
    scheduler.optimizer.load_state_dict(states[0])
    scheduler.load_state_dict(states[1])
    return scheduler


def accepted_cases() -> list[Case]:
    """Those whose schedule torch can follow to its end: where a phase has no length it divides by zero."""
    found: list[Case] = []
    for seed in range(2 * CASES):
        case = Case(seed)
        try:
            train(case.make(TORCH), case.total)
        except ZeroDivisionError:
            continue
        found.append(case)
    return found[:CASES]


def test_any_state_of_one_is_taken_by_the_other() -> None:
    cases = accepted_cases()
    assert len(cases) == CASES
    for case in cases:
        theirs, ours = case.make(TORCH), case.make(OURS)
        assert train(ours, case.cut) == train(theirs, case.cut), case.arguments
        states = saved(theirs), saved(ours)
        expected = train(theirs, case.total - case.cut)
        for into, state in ((OURS, states[0]), (TORCH, states[1]), (OURS, states[1])):
            resumed = restored(case.make(into), state)
            assert train(resumed, case.total - case.cut) == expected, (into, case.arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        {"total_steps": 6, "three_phase": True, "pct_start": 0.1},  # phases end at -0.4, -0.8 and 5
        {"total_steps": 20, "three_phase": True, "pct_start": 0.6},  # at 11, 22 and 19
    ],
)
def test_phases_that_torch_makes_in_no_order(arguments: dict[str, Any]) -> None:
    def make() -> OURS:
        return OURS(SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9), 0.1, **arguments)

    scheduler = make()
    train(scheduler, 3)
    resumed = restored(make(), saved(scheduler))
    steps = arguments["total_steps"] - 3
    assert train(resumed, steps) == train(scheduler, steps)


def test_a_state_of_hdets_own_needs_its_phases() -> None:
    scheduler = OURS(SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9), 0.05, 10)
    state = scheduler.state_dict()
    del state["_schedule_phases"]
    with pytest.raises(hdet.ArgumentError, match=r"does not fit .*'_schedule_phases'"):
        scheduler.load_state_dict(state)


@pytest.mark.parametrize(
    "arguments",
    [{"total_steps": 20, "pct_start": 1.0}, {"total_steps": 3, "pct_start": 2 / 3, "three_phase": True}],
)
def test_a_last_phase_without_length_ends_the_run_in_peace(arguments: dict[str, Any]) -> None:
    """torch divides by the length of the phase at the last ``step()``, when all training is done."""
    rows = []
    for kind in (TORCH, OURS):
        scheduler = kind(SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9), 0.1, **arguments)
        rows.append(train(scheduler, arguments["total_steps"] - 1))
    assert rows[0] == rows[1]
    assert train(scheduler, 1)[0] == rows[1][-1]
    assert scheduler.base_lrs_now == scheduler.get_last_lr()
    scheduler.total_steps += 5  # as some do who train on
    assert train(scheduler, 5)[-1] == rows[1][-1]
    with pytest.raises(ZeroDivisionError):
        train(TORCH(scheduler.optimizer, 0.1, **arguments), arguments["total_steps"])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("_schedule_phases", value) for value in (None, [], [{}], [None], "x")),
        *(("_last_lr", value) for value in (["x"], [math.nan], None)),
        *((key, value) for key in ("last_epoch", "total_steps", "_step_count") for value in (None, "x", 1.5)),
        ("base_lrs", "q"),
    ],
)
def test_a_damaged_value_of_torchs_part_is_refused_and_nothing_is_changed(key: str, value: object) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9)
    scheduler = hdet.OneCycleLR(optimizer, 0.1, 50)
    state, rates = scheduler.state_dict(), copy.deepcopy(optimizer.state_dict())
    with pytest.raises(hdet.ArgumentError):
        scheduler.load_state_dict({**state, key: value})
    assert repr(scheduler.state_dict()) == repr(state)
    assert optimizer.state_dict() == rates
    scheduler.load_state_dict(state)
