"""A controller that moves a knob only if the slope of the signal exceeds its noise.

Its small least squares are in plain floats: every replica gets the same bits, whatever its BLAS.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from hdet.checks import is_finite, must_be
from hdet.ensemble.controller import Update, centred, dot

PRIOR = 1.5
"""Degrees of freedom of the prior that the signal is pure noise."""
REST = 0.95
"""How much of the evidence about a slope survives a round in which its knob stands still."""
NOISE = 0.9
"""How much of what is known about the noise survives a round."""


def times(matrix: list[list[float]], vector: Sequence[float]) -> list[float]:
    """The product of a matrix and a vector."""
    return [dot(row, vector) for row in matrix]


def standardised(signals: Sequence[float]) -> tuple[list[float], float]:
    """Centred signals of unit deviation, and the deviation. All zero if they are equal; no finite signal overflows."""
    half = [s / 2 for s in signals]
    low, high = min(half), max(half)
    span = high - low
    if span == 0:
        return [0.0] * len(half), 0.0
    y = centred([(h - low) / span for h in half])
    deviation = math.sqrt(math.fsum(v * v for v in y) / len(y))
    return [v / deviation for v in y], min(2 * deviation * span, 1e300)


def inverse(matrix: list[list[float]]) -> list[list[float]]:
    """The inverse of a matrix, by Gauss-Jordan elimination with pivoting."""
    n = len(matrix)
    rows = [list(row) + [float(i == j) for j in range(n)] for i, row in enumerate(matrix)]
    for i in range(n):
        pivot = max(range(i, n), key=lambda r: abs(rows[r][i]))
        rows[i], rows[pivot] = rows[pivot], rows[i]
        head = rows[i][i]
        rows[i] = [v / head for v in rows[i]]
        for r in range(n):
            factor = rows[r][i]
            if r != i and factor:
                rows[r] = [v - factor * w for v, w in zip(rows[r], rows[i], strict=True)]
    return [row[n:] for row in rows]


class NormalisedState(NamedTuple):
    """What this and earlier rounds say about the slopes, and the step of each knob. Sizes never change."""

    gram: list[float]
    """A = X'X of the places in units of the spread, row by row, without what was forgotten."""
    moment: list[float]
    """b = X'y of the standardised signals, without what was forgotten."""
    squares: list[float]
    """[y'y, rows]: the first is for the noise, the second says how much has been seen."""
    step: list[float]
    """Per knob: the longest move, in units of the spread."""
    slope: list[float]
    """Per knob: slope of the standardised signal, per spread."""
    error: list[float]
    """Per knob: its standard error."""
    sign: list[float]
    """Per knob: direction of the last move, 0 before the first."""


@dataclass(frozen=True)
class Normalised:
    r"""Least squares of the signal on all knobs at once; moves of a bounded length, shrunk by the slope's own error.

    Each round adds :math:`X'X` and :math:`X'y` to sums A and b: places in units of the spread and signals in units of
    their own deviation in that round, both centred, so that neither the loss's scale nor one wild round counts for more
    than others. The slopes solve :math:`(A + \kappa I) g = b`; their standard errors follow from the residual. With
    :math:`t = g / se(g)` knob g moves by

    .. math:: -\,sign(g)\; step\; \max(0,\, 1 - (c/t)^2) \times spread

    so that slopes which noise could have made (|t| < c) do not move it at all. The step grows while the direction stays
    and halves when it turns.

    What is known of a slope is forgotten as its knob moves: after the round the variance of slope g is divided by
    :math:`0.95\, e^{-|move|/spread}`. A knob that stands still gathers evidence over rounds, so a weak slope among
    strong ones is found in the end, and more knobs than replicas need no special case.

    Args:
        step: first length of a move, in spreads.
        shortest, longest: its bounds.
        caution: c for many degrees of freedom; it is raised for few.
        ridge: :math:`\kappa` relative to the mean of A's diagonal.

    >>> rule = Normalised()
    >>> x = [[-0.3], [-0.2], [-0.1], [0.1], [0.2], [0.3]]
    >>> update = rule.update(rule.init(1), [1.3, 1.21, 1.1, 0.9, 0.82, 0.7], x)  # the signal falls with the knob
    >>> update.moves[0] > 0
    True
    >>> rule.update(rule.init(1), [1.0, 0.9, 1.1, 1.0, 0.9, 1.1], x).moves  # nothing that noise could not have made
    [0.0]
    """

    step: float = 1.0
    shortest: float = 0.2
    longest: float = 1.5
    caution: float = 2.0
    ridge: float = 1e-3

    def __post_init__(self) -> None:
        steps = (self.shortest, self.step, self.longest)
        fits = all(map(is_finite, steps)) and 0 < self.shortest <= self.step <= self.longest
        must_be("such that 0 < shortest <= step <= longest", fits, "they are lengths in spreads", step=steps)
        fits = is_finite(self.caution) and self.caution >= 0
        must_be("a finite number, at least 0", fits, "slopes with a smaller |t| move nothing", caution=self.caution)
        fits = is_finite(self.ridge) and self.ridge > 0
        must_be("a finite number above 0", fits, "for instance 1e-3", ridge=self.ridge)

    def init(self, knobs: int) -> NormalisedState:
        """The state before the first round."""
        zeros = [0.0] * knobs
        return NormalisedState([0.0] * (knobs * knobs), zeros, [0.0, 0.0], [self.step] * knobs, zeros, zeros, zeros)

    def update(self, state: NormalisedState, signals: Sequence[float], offsets: Sequence[Sequence[float]]) -> Update:
        """Learn from one round, and move the knobs whose slopes are known."""
        knobs = len(state.moment)
        columns = list(zip(*offsets, strict=True))
        spreads = [max(map(abs, column)) for column in columns]
        x = [centred([v / s if s else 0.0 for v in column]) for column, s in zip(columns, spreads, strict=True)]
        y, unit = standardised(signals)
        state = _remembered(state, x, y)
        covariance = self._covariance(state)
        if covariance is None:  # no spread, nothing to learn from
            return Update(state, [0.0] * knobs, [1.0 / len(y)] * len(y), [0.0] * knobs)
        slopes = times(covariance, state.moment)
        errors = self._errors(state, covariance, slopes)
        freedom = state.squares[1] - knobs
        directions = [self._direction(slope, error, freedom) for slope, error in zip(slopes, errors, strict=True)]
        steps = [self._next_step(*row) for row in zip(state.step, state.sign, directions, strict=True)]
        lengths = [direction * step for direction, step in zip(directions, steps, strict=True)]  # in spreads
        state = _forgotten(state, covariance, slopes, [abs(length) for length in lengths])
        signs = [math.copysign(1.0, one) if one else sign for one, sign in zip(lengths, state.sign, strict=True)]
        state = state._replace(step=steps, slope=slopes, error=errors, sign=signs)
        moves = [length * spread for length, spread in zip(lengths, spreads, strict=True)]
        return Update(state, moves, [1.0 / len(y)] * len(y), [-slope * unit for slope in slopes])

    def _next_step(self, step: float, sign: float, direction: float) -> float:
        """The step grows while the direction stays, halves if it turns, and stays if nothing moves or has moved."""
        if direction == 0 or sign == 0:
            return step
        return min(max(step / 2 if direction * sign < 0 else step * 1.2, self.shortest), self.longest)

    def _covariance(self, state: NormalisedState) -> list[list[float]] | None:
        """The inverse of A + kappa I; None if A is zero."""
        gram, knobs = state.gram, len(state.moment)
        kappa = self.ridge * math.fsum(gram[g * knobs + g] for g in range(knobs)) / knobs
        if kappa == 0.0:
            return None
        return inverse([[gram[g * knobs + h] + (kappa if g == h else 0.0) for h in range(knobs)] for g in range(knobs)])

    def _errors(self, state: NormalisedState, covariance: list[list[float]], slopes: list[float]) -> list[float]:
        """Standard errors of the slopes.

        The signal has unit variance; a few pseudo-observations of that keep luck in a small sample from looking like
        certainty (two replicas that agree in sign a few times have no residual at all).
        """
        residual = max(state.squares[0] - dot(slopes, state.moment), 0.0)
        variance = (residual + PRIOR) / (max(state.squares[1] - len(slopes), 0.0) + PRIOR)
        return [math.sqrt(variance * covariance[g][g]) for g in range(len(slopes))]

    def _direction(self, slope: float, error: float, freedom: float) -> float:
        """Minus the slope's sign times a factor: 0 if noise could have made the slope, near 1 if it could not."""
        if freedom < 1 or slope == 0 or not math.isfinite(error):
            return 0.0
        t = abs(slope) / error if error > 0 else math.inf
        threshold = self.caution * (1 + 2.2 / freedom)  # close to Student's quantile
        if t <= threshold:
            return 0.0
        return -math.copysign(1 - (threshold / t) ** 2, slope)


def _remembered(state: NormalisedState, x: list[list[float]], y: list[float]) -> NormalisedState:
    """Add a round to the sums. ``x``: a column of places for each knob."""
    gram = [old + dot(*pair) for old, pair in zip(state.gram, product(x, x), strict=True)]
    moment = [old + dot(column, y) for old, column in zip(state.moment, x, strict=True)]
    squares = [state.squares[0] + math.fsum(v * v for v in y), state.squares[1] + len(y) - 1]
    return state._replace(gram=gram, moment=moment, squares=squares)


def _forgotten(
    state: NormalisedState, covariance: list[list[float]], slopes: list[float], lengths: list[float]
) -> NormalisedState:
    """Keep the slopes, and widen their errors: the further a knob has moved, the more. Forget the noise slowly."""
    knobs = len(slopes)
    wider = [
        [value / (REST * math.exp(-lengths[g])) if g == h else value for h, value in enumerate(row)]
        for g, row in enumerate(covariance)
    ]
    gram = inverse(wider)
    moment = times(gram, slopes)
    residual = max(state.squares[0] - dot(slopes, state.moment), 0.0)
    freedom = state.squares[1] - knobs
    rows = NOISE * freedom + knobs if freedom > 0 else state.squares[1]
    squares = [NOISE * residual + dot(slopes, moment), rows]
    return state._replace(gram=[value for row in gram for value in row], moment=moment, squares=squares)
