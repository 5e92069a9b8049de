"""The rule of the found outer rate, by property."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from outer_rate import BOUNDS, LARGEST, OuterRate, next_rate

RATES, SIZES = st.floats(*BOUNDS), st.floats(1e-20, 1e20)


@given(RATES, st.floats(-1, 1), st.floats(-1, 1), SIZES, SIZES)
def test_the_more_it_is_asked_for_the_higher_it_is(rate: float, a: float, b: float, moved: float, step: float) -> None:
    size = math.sqrt(moved * step)
    low, high = (next_rate(OuterRate(rate), c * size, moved, step, []).rate for c in sorted((a, b)))
    assert BOUNDS[0] <= low <= high <= BOUNDS[1]
    for found in (low, high):
        assert abs(math.log(found / rate)) <= LARGEST * (1 + 1e-9)


@given(RATES, st.floats(-1, 1), SIZES, SIZES, st.floats(1e-6, 1e6))
def test_the_size_of_weights_does_not_matter(rate: float, c: float, moved: float, step: float, unit: float) -> None:
    size = math.sqrt(moved * step)
    scaled = next_rate(OuterRate(rate), c * size * unit**2, moved * unit**2, step * unit**2, [])
    assert scaled.rate == pytest.approx(next_rate(OuterRate(rate), c * size, moved, step, []).rate, rel=1e-6)


@pytest.mark.parametrize(
    ("asked", "moved", "stepped"),
    [
        (0.0, 0.0, 0.0),
        (1.0, 0.0, 1.0),
        (1.0, 1.0, 0.0),
        (math.nan, 1.0, 1.0),
        (1.0, math.inf, 1.0),
        (1.0, math.nan, 1.0),
    ],
)
def test_where_nothing_was_seen_the_rate_stays(asked: float, moved: float, stepped: float) -> None:
    assert next_rate(OuterRate(0.7), asked, moved, stepped, []) == OuterRate(0.7)


@pytest.mark.parametrize(
    ("best", "losses", "falls"),
    [
        (1.0, [1.05, 1.05], False),  # within a tenth
        (1.0, [1.2, 1.2], True),
        (1.0, [0.7, 1.7], False),  # within two standard errors, which are 0.5 each
        (-2.0, [-1.9, -1.9], False),
        (-2.0, [-1.0, -1.0], True),
        (math.inf, [9.0, 9.0], False),  # the first
        (1.0, [math.nan, 1.0], False),
        (1.0, [2.0], True),
    ],
)
def test_where_losses_rise_the_rate_falls(best: float, losses: list[float], falls: bool) -> None:
    """Though the gradients ask for more."""
    found = next_rate(OuterRate(best=best), 1.0, 1.0, 1.0, losses)
    assert (found.rate < 1.0) == falls
    assert found.rate == pytest.approx(math.exp(-LARGEST if falls else LARGEST))
    assert found.best == min(best, sum(losses) / len(losses)) or not math.isfinite(sum(losses))
