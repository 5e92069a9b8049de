"""A controller that really moves, and only where there is a signal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hdet.algorithm.controllers import Update
from hdet.errors import ArgumentError

__all__ = ["Normalised", "NormalisedState"]

_PRIOR = 1.5
"""Degrees of freedom with which the noise is believed to be all there is."""


class NormalisedState(NamedTuple):
    """Sums over this and recent rounds, forgotten geometrically, and the step of each knob. Sizes never change."""

    gram: list[float]
    """X'X of the places in units of the spread, row by row."""
    moment: list[float]
    """X'y of the centred signals."""
    squares: list[float]
    """[y'y, rows]: for the noise, and how much has been seen."""
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

    Each round adds :math:`X'X` and :math:`X'y` to sums that forget by :math:`\phi`: places in units of the spread and
    signals in units of their own deviation in that round, both centred, so that neither the loss's scale nor one wild
    round counts for more than others. The slopes solve :math:`(A + \kappa I) g = b`; their standard errors follow from
    the residual. With :math:`t = g / se(g)` knob g moves by

    .. math:: -\,sign(g)\; step\; \max(0,\, 1 - (c/t)^2) \times spread

    so that slopes which noise could have made (|t| < c) do not move it at all. The step grows while the direction stays
    and halves when it turns. More knobs than replicas need no special case: :math:`\phi` rises so that enough rounds
    are remembered.

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
        values = (self.shortest, self.step, self.longest)
        if not (all(math.isfinite(v) for v in values) and 0 < self.shortest <= self.step <= self.longest):
            raise ArgumentError(
                f"steps must satisfy 0 < shortest <= step <= longest, but got shortest={self.shortest!r}, "
                f"step={self.step!r}, longest={self.longest!r}; they are lengths in units of the spread"
            )
        if not (math.isfinite(self.caution) and self.caution >= 0):
            raise ArgumentError(
                f"caution must be a finite number, at least 0, but got caution={self.caution!r}; it is the |t| below "
                "which nothing moves, 2 by default"
            )
        if not (math.isfinite(self.ridge) and self.ridge > 0):
            raise ArgumentError(
                f"ridge must be a finite number above 0, but got ridge={self.ridge!r}; for instance 1e-3"
            )

    def init(self, knobs: int) -> NormalisedState:
        """Nothing seen yet."""
        zeros = [0.0] * knobs
        return NormalisedState([0.0] * (knobs * knobs), zeros, [0.0, 0.0], [self.step] * knobs, zeros, zeros, zeros)

    def update(self, state: NormalisedState, signals: Sequence[float], offsets: Sequence[Sequence[float]]) -> Update:
        """One round."""
        knobs = len(state.moment)
        spreads = [max(abs(v) for v in column) for column in zip(*offsets, strict=True)]
        x = _centred_columns([[_ratio(v, s) for v, s in zip(row, spreads, strict=True)] for row in offsets])
        y, unit = _standardised(signals)
        state = self._remember(state, x, y, self._memory(len(signals), knobs))
        slopes, errors = self._solve(state, knobs)
        freedom = state.squares[1] - knobs
        moves, steps, signs = [], [], []
        for g in range(knobs):
            direction = self._direction(slopes[g], errors[g], freedom)
            turned = direction * state.sign[g] < 0
            step = state.step[g]
            if direction:
                step = step / 2 if turned else step * 1.2 if state.sign[g] else step
                step = min(max(step, self.shortest), self.longest)
            moves.append(direction * step * spreads[g])
            steps.append(step)
            signs.append(math.copysign(1.0, direction) if direction else state.sign[g])
        state = state._replace(step=steps, slope=slopes, error=errors, sign=signs)
        return Update(state, moves, [1.0 / len(signals)] * len(signals), [-slope * unit for slope in slopes])

    def _memory(self, n: int, knobs: int) -> float:
        """How much of the sums survives a round: enough for eight degrees of freedom more than there are knobs."""
        return max(0.5, 1.0 - (n - 1) / (knobs + 8))

    def _remember(self, state: NormalisedState, x: list[list[float]], y: list[float], memory: float) -> NormalisedState:
        knobs = len(state.moment)
        gram = [
            memory * state.gram[g * knobs + h] + math.fsum(row[g] * row[h] for row in x)
            for g in range(knobs)
            for h in range(knobs)
        ]
        moment = [
            memory * state.moment[g] + math.fsum(row[g] * v for row, v in zip(x, y, strict=True)) for g in range(knobs)
        ]
        squares = [memory * state.squares[0] + math.fsum(v * v for v in y), memory * state.squares[1] + len(y) - 1]
        return state._replace(gram=gram, moment=moment, squares=squares)

    def _solve(self, state: NormalisedState, knobs: int) -> tuple[list[float], list[float]]:
        """Slopes and their standard errors."""
        kappa = self.ridge * math.fsum(state.gram[g * knobs + g] for g in range(knobs)) / knobs
        if kappa == 0.0:  # no spread, nothing to learn from
            return [0.0] * knobs, [math.inf] * knobs
        inverse = _inverse(
            [[state.gram[g * knobs + h] + (kappa if g == h else 0.0) for h in range(knobs)] for g in range(knobs)]
        )
        slopes = [math.fsum(a * b for a, b in zip(row, state.moment, strict=True)) for row in inverse]
        explained = math.fsum(g * b for g, b in zip(slopes, state.moment, strict=True))
        freedom = max(state.squares[1] - knobs, 0.0)
        # The signal has unit variance; a few pseudo-observations of that keep luck in a small sample from looking
        # like certainty (two replicas that agree in sign a few times have no residual at all).
        variance = (max(state.squares[0] - explained, 0.0) + _PRIOR) / (freedom + _PRIOR)
        return slopes, [math.sqrt(variance * inverse[g][g]) for g in range(knobs)]

    def _direction(self, slope: float, error: float, freedom: float) -> float:
        """Minus the slope's sign, shrunk: 0 where noise could have made it, near 1 where it could not."""
        if freedom < 1 or slope == 0 or not math.isfinite(error):
            return 0.0
        t = abs(slope) / error if error > 0 else math.inf
        threshold = self.caution * (1 + 2.2 / freedom)  # close to Student's quantile
        if t <= threshold:
            return 0.0
        return -math.copysign(1 - (threshold / t) ** 2, slope)


def _ratio(value: float, spread: float) -> float:
    return value / spread if spread > 0 else 0.0


def _centred(values: Sequence[float]) -> list[float]:
    mean = math.fsum(values) / len(values)
    return [v - mean for v in values]


def _standardised(signals: Sequence[float]) -> tuple[list[float], float]:
    """Centred signals of unit deviation, and the deviation. All zero if they are equal; no finite signal overflows."""
    half = [s / 2 for s in signals]
    low, high = min(half), max(half)
    span = high - low
    if span == 0:
        return [0.0] * len(half), 0.0
    y = _centred([(h - low) / span for h in half])
    deviation = math.sqrt(math.fsum(v * v for v in y) / len(y))
    return [v / deviation for v in y], min(2 * deviation * span, 1e300)


def _centred_columns(rows: list[list[float]]) -> list[list[float]]:
    columns = [_centred(column) for column in zip(*rows, strict=True)]
    return [list(row) for row in zip(*columns, strict=True)]


def _inverse(matrix: list[list[float]]) -> list[list[float]]:
    """Gauss-Jordan with pivoting, in plain floats: every replica gets the same bits, whatever its BLAS."""
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
