"""The shape of the schedule of ``hdet.auto``, how it is finished, and how it becomes longer until its hold ends."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import hdet
from hdet.rule.constants import DEFAULT
from hdet.schedulers.trapezoid import LengthError, Trapezoid, TrapezoidSchedule

FLOOR = 1 / 25 / 1e4


def rates_of(trapezoid: Trapezoid, steps: range) -> list[float]:
    return [trapezoid.at(t) for t in steps]


def fall(part: float) -> float:
    """When this part of it is over."""
    return 1 - (1 - FLOOR) * math.sqrt(part)


def expected(t: float, steps: int) -> float:
    peak, hold = 0.3 * steps - 1, 0.6 * steps - 1
    if t < peak:
        return 1 / 25 + 24 / 25 * t / peak
    return fall(max(t - hold, 0) / (steps - 1 - hold))


# -- its shape --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [2, 3, 10, 77, 100])
def test_it_rises_is_held_and_falls(steps: int) -> None:
    rates = rates_of(Trapezoid.of(steps), range(steps))
    assert rates == pytest.approx([expected(t, steps) for t in range(steps)])
    assert rates[-1] == pytest.approx(FLOOR)
    assert Trapezoid.of(steps).at(steps) == pytest.approx(FLOOR)  # after the last step, too


def test_of_unknown_length_it_rises_and_is_held() -> None:
    rise = DEFAULT.min_steps
    rates = rates_of(Trapezoid.of(None), range(10 * rise))
    assert rates[:rise] == pytest.approx([1 / 25 + 24 / 25 * t / rise for t in range(rise)])
    assert set(rates[rise:]) == {1.0}


@pytest.mark.parametrize("peak", [0.0, 1e-14, 3.7])
def test_it_is_in_proportion_to_its_peak(peak: float) -> None:
    trapezoid = Trapezoid.of(100)
    assert [trapezoid.at(t, peak) for t in range(100)] == pytest.approx([peak * trapezoid.at(t) for t in range(100)])


def test_while_its_rise_is_held_it_is_at_its_peak() -> None:
    schedule = TrapezoidSchedule(100, [1.0, 0.5])
    assert [schedule.rates(t, held=True) for t in (0, 29, 59)] == [[1.0, 0.5]] * 3
    assert schedule.rates(0, held=False) == pytest.approx([0.04, 0.02])
    assert schedule.rates(80, held=True) == schedule.rates(80, held=False)


def test_a_onecycle_of_numbers_has_none() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    with pytest.raises(ValueError, match="anneal_strategy"):
        hdet.OneCycleLR(optimizer, 0.1, 100, cycle_momentum=False, anneal_strategy="trapezoid")  # type: ignore[arg-type]


# -- finished ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 2, 30, 300])
@pytest.mark.parametrize("total", [None, 100])
def test_finished_while_it_is_held(total: int | None, steps: int) -> None:
    finished = Trapezoid.of(total).finished(50, steps)
    assert rates_of(finished, range(50, 50 + steps)) == pytest.approx([fall((t + 1) / steps) for t in range(steps)])
    assert (finished.total_steps, finished.is_finished) == (50 + steps, True)
    assert not Trapezoid.of(total).is_finished


@pytest.mark.parametrize("now", [0, 1, 29])
def test_finished_while_it_rises_it_falls_from_its_peak(now: int) -> None:
    """The factor on it takes over what is missing to the peak."""
    finished = Trapezoid.of(100).finished(now, 10)
    assert rates_of(finished, range(now, now + 10)) == pytest.approx([fall((t + 1) / 10) for t in range(10)])


@pytest.mark.parametrize("steps", [2, 20, 90])
def test_finished_while_it_falls_it_goes_on_from_there(steps: int) -> None:
    part = (80 - 59) / 40
    rates = rates_of(Trapezoid.of(100).finished(80, steps), range(80, 80 + steps))
    assert rates == pytest.approx([fall(part + (1 - part) * t / (steps - 1)) for t in range(steps)])


def test_finished_while_it_falls_with_a_single_step_left() -> None:
    assert Trapezoid.of(100).finished(80, 1).at(80) == pytest.approx(FLOOR)


def test_finished_twice() -> None:
    """The second time counts, and it still falls from where it is."""
    first = Trapezoid.of(None).finished(50, 20)
    second = first.finished(60, 100)
    assert second.at(60) == pytest.approx(first.at(60))
    rates = rates_of(second, range(60, 160))
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] == pytest.approx(FLOOR)
    assert second.total_steps == 160


# -- another length ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "then"), [(200, 300), (None, 300), (200, None)])
def test_a_run_that_is_held_is_held_on(first: int | None, then: int | None) -> None:
    saved, longer = Trapezoid.of(first), Trapezoid.of(then)
    gone_on = longer.going_on(saved, 70, "1")
    assert set(rates_of(gone_on, range(70, 179))) == {1.0}
    assert gone_on.total_steps == then
    if then is not None:
        assert rates_of(gone_on, range(180, then)) == rates_of(longer, range(180, then))


@pytest.mark.parametrize("then", [100, 400, None])
def test_a_run_that_rises_has_the_others_rise(then: int | None) -> None:
    other = Trapezoid.of(then)
    assert other.going_on(Trapezoid.of(200), 45, "1") == other


def test_a_run_that_falls_keeps_its_length() -> None:
    Trapezoid.of(200).going_on(Trapezoid.of(100), 59, "0.1")
    with pytest.raises(LengthError, match=r"must be 100 .* falls from step 59 on and this is step 60") as error:
        Trapezoid.of(200).going_on(Trapezoid.of(100), 60, "0.1")
    assert "got total_steps=200; give that, or begin a new run from the weights with the rate 0.1" in str(error.value)


def test_a_length_with_which_it_would_fall_already_is_too_short() -> None:
    Trapezoid.of(100).going_on(Trapezoid.of(None), 59, "0.1")
    words = r"falls after step 60, .* got total_steps=100, with which it falls from step 59 on; give more"
    with pytest.raises(LengthError, match=words):
        Trapezoid.of(100).going_on(Trapezoid.of(None), 60, "0.1")


# -- its state --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("total", [None, 100])
@pytest.mark.parametrize("finishes", [None, 10, 70])
def test_its_state_brings_it_back(total: int | None, finishes: int | None) -> None:
    first, second = (TrapezoidSchedule(total, [1.0, 0.1]) for _ in range(2))
    if finishes is not None:
        first.finish(finishes, 20)
    second.finish(5, 5)
    assert second.load(first.state_dict(), 80) is False
    assert (second.shape, second.guesses) == (first.shape, first.guesses)
    assert second.state_dict() == first.state_dict()


@pytest.mark.parametrize("planned", [None, 1000])
def test_a_finished_one_comes_back_with_the_length_that_it_has_now(planned: int | None) -> None:
    """The message of another length names it."""
    first = TrapezoidSchedule(planned, [1.0])
    first.finish(50, 20)
    state = first.state_dict()
    with pytest.raises(LengthError, match=r"must be 70 as in the run that was saved.*got total_steps=500; give that"):
        TrapezoidSchedule(500, [1.0]).check(state, 55, "0.1")
    again = TrapezoidSchedule(70, [1.0])
    again.check(state, 55, "0.1")
    assert again.load(state, 55) is False
    assert (again.shape, again.total_steps) == (first.shape, 70)


@pytest.mark.parametrize("wrong", [{"rise": "1"}, {"hold": None}, {"total_steps": 1.5}, {"total_steps": "100"}])
def test_a_state_that_is_none_is_refused(wrong: dict[str, Any]) -> None:
    schedule = TrapezoidSchedule(100, [1.0])
    with pytest.raises(ValueError, match="its trapezoid is"):
        schedule.check({**schedule.state_dict(), **wrong}, 5, "0.1")


def test_a_group_that_is_added_has_its_own_guess() -> None:
    schedule = TrapezoidSchedule(100, [1.0, 0.1])
    schedule.grow({1: {"lr": 0.5}}, [1.0, 0.1])  # between the two
    assert schedule.guesses == [1.0, 0.5, 0.1]
    assert schedule.rates(40, held=False) == [1.0, 0.5, 0.1]
