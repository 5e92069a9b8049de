"""Scales and knobs: tables of values that a person can check."""

from __future__ import annotations

import math
from contextlib import nullcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hdet.ensemble.knob import SCALES, KnobSpec, away
from hdet.errors import ArgumentError

pytestmark = pytest.mark.quick

INF = math.inf
LN2 = math.log(2)


@pytest.mark.parametrize(
    ("name", "base", "d", "value"),
    [
        ("relative", 2.0, 0.5, 3.0),
        ("relative", -2.0, 0.5, -3.0),
        ("linear", 2.0, 0.5, 2.5),
        ("log", 2.0, LN2, 4.0),
        ("log", 2.0, -LN2, 1.0),
        ("log", 1.0, 1e4, math.exp(700)),
        ("log", 1.0, -1e4, math.exp(-700)),
        ("logit", 0.5, math.log(3), 0.75),
        ("logit", 0.75, -math.log(3), 0.5),
        ("logit", 0.25, math.log(3), 0.5),
        ("logit", 0.5, -math.log(3), 0.25),
        ("logit", 0.2, 0.0, 0.2),
    ],
)
def test_the_value_at_a_distance(name: str, base: float, d: float, value: float) -> None:
    assert away(name, base, d) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "base", "spread", "bounds", "inside"),
    [
        ("linear", 0.3, 0.1, (0.0, 0.6), 0.3),
        ("linear", 0.05, 0.1, (0.0, 0.6), 0.1),
        ("linear", 0.55, 0.1, (0.0, 0.6), 0.5),
        ("linear", -7.0, 0.1, (-INF, 0.6), -7.0),
        ("linear", 7.0, 0.1, (0.0, INF), 7.0),
        ("relative", 1.0, 0.5, (1.0, 9.0), 2.0),
        ("relative", 9.0, 0.5, (1.0, 9.0), 6.0),
        ("relative", -9.0, 0.5, (-9.0, -1.0), -6.0),
        ("relative", -1.0, 0.5, (-9.0, -1.0), -2.0),
        ("relative", -9.0, 0.5, (-9.0, 1.0), -6.0),
        ("log", 1.0, LN2, (1.0, 9.0), 2.0),
        ("log", 9.0, LN2, (1.0, 9.0), 4.5),
        ("logit", 0.3, math.log(3), (0.25, 0.9), 0.5),
        ("logit", 0.95, math.log(3), (0.25, 0.9), 0.75),
        ("logit", 0.01, math.log(3), (0.0, 1.0), 0.01),
        ("logit", 0.99, math.log(3), (0.0, 1.0), 0.99),
    ],
)
def test_a_base_is_kept_one_spread_inside(
    name: str, base: float, spread: float, bounds: tuple[float, float], inside: float
) -> None:
    assert KnobSpec("h", name, spread, bounds).start(base) == pytest.approx(inside, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "spread", "bounds", "fits"),
    [
        ("linear", 0.3, (0.0, 0.6), True),
        ("linear", 0.31, (0.0, 0.6), False),
        ("linear", 9.0, (0.0, INF), True),
        ("linear", 9.0, (-INF, 0.0), True),
        ("log", LN2, (1.0, 4.001), True),
        ("log", LN2, (1.0, 3.999), False),
        ("relative", 0.5, (1.0, 3.001), True),
        ("relative", 0.5, (1.0, 2.999), False),
        ("relative", 0.5, (-3.001, -1.0), True),
        ("relative", 0.5, (-2.999, -1.0), False),
        ("relative", 1.0, (0.0, INF), False),  # one spread below any base is 0: none is inside
        ("relative", 1.0, (0.5, INF), False),
        ("relative", 1.0, (-INF, -0.5), False),
        ("log", 0.1, (-2.0, 0.0), False),  # its values are above 0
        ("log", 0.1, (-INF, -1.0), False),
        ("log", 0.1, (-2.0, 1.0), True),
        ("logit", 5.0, (0.0, 1.0), True),
        ("logit", 0.1, (1.0, 2.0), False),
        ("logit", 0.1, (-1.0, 0.0), False),
    ],
)
def test_bounds_must_leave_room(name: str, spread: float, bounds: tuple[float, float], fits: bool) -> None:
    with nullcontext() if fits else pytest.raises(ArgumentError, match="bounds must be such that knob 'h' has room"):
        KnobSpec("h", name, spread, bounds)


@pytest.mark.parametrize(
    ("name", "base", "allowed"),
    [
        ("relative", 0.0, False),
        ("relative", -1.0, True),
        ("linear", 0.0, True),
        ("linear", INF, False),
        ("linear", math.nan, False),
        ("log", 0.0, False),
        ("log", -1.0, False),
        ("log", 1e-9, True),
        ("logit", 0.0, False),
        ("logit", 1.0, False),
        ("logit", 1.5, False),
        ("logit", -0.5, False),
        ("logit", 0.5, True),
    ],
)
def test_which_base_a_scale_can_hold(name: str, base: float, allowed: bool) -> None:
    with nullcontext() if allowed else pytest.raises(ArgumentError, match="base value of knob 'h'"):
        KnobSpec("h", name, 0.1).start(base)


def test_an_unknown_scale_is_refused() -> None:
    with pytest.raises(ArgumentError, match="scale must be one of"):
        KnobSpec("h", "cubic", 0.1)


def test_a_knob_that_is_scheduled_learns_a_factor() -> None:
    rate = KnobSpec("lr", "relative", 0.25, scheduled=True)
    assert (rate.start(7.0), rate.factor(1.0), rate.factor(-1.0), rate.value(8.0, -1.0)) == (1.0, 1.25, 0.75, 6.0)
    assert rate.moved(2.0, 0.5) == 3.0
    assert (rate.moved(1.0, -5.0), rate.moved(1e15, 1.0)) == (1e-15, 1e15)


def test_other_knobs_learn_their_value() -> None:
    decay = KnobSpec("decay", "log", LN2, bounds=(1e-3, 1.0))
    assert decay.factor(1.0) == 1.0
    assert decay.start(0.1) == 0.1
    assert decay.start(0.9) == pytest.approx(0.5)
    assert decay.moved(0.1, LN2) == pytest.approx(0.2)
    assert decay.moved(0.1, -9.0) == pytest.approx(2e-3)
    temperature = KnobSpec("temperature", "relative", 0.1)
    assert temperature.moved(2.0, -5.0) == pytest.approx(0.2)  # a value never changes its sign
    assert temperature.moved(2.0, -0.5) == pytest.approx(1.0)
    with pytest.raises(ArgumentError, match="base value"):
        temperature.start(0.0)


@pytest.mark.parametrize(
    ("scale", "spread", "bounds", "word"),
    [
        ("linear", -0.1, (-INF, INF), "spread"),
        ("linear", math.nan, (-INF, INF), "spread"),
        ("linear", "wide", (-INF, INF), "spread"),
        ("relative", 1.01, (-INF, INF), "at most 1"),
        ("linear", 0.0, (1.0, 1.0), "bounds"),
        ("linear", 0.5, (0.0, 0.9), "bounds"),
    ],
)
def test_bad_knobs_are_refused(scale: str, spread: float, bounds: tuple[float, float], word: str) -> None:
    with pytest.raises(ArgumentError, match=word):
        KnobSpec("h", scale, spread, bounds)


def test_the_edges_of_a_spread_are_allowed() -> None:
    for scale, spread in (("relative", 1.0), ("linear", 0), ("log", 1.5)):
        assert KnobSpec("h", scale, spread).spread == spread


def test_a_factor_is_bounded() -> None:
    rate = KnobSpec("lr", "relative", 0.1, scheduled=True)
    assert [rate.moved(m, 0.0) for m in (0.0, 1e-15, 3.0, 1e15, INF)] == [1e-15, 1e-15, 3.0, 1e15, 1e15]


@given(
    name=st.sampled_from(SCALES),
    base=st.floats(-5, 5),
    spread=st.floats(0, 1),
    low=st.floats(-5, 5),
    width=st.floats(0.01, 5),
    moves=st.lists(st.floats(-3, 3), max_size=4),
)
def test_no_replica_ever_leaves_the_bounds(
    name: str, base: float, spread: float, low: float, width: float, moves: list[float]
) -> None:
    try:
        spec = KnobSpec("knob", name, spread, (low, low + width))
        learned = spec.start(base)
    except ArgumentError:
        return
    for move in (0.0, *moves):
        learned = spec.moved(learned, move)
        for x in (-1.0, 0.0, 1.0):
            assert low - 1e-9 <= spec.value(learned, x) <= low + width + 1e-9
