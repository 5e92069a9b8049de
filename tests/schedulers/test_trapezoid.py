"""The schedule of ``hdet.auto``: its shape, how it is finished, and how a run becomes longer until its hold ends."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import OneCycleLR

import hdet
from tests.checkpoint.searching import Searching
from tests.search.runs import built, train

FLOOR = 1 / 25 / 1e4
TRAPEZOID = {"anneal_strategy": "trapezoid"}


def weight() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)


def plain(steps: int | None, **arguments: Any) -> Any:
    """The schedule as it is, at a rate that is kept."""
    return hdet.auto(weight(), total_steps=steps, auto_lr=False, **arguments)


def rates_of(scheduler: Any, steps: int) -> list[float]:
    """The rates of the next steps."""
    rates = []
    for _ in range(steps):
        rates.append(scheduler.optimizer.param_groups[0]["lr"])
        scheduler.optimizer.step()
        scheduler.step()
    return rates


def fall(part: float) -> float:
    """When this part of it is over."""
    return 1 - (1 - FLOOR) * math.sqrt(part)


def expected(t: float, steps: int, rise: float = 0.3) -> float:
    peak, hold = rise * steps - 1, max(rise, 0.6) * steps - 1
    if t < peak:
        return 1 / 25 + 24 / 25 * t / peak
    return fall(max(t - hold, 0) / (steps - 1 - hold))


# -- its shape --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [2, 3, 10, 77, 100])
@pytest.mark.parametrize("rise", [0.05, 0.3, 0.8])
def test_it_rises_is_held_and_falls(steps: int, rise: float) -> None:
    scheduler = plain(steps, pct_start=rise)
    rates = rates_of(scheduler, steps)
    assert rates == pytest.approx([expected(t, steps, rise) for t in range(steps)])
    assert rates[-1] == pytest.approx(FLOOR)
    assert scheduler.get_last_lr() == pytest.approx([FLOOR])  # after the last step, too


def test_a_search_climbs_in_place_of_the_rise_and_settles_when_it_falls() -> None:
    model, optimizer, scheduler = built(1e-4, 100, **TRAPEZOID)
    rates = [row[0] for row in train(model, optimizer, scheduler, range(60))]
    assert scheduler.found.status == "searching"
    rates += [row[0] for row in train(model, optimizer, scheduler, range(60, 100))]
    assert scheduler.found.status in ("settled", "unsure")
    peak = scheduler.found.rate
    assert rates[58:] == pytest.approx([peak * expected(t, 100) for t in range(58, 100)])
    assert dict(scheduler.state_dict()["hdet"]["found"])["peak"] == 29


def test_only_auto_has_it(tmp_path: Path) -> None:
    torchs = rates_of(OneCycleLR(weight(), 1.0, 50, cycle_momentum=False), 50)
    assert rates_of(hdet.OneCycleLR(weight(), "auto", 50, auto_lr=False), 50) == pytest.approx(torchs)
    assert rates_of(plain(50, anneal_strategy="cos"), 50) == pytest.approx(torchs)
    plain(50, journal=tmp_path / "run.jsonl").step(1.0)
    assert hdet.read_journal(tmp_path / "run.jsonl").header["arguments"]["anneal_strategy"] == "trapezoid"


def test_what_a_trapezoid_has_not() -> None:
    with pytest.raises(hdet.ArgumentError, match="three_phase is for a OneCycle"):
        plain(100, three_phase=True)
    with pytest.raises(ValueError, match="anneal_strategy"):
        hdet.OneCycleLR(weight(), 0.1, 100, cycle_momentum=False, **TRAPEZOID)  # type: ignore[arg-type]


# -- finished ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 2, 30, 300])
@pytest.mark.parametrize("total", [None, 100])
def test_finished_while_it_is_held(total: int | None, steps: int) -> None:
    scheduler = plain(total)
    assert rates_of(scheduler, 50)[-1] == 1.0
    scheduler.finish(steps)
    assert rates_of(scheduler, steps) == pytest.approx([fall((t + 1) / steps) for t in range(steps)])
    assert scheduler.total_steps == 50 + steps


def test_finished_while_it_rises_it_falls_from_where_it_is() -> None:
    scheduler = plain(1000)
    before = rates_of(scheduler, 101)[-1]
    scheduler.finish(10_000)
    assert rates_of(scheduler, 1) == pytest.approx([before * fall(1e-4)], rel=0.02)


@pytest.mark.parametrize("steps", [2, 20, 90])
def test_finished_while_it_falls_it_goes_on_from_there(steps: int) -> None:
    scheduler, part = plain(100), (80 - 59) / 40
    rates_of(scheduler, 80)
    scheduler.finish(steps)
    rates = rates_of(scheduler, steps)
    assert rates == pytest.approx([fall(part + (1 - part) * t / (steps - 1)) for t in range(steps)])


@pytest.mark.parametrize("finishes", [None, 500])
def test_it_is_replayed_from_a_journal(finishes: int | None, tmp_path: Path) -> None:
    """Whose rounds end before and after the fall has begun."""
    steps = 1000 if finishes is None else finishes + 100
    model, optimizer, scheduler = built(1e-4, 1000, journal=tmp_path / "run.jsonl", **TRAPEZOID)
    rates = train(model, optimizer, scheduler, range(finishes or steps))
    if finishes is not None:
        scheduler.finish(100)
        rates += train(model, optimizer, scheduler, range(finishes, steps))
    replayed = hdet.schedule_from(tmp_path / "run.jsonl", torch.optim.SGD(model.parameters(), 1.0)).lr_lambdas[0]
    expected = [row[0] for row in rates[400:]]
    assert [replayed(t) for t in range(400, steps)] == pytest.approx(expected, abs=1e-3 * max(expected))


# -- another length ---------------------------------------------------------------------------------------------------


def extended(path: Path, first: int | None, then: int | None, cut: int) -> tuple[Searching, Searching]:
    """A run that was saved after some steps, and the one that goes on from there with another length."""
    run = Searching(steps=first, **TRAPEZOID).go(0, cut)
    run.save(path)
    return run, Searching.loaded(path, steps=then, **TRAPEZOID)


@pytest.mark.parametrize(("first", "then"), [(200, 300), (None, 300), (200, None)])
def test_a_run_that_is_held_is_held_on(first: int | None, then: int | None, tmp_path: Path) -> None:
    cut = 70
    before, run = extended(tmp_path / "run.pt", first, then, cut)
    found = run.scheduler.found
    assert found is not None
    assert run.optimizer.param_groups[0]["lr"] == before.optimizer.param_groups[0]["lr"] == pytest.approx(found.rate)
    run.go(cut, 178)
    if then is None:
        run.scheduler.finish(122)
    run.go(178, 299)
    peak, hold = run.scheduler.found.rate, 179 if then else 177
    assert run.rates[176] == pytest.approx(peak)  # of step 177
    assert run.rates[179:] == pytest.approx([peak * fall((t - hold) / (299 - hold)) for t in range(180, 300)])


def test_a_run_that_rises_has_the_longer_rise(tmp_path: Path) -> None:
    _, run = extended(tmp_path / "run.pt", 200, 400, 45)
    assert dict(run.scheduler.state_dict()["hdet"]["found"])["peak"] == 119


def test_a_run_that_falls_keeps_its_length(tmp_path: Path) -> None:
    extended(tmp_path / "held.pt", 100, 200, 59)
    with pytest.raises(hdet.ArgumentError, match=r"must be 100 .* falls from step 59 on and this is step 60"):
        extended(tmp_path / "falling.pt", 100, 200, 60)


@pytest.mark.parametrize(("length", "kind"), [(100, "cos"), (200, "trapezoid")])
def test_a_onecycle_goes_on_as_one_unless_its_length_is_another(length: int, kind: str, tmp_path: Path) -> None:
    Searching(steps=100).go(0, 20).save(tmp_path / "run.pt")
    run = Searching.loaded(tmp_path / "run.pt", steps=length, **TRAPEZOID)
    state = run.scheduler.state_dict()
    assert (state["_anneal_func_type"], len(state["_schedule_phases"])) == (kind, 2 if kind == "cos" else 3)
