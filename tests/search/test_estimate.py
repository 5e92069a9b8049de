"""The reach, by its formula."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hdet.search.rule import Sums, estimate, straightness, weight_ratio

some = st.floats(1e-6, 1e6)


@given(some, some, some, st.floats(1e-3, 1e3))
def test_the_estimate_is_a_rate(numerator: float, denominator: float, rates: float, unit: float) -> None:
    """It does not depend on the loss's unit, and scales with the rates' own."""
    once = estimate(Sums(numerator, denominator, rates))
    assert estimate(Sums(unit * numerator, unit * denominator, rates)) == pytest.approx(once)
    assert estimate(Sums(numerator, denominator, unit * rates)) == pytest.approx(unit * once)


@given(some, some, some, some, st.floats(1e-3, 1e3))
def test_straightness_has_no_unit(
    numerator: float, denominator: float, rates: float, straight: float, unit: float
) -> None:
    once = straightness(Sums(numerator, denominator, rates, straight))
    assert straightness(Sums(numerator, denominator, unit * rates, unit * straight)) == pytest.approx(once)
    assert straightness(Sums(numerator, denominator, rates, 0.0)) == 0.0


@pytest.mark.parametrize(
    "sums", [(0.0, 1.0, 1.0), (-1.0, 1.0, 1.0), (1.0, -1.0, 1.0), (1.0, 0.0, 1.0), (math.nan,) * 3]
)
def test_sums_that_say_nothing_ask_for_nothing(sums: tuple[float, float, float]) -> None:
    assert estimate(Sums(*sums)) == 0.0
    assert straightness(Sums(*sums, 1.0)) == 0.0


def test_a_growing_rate_forgets_its_timid_beginning_and_a_falling_one_nothing() -> None:
    assert weight_ratio(1.0, 2.0) == 0.25
    assert weight_ratio(2.0, 1.0) == 1.0
    assert weight_ratio(1.0, 0.0) == 1.0


@given(st.lists(st.floats(1e-3, 1e3), min_size=2, max_size=20))
def test_along_a_straight_way_it_is_the_mean_of_the_way_before(rates: list[float]) -> None:
    """Steps along one gradient, of any rates."""
    numerator = denominator = ahead = weight = way = 0.0
    before = rates[0]
    for rate in rates:
        kept = weight_ratio(before, rate)
        numerator, ahead = numerator * kept + way, ahead * kept + way
        denominator, weight, before = denominator * kept + 1.0, weight * kept + 1.0, rate
        way += rate
    sums = Sums(numerator, denominator * way, way, ahead / weight)
    assert straightness(sums) == pytest.approx(1.0)
    assert 0 < estimate(sums) < way


def test_it_runs_ahead_on_a_slope_and_stops_in_a_valley() -> None:
    """Gradient descent on a slope that turns into a valley of curvature 1 at distance 100."""
    start, x, rate, pull, numerator, rates, last = 0.0, 0.0, 1e-3, 0.0, 0.0, 0.0, 0.0
    for _ in range(60):
        gradient = -1.0 if x < 100 else x - 101
        kept = weight_ratio(last, rate) if last else 1.0
        numerator = numerator * kept + gradient * (start - x)
        pull, rates, last = pull * kept + gradient, rates + rate, rate
        x -= rate * gradient
        rate = max(rate, estimate(Sums(numerator, pull * (start - x), rates)))
    assert 10 < rate < 300  # it went four decades up, to the distance, and no further
