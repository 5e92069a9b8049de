"""The line search: what it tells people, and its edges. Its moves are its slow twin's (test_auto_twin)."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from hdet.algorithm.linesearch import LineSearch, LineSearchState
from hdet.algorithm.plain_algebra import inverse, standardised
from hdet.errors import ArgumentError

X = [[-0.3], [-0.2], [-0.1], [0.1], [0.2], [0.3]]


def on(place: float, x: list[list[float]] = X) -> list[float]:
    """A parabola whose minimum lies at that multiple of the base."""
    return [(1 + row[0] - place) ** 2 for row in x]


def after(rule: LineSearch, places: list[float], x: list[list[float]] = X) -> tuple[LineSearchState, list[float]]:
    """After rounds with their minima at these places: the state, and the moves in log."""
    state, moves = rule.init(1), []
    for place in places:
        update = rule.update(state, on(place, x), x)
        state = update.state
        moves.append(round(math.log1p(update.moves[0]), 12))
    return state, moves


def test_rows_of_rounds_move_it() -> None:
    assert after(LineSearch(), [2, 2, 2, 2])[1] == [0, 0.3, 0.3, 0.3]
    assert after(LineSearch(), [2, 1, 2, 0.2, 2, 2])[1] == [0, 0, 0, 0, 0, 0.3]
    assert after(LineSearch(), [0.2] * 5)[1] == [0, 0, -0.3, -0.3, -0.3]
    assert after(LineSearch(), [1.29, 1.29, 0.51, 0.51, 0.51])[1] == [0] * 5
    assert after(LineSearch(), [1.31, 1.31, 0.49, 0.49, 0.49])[1] == [0, 0.3, 0, 0, -0.3]
    assert after(LineSearch(step=1.0, up=3.0, down=0.9, patience=1), [2, 4, 0.8, 0.8])[1] == [0, 1, 0, -1]


def test_few_points_need_twice_the_patience() -> None:
    few = [[-0.3], [-0.1], [0.1], [0.3]]
    assert after(LineSearch(), [2] * 5, few)[1] == [0, 0, 0, 0.3, 0.3]
    assert after(LineSearch(), [0.2] * 6, few)[1] == [0, 0, 0, 0, -0.3, -0.3]
    assert after(LineSearch(), [2] * 3, [*few, [0.0]])[1] == [0, 0.3, 0.3]


def test_in_words() -> None:
    rule = LineSearch()
    said = [rule.verdicts(after(rule, places)[0]) for places in ([], [2], [0.2], [2, 1])]
    assert said == [["no signal"], ["up"], ["down"], ["no signal"]]


def test_what_it_says_of_a_slope() -> None:
    """-dL/dlog(value) of the round, and its deviation over recent rounds: (rho - 2)^2 has slope -2 at 1."""
    update = LineSearch().update(LineSearch().init(1), on(2.0), X)
    assert update.deltas == update.state.slope == [pytest.approx(2.0)]
    assert update.state.error == [pytest.approx(0.0, abs=1e-6)]
    assert update.weights == [1 / 6] * 6
    update = LineSearch().update(update.state, on(3.0), X)
    assert update.state.slope == [pytest.approx(4.0)]
    mean, square = (0.8 * 2 + 4) / 1.8, (0.8 * 4 + 16) / 1.8  # the last counts most: 0.2 (0.8 * 2 + 4) / (1 - 0.64)
    assert update.state.error == [pytest.approx(math.sqrt(square - mean**2))]
    assert update.state.rounds == [2, 0]


def test_a_common_slope_is_shared_out_over_the_knobs() -> None:
    x = [[row[0]] * 3 for row in X]
    update = LineSearch().update(LineSearch().init(3), on(2.0), x)
    assert update.deltas == pytest.approx([2 / 3] * 3)
    assert update.state.rounds == [1, 0]


def test_slopes_stay_numbers() -> None:
    update = LineSearch().update(LineSearch().init(1), [1e300 * y for y in on(2.0)], X)
    assert update.deltas == [1e100]
    assert update.state.slope_square == [pytest.approx(0.2e200)]
    update = LineSearch().update(LineSearch().init(1), [-1e300 * y for y in on(2.0)], X)
    assert update.deltas == [-1e100]


def test_noise_moves_nothing_and_points_without_spread_say_nothing() -> None:
    rng = random.Random(1)
    state = LineSearch().init(1)
    for _ in range(50):
        update = LineSearch().update(state, [rng.gauss(0, 1) for _ in X], X)
        state = update.state
        assert update.moves == [0.0]
    still = LineSearch().update(state, on(2.0), [[0.0]] * 6)
    assert (still.state, still.moves, still.deltas) == (state, [0.0], [0.0])
    assert still.weights == [1 / 6] * 6


@pytest.mark.parametrize(
    "arguments",
    [
        {"step": 0.0},
        {"step": math.inf},
        {"up": 1.0},
        {"up": math.inf},
        {"down": 1.0},
        {"down": 0.0},
        {"down": math.nan},
        {"patience": 0},
        {"patience": 1.5},
    ],
    ids=str,
)
def test_bad_arguments_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=next(iter(arguments))):
        LineSearch(**arguments)


def test_standardised_signals() -> None:
    y, unit = standardised([1.0, 3.0, 1.0, 3.0])
    assert (y, unit) == ([-1.0, 1.0, -1.0, 1.0], 1.0)
    assert standardised([2.0, 2.0]) == ([0.0, 0.0], 0.0)
    y, unit = standardised([-1.7e308, 1.7e308])
    assert (y, unit) == ([-1.0, 1.0], 1e300)


def test_the_inverse_needs_no_luck_with_its_pivots() -> None:
    found = inverse([[0.0, 2.0, 0.0], [1e-20, 1.0, 4.0], [1.0, 0.0, 0.0]])
    expected = [[0.0, 0.0, 1.0], [0.5, 0.0, 0.0], [-0.125, 0.25, 0.0]]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-12)
