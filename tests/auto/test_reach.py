"""The reach, by its formula."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hdet.algorithm.auto.reach import Tally, estimate, forgetting


@given(st.floats(1e-6, 1e6), st.floats(1e-6, 1e6), st.floats(1e-6, 1e6), st.floats(1e-3, 1e3))
def test_the_estimate_is_a_rate(asked: float, gained: float, rates: float, unit: float) -> None:
    """It does not depend on the loss's unit, and scales with the rates' own."""
    once = estimate(Tally(asked, gained, rates))
    assert estimate(Tally(unit * asked, unit * gained, rates)) == pytest.approx(once)
    assert estimate(Tally(asked, gained, unit * rates)) == pytest.approx(unit * once)


@pytest.mark.parametrize("tally", [(0.0, 1.0, 1.0), (-1.0, 1.0, 1.0), (1.0, -1.0, 1.0), (math.nan, 1.0, 1.0)])
def test_sums_that_say_nothing_ask_for_nothing(tally: tuple[float, float, float]) -> None:
    assert estimate(Tally(*tally)) == 0.0


def test_a_growing_rate_forgets_its_timid_beginning_and_a_falling_one_nothing() -> None:
    assert forgetting(1.0, 2.0) == 0.25
    assert forgetting(2.0, 1.0) == 1.0
    assert forgetting(1.0, 0.0) == 1.0


def test_it_runs_ahead_on_a_slope_and_stops_in_a_valley() -> None:
    """Gradient descent on a slope that turns into a valley of curvature 1 at distance 100."""
    start, x, rate, pull, asked, rates, last = 0.0, 0.0, 1e-3, 0.0, 0.0, 0.0, 0.0
    for _ in range(60):
        gradient = -1.0 if x < 100 else x - 101
        kept = forgetting(last, rate) if last else 1.0
        asked = asked * kept + gradient * (start - x)
        pull, rates, last = pull * kept + gradient, rates + rate, rate
        x -= rate * gradient
        rate = max(rate, estimate(Tally(asked, pull * (start - x), rates)))
    assert 10 < rate < 300  # it went four decades up, to the distance, and no further
