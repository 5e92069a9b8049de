"""The normalised controller against its formulas, with torch's linear algebra."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

from hdet.ensemble.design import Balanced
from hdet.ensemble.normalised import Normalised
from hdet.errors import ArgumentError

pytestmark = pytest.mark.quick


class Twin:
    """The docstring of :class:`Normalised`, line by line. Step 1 in [0.2, 1.5], c = 2, ridge 1e-3."""

    def __init__(self, knobs: int) -> None:
        self.A = torch.zeros(knobs, knobs, dtype=torch.float64)
        self.b = torch.zeros(knobs, dtype=torch.float64)
        self.yy = self.n = 0.0
        self.step, self.sign = [1.0] * knobs, [0.0] * knobs

    def update(self, signals: list[float], offsets: list[list[float]]) -> tuple[list[float], list[float]]:
        """Moves and slopes."""
        x, L = torch.tensor(offsets, dtype=torch.float64), torch.tensor(signals, dtype=torch.float64)
        knobs, spread, unit = x.shape[1], x.abs().amax(0), float(L.std(correction=0))
        x, y = x / spread, (L - L.mean()) / unit
        x = x - x.mean(0)
        self.A, self.b = self.A + x.T @ x, self.b + x.T @ y
        self.yy, self.n = self.yy + float(y @ y), self.n + len(y) - 1
        C = torch.linalg.inv(self.A + 1e-3 * self.A.trace() / knobs * torch.eye(knobs, dtype=torch.float64))
        g = C @ self.b
        residual = max(self.yy - float(g @ self.b), 0.0)
        freedom = self.n - knobs
        errors = [math.sqrt((residual + 1.5) / (max(freedom, 0.0) + 1.5) * float(C[i, i])) for i in range(knobs)]
        lengths = []
        for i in range(knobs):
            t, c = abs(float(g[i])) / errors[i], 2.0 * (1 + 2.2 / freedom) if freedom >= 1 else math.inf
            direction = -math.copysign(1 - (c / t) ** 2, float(g[i])) if t > c else 0.0
            if direction and self.sign[i]:
                longer = self.step[i] * (1.2 if direction * self.sign[i] > 0 else 0.5)
                self.step[i] = min(max(longer, 0.2), 1.5)
            lengths.append(direction * self.step[i])
            self.sign[i] = math.copysign(1.0, direction) if direction else self.sign[i]
        wider = C.clone()
        for i in range(knobs):
            wider[i, i] /= 0.95 * math.exp(-abs(lengths[i]))
        self.A = torch.linalg.inv(wider)
        self.b = self.A @ g
        self.yy = 0.9 * residual + float(g @ self.b)
        self.n = 0.9 * freedom + knobs if freedom > 0 else self.n
        return [a * float(s) for a, s in zip(lengths, spread, strict=True)], [-unit * float(v) for v in g]


@pytest.mark.parametrize("n", [2, 3, 8])
@pytest.mark.parametrize("knobs", [1, 3])
def test_it_is_its_formulas(knobs: int, n: int) -> None:
    """Slopes that last, turn and vanish in noise, over thirty rounds."""
    moved = 0
    for seed in range(6):
        rng = random.Random(seed)
        rule, twin = Normalised(), Twin(knobs)
        state = rule.init(knobs)
        slope, noise = [rng.choice([-1.0, 0.0, 0.3]) for _ in range(knobs)], rng.choice([0.0, 0.1, 1.0])
        for k in range(30):
            spreads = [0.1, 0.5, 2.0][:knobs]
            places = Balanced().places(n, knobs, seed, k)
            x = [[s * v for s, v in zip(spreads, row, strict=True)] for row in places]
            signals = [sum(a * v for a, v in zip(slope, row, strict=True)) + noise * rng.gauss(0, 1) for row in places]
            if max(signals) - min(signals) < 1e-9:
                signals[0] += 1.0
            update = rule.update(state, signals, x)
            moves, slopes = twin.update(signals, x)
            assert update.moves == pytest.approx(moves, rel=1e-6, abs=1e-9), (seed, k)
            assert update.deltas == pytest.approx(slopes, rel=1e-6, abs=1e-9), (seed, k)
            assert update.state.step == pytest.approx(twin.step)
            assert update.weights == [1 / n] * n
            state = update.state
            moved += any(moves)
            if rng.random() < 0.1:
                slope = [-v for v in slope]
    assert moved > 20 or (n == 2 and knobs == 3)


def test_its_state_says_slope_error_and_direction() -> None:
    x = [[-1.0], [-0.5], [0.5], [1.0]]
    rule, signals = Normalised(), [1.0, 0.5, -0.5, -1.0]
    update = rule.update(rule.init(1), signals, x)
    (slope,), (error,) = update.state.slope, update.state.error
    unit = math.sqrt(2.5 / 4)  # the signal's own deviation
    assert slope == pytest.approx(-1 / unit / (1 + 1e-3))
    assert error == pytest.approx(math.sqrt((4 - 2.5 / unit * -slope + 1.5) / (2 + 1.5) / (2.5 * (1 + 1e-3))))
    assert update.deltas == [pytest.approx(-slope * unit)]
    assert (update.state.sign, update.moves) == ([0.0], [0.0])  # three points could be luck
    for _ in range(3):
        update = rule.update(update.state, signals, x)
    assert update.state.sign == [1.0]
    assert update.moves[0] > 0


def test_without_spread_there_is_nothing_to_learn() -> None:
    update = Normalised().update(Normalised().init(2), [1.0, 2.0, 4.0], [[0.0, 0.0]] * 3)
    assert (update.moves, update.weights, update.deltas) == ([0.0, 0.0], [1 / 3] * 3, [0.0, 0.0])


@pytest.mark.parametrize(
    "arguments",
    [
        {"shortest": 0.0},
        {"shortest": 1.1},
        {"longest": 0.9},
        {"longest": math.inf},
        {"caution": -0.1},
        {"caution": math.nan},
        {"ridge": 0.0},
        {"ridge": math.inf},
    ],
    ids=str,
)
def test_bad_arguments_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=f"{next(iter(arguments))}"):
        Normalised(**arguments)


def test_the_edges_of_its_arguments_are_allowed() -> None:
    rule = Normalised(step=1.0, shortest=1.0, longest=1.0, caution=0.0, ridge=1e-9)
    assert rule.init(1).step == [1.0]


def test_one_degree_of_freedom_is_enough_to_move_and_less_is_not() -> None:
    threshold = 2.0 * (1 + 2.2)
    controller = Normalised()
    assert controller._direction(slope=3.0, error=0.03, freedom=1) == pytest.approx(-(1 - (threshold / 100) ** 2))
    assert controller._direction(slope=3.0, error=0.03, freedom=0.9) == 0.0
