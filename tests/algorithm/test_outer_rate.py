"""The rule of the found outer rate, by property."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hdet.algorithm.outer_rate import BOUNDS, LARGEST, next_rate

RATES, SIZES = st.floats(*BOUNDS), st.floats(1e-20, 1e20)


@given(RATES, st.floats(-1, 1), st.floats(-1, 1), SIZES, SIZES)
def test_the_more_it_is_asked_for_the_higher_it_is(rate: float, a: float, b: float, moved: float, step: float) -> None:
    size = math.sqrt(moved * step)
    low, high = (next_rate(rate, c * size, moved, step) for c in sorted((a, b)))
    assert BOUNDS[0] <= low <= high <= BOUNDS[1]
    for found in (low, high):
        assert abs(math.log(found / rate)) <= LARGEST * (1 + 1e-9)


@given(RATES, st.floats(-1, 1), SIZES, SIZES, st.floats(1e-6, 1e6))
def test_the_size_of_weights_does_not_matter(rate: float, c: float, moved: float, step: float, unit: float) -> None:
    size = math.sqrt(moved * step)
    scaled = next_rate(rate, c * size * unit**2, moved * unit**2, step * unit**2)
    assert scaled == pytest.approx(next_rate(rate, c * size, moved, step), rel=1e-6)


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
    assert next_rate(0.7, asked, moved, stepped) == 0.7
