"""Rounds of a search, and which of their gradients are sampled."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hdet.rule.constants import DEFAULT
from hdet.rule.decision import is_sampled, next_end
from tests.search import twin

pytestmark = pytest.mark.quick

steps = st.integers(0, 5000)


@given(steps)
def test_rounds_end_where_the_twins_do(t: int) -> None:
    assert next_end(t) == twin.next_end(t)


@given(steps)
def test_an_end_is_after_now_and_ends_are_those_between(t: int) -> None:
    end = next_end(t)
    assert end > t
    assert all(next_end(between) == end for between in range(t, end))
    assert next_end(end) > end


@given(st.integers(1, 10**6))
def test_a_round_has_a_fifth_of_the_steps_so_far(t: int) -> None:
    begun = next_end(t)
    assert next_end(begun) - begun == max(2, begun // 5)


def test_there_are_few_rounds_in_a_long_run() -> None:
    t = rounds = 0
    while (t := next_end(t)) <= 10**9:
        rounds += 1
    assert rounds == 107


@given(st.integers(1, 3000))
def test_at_most_eight_steps_of_a_round_are_sampled_and_the_first_is(length: int) -> None:
    sampled = [step for step in range(length) if is_sampled(step, length)]
    assert sampled[0] == 0
    assert len(sampled) <= DEFAULT.max_samples
    assert 2 * len(sampled) > min(length, DEFAULT.max_samples)
    assert len({b - a for a, b in pairwise(sampled)}) <= 1


def test_other_constants_are_other_rounds() -> None:
    often = DEFAULT._replace(min_round=1, round_growth=0.0, max_samples=1)
    assert [next_end(t, often) for t in (0, 1, 7)] == [1, 2, 8]
    assert not is_sampled(3, 9, often)
    assert is_sampled(0, 0)  # a round that has not begun
