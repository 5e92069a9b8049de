"""The estimated rate, by its formula, and its sums against the twin's."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hdet.rule.estimate import Sums, balance, estimate, straightness, weight_ratio
from tests.search.paths import ListedPath
from tests.search.twin import Step, _straight, _sums, _weights

pytestmark = pytest.mark.quick

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
    assert weight_ratio(0.0, 2.0) == 0.0  # nothing was sampled yet


@given(st.lists(st.floats(1e-3, 1e3), min_size=2, max_size=20))
def test_along_a_straight_path_it_is_the_mean_of_the_path_before(rates: list[float]) -> None:
    """Steps along one gradient, of any rates."""
    path, x = ListedPath([0.0]), 0.0
    for rate in rates:
        path.step([1.0], [x], rate)
        x -= rate
    assert straightness(path.at([x])) == pytest.approx(1.0)
    assert 0 < estimate(path.at([x])) < -x


def test_it_runs_ahead_on_a_slope_and_stops_in_a_valley() -> None:
    """Gradient descent on a slope that turns into a valley of curvature 1 at distance 100."""
    path, x, rate = ListedPath([0.0]), 0.0, 1e-3
    for _ in range(60):
        gradient = -1.0 if x < 100 else x - 101
        path.step([gradient], [x], rate)
        x -= rate * gradient
        rate = max(rate, estimate(path.at([x])))
    assert 10 < rate < 300  # it went four decades up, to the distance, and no further


numbers = st.floats(-10, 10)
steps = st.tuples(st.tuples(numbers, numbers), st.tuples(numbers, numbers), st.floats(1e-2, 1e2), st.booleans())


@given(st.lists(steps, min_size=1, max_size=12))
def test_one_step_at_a_time_gives_the_sums_of_the_twin(
    rows: list[tuple[tuple[float, float], tuple[float, float], float, bool]],
) -> None:
    """The twin keeps every step and sums up at the end. Of a step that is not sampled only the rate counts."""
    path, listed = [], ListedPath(rows[0][0])
    for k, (now, gradient, rate, is_sampled) in enumerate(rows):
        after, sampled = rows[min(k + 1, len(rows) - 1)][0], is_sampled or k == 0
        path.append(Step(*(torch.tensor(row, dtype=torch.float64) for row in (now, gradient, after)), rate, sampled))
        listed.step(gradient, now, rate, sampled)
    unit, found = _weights(path)[-1], listed.at(rows[-1][0])
    numerator, denominator, absolute = _sums(path)
    size = max(1.0, max(abs(number) for row in rows for both in row[:2] for number in both)) ** 2
    assert found.numerator == pytest.approx(numerator / unit, rel=1e-9, abs=1e-9 * size)
    assert found.denominator == pytest.approx(denominator / unit, rel=1e-9, abs=1e-9 * size)
    assert found.absolute == pytest.approx(absolute / unit, rel=1e-9, abs=1e-9 * size)
    assert -1 - 1e-9 <= balance(found) <= 1 + 1e-9
    assert found.straight == pytest.approx(_straight(path), rel=1e-9)
    assert found.rates == pytest.approx(sum(row[2] for row in rows))
