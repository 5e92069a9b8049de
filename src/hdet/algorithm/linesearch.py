"""The controller of the probed fan-out: where is the minimum on the line that the round's displacement spans?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hdet.algorithm.auto import constants as c
from hdet.algorithm.controller import Update, is_finite
from hdet.algorithm.plain_algebra import centred, centred_columns, dot, inverse, standardised, times
from hdet.errors import ArgumentError

__all__ = ["LineSearch", "LineSearchState"]

_HUGE = 1e100
"""Slopes beyond this count as this: their squares must stay numbers."""


class LineSearchState(NamedTuple):
    """What earlier rounds said. Lists with one entry per knob, except the two counters."""

    ups: list[int]
    """[rounds in a row with the minimum well above the base, and well below]"""
    rounds: list[int]
    """[rounds seen, those in which the knobs stood apart]"""
    deviation: list[float]
    """log of each knob's own factor on the common move."""
    mean: list[float]
    """Moving mean of each knob's slope less the mean of all."""
    square: list[float]
    """Moving mean of its square."""
    slope: list[float]
    """-dL/dlog(value) of the last round; above 0, a higher value is better."""
    error: list[float]
    """Its deviation over recent rounds."""
    slope_mean: list[float]
    slope_square: list[float]


@dataclass(frozen=True)
class LineSearch:
    r"""Moves the common rate only where several rounds agree, and each group only where its slope exceeds its noise.

    Offsets are :math:`\rho - 1` of points on the line anchor + rho D. With one knob a
    parabola through the points has its minimum at :math:`\rho^*`; with several, least squares on all of them gives
    slopes, and their sum stands for the common direction (then :math:`\rho^*` only says up or down).

    A round counts if its slope is beyond three standard errors of the fit. ``patience`` rounds in a row with
    :math:`\rho^* >` ``up`` multiply the base by e^``step``; one more than that with :math:`\rho^* <` ``down`` divide it
    by that. Downwards it is slow on purpose: the mean of a round is nearer to the minimum than the noisy anchor, so
    that :math:`\rho^*` lies a little below 1 at every rate that does no harm.

    Args:
        step: length of a move, in log.
        up, down: where rho* must lie.
        patience: rounds in a row.

    >>> rule, state = LineSearch(), LineSearch().init(1)
    >>> rho = [0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3]
    >>> for _ in range(2):  # the minimum is at 1.8
    ...     update = rule.update(state, [(r - 1.8) ** 2 for r in rho], [[r - 1] for r in rho])
    ...     state = update.state
    >>> [round(math.log1p(move), 12) for move in update.moves]
    [0.3]
    """

    step: float = c.STEP
    up: float = c.UP
    down: float = c.DOWN
    patience: int = c.PATIENCE

    def __post_init__(self) -> None:
        if not (is_finite(self.step) and self.step > 0):
            raise ArgumentError(f"step must be a finite number above 0, but got step={self.step!r}; for instance 0.3")
        if not (is_finite(self.up) and is_finite(self.down) and 0 < self.down < 1 < self.up):
            raise ArgumentError(
                f"up and down must satisfy 0 < down < 1 < up, but got up={self.up!r}, down={self.down!r}; they bound "
                "the minimum's place relative to the base"
            )
        if not (isinstance(self.patience, int) and self.patience >= 1):
            raise ArgumentError(f"patience must be an integer, at least 1, but got patience={self.patience!r}")

    def init(self, knobs: int) -> LineSearchState:
        """Nothing seen yet."""
        zeros = [0.0] * knobs
        return LineSearchState([0, 0], [0, 0], zeros, zeros, zeros, zeros, zeros, zeros, zeros)

    def update(self, state: LineSearchState, signals: Sequence[float], offsets: Sequence[Sequence[float]]) -> Update:
        """One round."""
        knobs = len(state.deviation)
        y, unit = standardised(signals)
        even = [1.0 / len(y)] * len(y)
        if unit == 0 or not any(any(row) for row in offsets):
            return Update(state, [0.0] * knobs, even, [0.0] * knobs)
        common = all(len(set(row)) == 1 for row in offsets)
        slopes, place = self._on_a_line(y, [row[0] for row in offsets]) if common else self._on_all(y, offsets)
        per_knob = [slopes[0] / knobs] * knobs if common else slopes
        state = _remembered(state, [min(max(-slope * unit, -_HUGE), _HUGE) for slope in per_knob], apart=not common)
        silent = not common and place == 0.0  # knobs that stand apart say little about where all of them should go
        move, ups = (
            (0.0, state.ups) if silent else self._common_move(state.ups, place, enough=len(y) >= c.ENOUGH_POINTS)
        )
        deviation, own = (state.deviation, [0.0] * knobs) if common else self._deviated(state)
        moves = [math.expm1(move + change) for change in own]  # relative, as the contract has it
        return Update(state._replace(ups=ups, deviation=deviation), moves, even, list(state.slope))

    def verdicts(self, state: LineSearchState) -> list[str]:
        """In words, per knob: which way the last rounds point, if anywhere."""
        if state.ups[0] or state.ups[1]:
            return ["up" if state.ups[0] else "down"] * len(state.slope)
        return ["no signal"] * len(state.slope)

    def _on_a_line(self, y: list[float], x: list[float]) -> tuple[list[float], float]:
        """Slope at the base of a parabola through the points, and log rho* of its minimum; 0 where it means nothing."""
        rows = [[v, v * v] for v in x]
        slope, bend, sure = _fit(rows, y)
        if not sure:
            return [slope], 0.0
        if bend <= 1e-9 * abs(slope):
            return [slope], math.copysign(math.log(c.FARTHEST), -slope)
        return [slope], math.log(min(max(1 - slope / (2 * bend), 1 / c.FARTHEST), c.FARTHEST))

    def _on_all(self, y: list[float], offsets: Sequence[Sequence[float]]) -> tuple[list[float], float]:
        """Slopes of all knobs, and which way their sum points from the middle of the points."""
        x = centred_columns([list(row) for row in offsets])
        knobs = len(x[0])
        gram = [[dot([r[g] for r in x], [r[h] for r in x]) for h in range(knobs)] for g in range(knobs)]
        ridge = c.RIDGE * math.fsum(gram[g][g] for g in range(knobs)) / knobs
        covariance = inverse([[v + ridge * (g == h) for h, v in enumerate(row)] for g, row in enumerate(gram)])
        slopes = times(covariance, [dot([r[g] for r in x], y) for g in range(knobs)])
        residual = math.fsum((v - dot(row, slopes)) ** 2 for row, v in zip(x, y, strict=True))
        freedom = len(y) - 1 - knobs
        total = math.fsum(slopes)
        error = math.sqrt(residual / max(freedom, 1) * math.fsum(math.fsum(row) for row in covariance))
        if freedom < 2 or abs(total) <= c.SURE * error:
            return slopes, 0.0
        centre = max(1 + math.fsum(math.fsum(row) for row in offsets) / (len(offsets) * knobs), 0.01)
        return slopes, math.log(centre * (1.01 * self.up if total < 0 else self.down / 1.01))

    def _common_move(self, ups: list[int], place: float, enough: bool) -> tuple[float, list[int]]:
        """The move of all knobs, and the counters after it. With few points: twice the patience."""
        patience = self.patience if enough else 2 * self.patience
        above = ups[0] + 1 if place > math.log(self.up) else 0
        below = ups[1] + 1 if place < math.log(self.down) else 0
        if above >= patience:
            return self.step, [patience - 1, 0]
        if below >= patience + 1:
            return -self.step, [0, patience]
        return 0.0, [above, below]

    def _deviated(self, state: LineSearchState) -> tuple[list[float], list[float]]:
        """Each knob's own factor, and how it changed: half a step at most, and nothing that noise could have made."""
        k = state.rounds[1]
        weight = math.sqrt((1 - c.FAST) / (1 + c.FAST))  # deviation of the moving mean of pure noise, per its own
        wanted = []
        for mean, square, was in zip(state.mean, state.square, state.deviation, strict=True):
            noise = math.sqrt(square / (1 - c.SLOW**k)) * max(weight, 1 / math.sqrt(k))
            t = mean / (1 - c.FAST**k) / noise if noise > 0 else 0.0
            change = math.copysign(max(0.0, 1 - (c.OWN_CAUTION / t) ** 2), t) * self.step * c.OWN_STEP if t else 0.0
            wanted.append(min(max(was + change, -c.WIDEST), c.WIDEST))
        deviation = centred(wanted)
        return deviation, [new - was for new, was in zip(deviation, state.deviation, strict=True)]


def _fit(rows: list[list[float]], y: list[float]) -> tuple[float, float, bool]:
    """Least squares of y on x and x^2: slope, bend, and whether the points lie close enough to the parabola."""
    x = centred_columns(rows)
    gram = [[dot([r[g] for r in x], [r[h] for r in x]) for h in range(2)] for g in range(2)]
    if gram[0][0] * gram[1][1] - gram[0][1] ** 2 <= 1e-12 * gram[0][0] * gram[1][1]:
        return 0.0, 0.0, False
    covariance = inverse(gram)
    slope, bend = times(covariance, [dot([r[g] for r in x], y) for g in range(2)])
    residual = math.fsum((v - slope * row[0] - bend * row[1]) ** 2 for row, v in zip(x, y, strict=True))
    error = math.sqrt((residual / max(len(y) - 3, 1) + 1e-12) * covariance[0][0])
    return slope, bend, abs(slope) > c.SURE * error


def _remembered(state: LineSearchState, slopes: list[float], apart: bool) -> LineSearchState:
    """This round's slopes, with what they say about their noise and, standing apart, about each knob and the others."""
    k = state.rounds[0] + 1
    mean, square = state.mean, state.square
    if apart:
        own = centred(slopes)
        mean = [c.FAST * m + (1 - c.FAST) * v for m, v in zip(mean, own, strict=True)]
        square = [c.SLOW * s + (1 - c.SLOW) * v * v for s, v in zip(square, own, strict=True)]
    slope_mean = [c.FAST * m + (1 - c.FAST) * v for m, v in zip(state.slope_mean, slopes, strict=True)]
    slope_square = [c.FAST * s + (1 - c.FAST) * v * v for s, v in zip(state.slope_square, slopes, strict=True)]
    kept = 1 - c.FAST**k
    error = [math.sqrt(max(s / kept - (m / kept) ** 2, 0.0)) for m, s in zip(slope_mean, slope_square, strict=True)]
    return state._replace(
        rounds=[k, state.rounds[1] + int(apart)],
        mean=mean,
        square=square,
        slope=slopes,
        error=error,
        slope_mean=slope_mean,
        slope_square=slope_square,
    )
