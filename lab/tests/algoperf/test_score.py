"""The score of AlgoPerf: from the formula, with hand-made times."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.algoperf.score import of_studies, profile, ratios, score, time_to_target

TIMES = st.one_of(st.floats(1, 1e4), st.just(math.inf))


def test_a_submission_counts_by_its_distance_from_the_fastest() -> None:
    times = {"fast": {"a": 10.0, "b": 30.0}, "slow": {"a": 20.0, "b": 20.0}, "none": {"a": math.inf}}
    rows = ratios(times, ["a", "b"])
    assert rows == {"fast": [1.0, 1.5], "slow": [2.0, 1.0], "none": [math.inf, math.inf]}
    assert score(rows["fast"]) == pytest.approx((3 + 2.5) / 3 / 2)
    assert score(rows["slow"]) == pytest.approx((2 + 3) / 3 / 2)
    assert score(rows["none"]) == 0


def test_more_than_four_times_the_fastest_is_a_target_that_was_missed() -> None:
    assert ratios({"fast": {"a": 1.0}, "slow": {"a": 4.1}}, ["a"])["slow"] == [math.inf]


def test_a_workload_that_nobody_solves_counts_against_all() -> None:
    rows = ratios({"one": {"a": 1.0}}, ["a", "b"])
    assert rows["one"] == [1.0, math.inf]
    assert score(rows["one"]) == 0.5


def test_the_best_trial_of_a_study_and_the_median_of_studies_count() -> None:
    assert of_studies([[5.0, 3.0], [9.0], [math.inf, 4.0]]) == 4.0
    assert of_studies([[math.inf], [1.0], [math.inf]]) == math.inf


@pytest.mark.parametrize(("is_minimized", "expected"), [(True, 2.0), (False, 1.0)])
def test_the_first_evaluation_that_reaches_the_target(is_minimized: bool, expected: float) -> None:
    assert time_to_target([1.0, 2.0, 3.0], [0.9, 0.4, 0.3], 0.5, is_minimized=is_minimized) == expected


def test_an_evaluation_that_is_no_number_does_not_reach_it() -> None:
    assert time_to_target([1.0], [math.nan], 0.5, is_minimized=True) == math.inf


@given(st.lists(TIMES, min_size=1, max_size=8))
def test_the_score_is_the_mean_of_the_profile(row: list[float]) -> None:
    taus = [1 + 3 * (step + 0.5) / 3000 for step in range(3000)]
    assert score(row) == pytest.approx(sum(profile(row, tau) for tau in taus) / 3000, abs=1e-3)
