"""The line search's slow twin: the fit, the rows and the groups' own factors, in the letters of docs/how-it-works.md.

Nothing is shared with :mod:`hdet.algorithm.linesearch` but the constants. Least squares are torch's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from hdet.algorithm.auto import constants as c

__all__ = ["Rows", "line_search"]


@dataclass(frozen=True)
class Rows:
    """What earlier rounds said. The lists have one number per parameter group."""

    above: int = 0
    """Rounds in a row with rho* > up."""
    below: int = 0
    """Rounds in a row with rho* < down."""
    apart: int = 0
    """Rounds so far in which each group had its own rho."""
    mean: list[float] = field(default_factory=list)
    """Moving mean of a group's slope less the mean of all groups."""
    square: list[float] = field(default_factory=list)
    """Moving mean of its square."""
    own: list[float] = field(default_factory=list)
    """log of a group's factor on the common rate."""


def line_search(rows: Rows, losses: Sequence[float], rho: list[list[float]]) -> tuple[Rows, list[float]]:
    """One round: the rows after it, and by how much log m moves, per group.

    Args:
        rows: before it.
        losses: of the points; two of them at least are finite.
        rho: ``rho[i][g]``, the multiple of group g's displacement at point i.
    """
    G = len(rho[0])
    L = _without_infinities(losses)
    unit = float(L.std(correction=0))
    if float(L.max() - L.min()) == 0:
        return rows, [0.0] * G
    y = (L - L.mean()) / unit
    u = torch.tensor(rho, dtype=torch.float64) - 1
    if all(len(set(row)) == 1 for row in rho):
        return _in_a_row(rows, _minimum(y, u[:, 0]), G, len(L))
    slopes, towards = _slopes(y, u)
    if towards != 0:
        rows, moves = _in_a_row(rows, c.FARTHEST**towards, G, len(L))
    else:
        moves = [0.0] * G  # groups that stand apart say little about all of them: the row stays as it is
    rows, own = _own_factors(rows, [-unit * b for b in slopes])
    return rows, [move + change for move, change in zip(moves, own, strict=True)]


def _without_infinities(losses: Sequence[float]) -> Tensor:
    """A loss that is no number is worse than the worst by the range of the others (by its size, if they are equal)."""
    finite = [x for x in losses if math.isfinite(x)]
    worst, span = max(finite), max(finite) - min(finite)
    bad = worst + (span if span > 0 else max(1.0, abs(worst)))
    return torch.tensor([x if math.isfinite(x) else bad for x in losses], dtype=torch.float64)


def _minimum(y: Tensor, u: Tensor) -> float:
    """rho* of y = a + b u + e u^2; 1 where b is within its error: the round does not count."""
    X = torch.stack([torch.ones_like(u), u, u * u], dim=1)
    a, b, e = (float(v) for v in torch.linalg.lstsq(X, y[:, None]).solution[:, 0])
    residual = float((y - a - b * u - e * u * u).square().sum())
    variance = residual / max(len(y) - 3, 1) + 1e-12  # the last number is that of rounding
    error = math.sqrt(variance * float(torch.linalg.inv(X.T @ X)[1, 1]))
    if not abs(b) > c.SURE * error:
        return 1.0
    if e <= 1e-9 * abs(b):
        return c.FARTHEST if b < 0 else 1 / c.FARTHEST
    return min(max(1 - b / (2 * e), 1 / c.FARTHEST), c.FARTHEST)


def _slopes(y: Tensor, u: Tensor) -> tuple[list[float], int]:
    """Each group's slope and, where their sum is beyond its error, the way it points: 1 is up, -1 is down."""
    n, G = u.shape
    X = u - u.mean(dim=0)
    gram = X.T @ X
    C = torch.linalg.inv(gram + c.RIDGE * gram.trace() / G * torch.eye(G, dtype=torch.float64))
    b = C @ (X.T @ y)
    freedom = n - 1 - G
    error = math.sqrt(float((y - X @ b).square().sum()) / max(freedom, 1) * float(C.sum()))
    total = float(b.sum())
    certain = freedom >= 2 and abs(total) > c.SURE * error
    return b.tolist(), (1 if total < 0 else -1) if certain else 0


def _in_a_row(rows: Rows, rho: float, G: int, points: int) -> tuple[Rows, list[float]]:
    """``patience`` rounds in a row move up, one more than that down; every further round in a row moves once more."""
    patience = c.PATIENCE if points >= c.ENOUGH_POINTS else 2 * c.PATIENCE
    above = rows.above + 1 if rho > c.UP else 0
    below = rows.below + 1 if rho < c.DOWN else 0
    if above >= patience:
        return replace(rows, above=patience - 1, below=0), [c.STEP] * G
    if below >= patience + 1:
        return replace(rows, above=0, below=patience), [-c.STEP] * G
    return replace(rows, above=above, below=below), [0.0] * G


def _own_factors(rows: Rows, slopes: list[float]) -> tuple[Rows, list[float]]:
    """What each group's slope has that the others' have not, as far as it outlives its noise: t standard errors."""
    G, K = len(slopes), rows.apart + 1
    v = [s - math.fsum(slopes) / G for s in slopes]
    mean = [c.FAST * a + (1 - c.FAST) * x for a, x in zip(rows.mean or [0.0] * G, v, strict=True)]
    square = [c.SLOW * a + (1 - c.SLOW) * x * x for a, x in zip(rows.square or [0.0] * G, v, strict=True)]
    before = rows.own or [0.0] * G
    after = []
    for g in range(G):
        deviation = math.sqrt(square[g] / (1 - c.SLOW**K))
        noise = deviation * max(math.sqrt((1 - c.FAST) / (1 + c.FAST)), math.sqrt(1 / K))  # of the mean
        t = mean[g] / (1 - c.FAST**K) / noise if noise > 0 else 0.0
        shrunk = max(0.0, 1 - (c.OWN_CAUTION / t) ** 2) if t != 0 else 0.0
        change = math.copysign(shrunk, t) * c.OWN_STEP * c.STEP
        after.append(min(max(before[g] + change, -c.WIDEST), c.WIDEST))
    middle = math.fsum(after) / G
    own = [a - middle for a in after]
    moved = [a - b for a, b in zip(own, before, strict=True)]
    return replace(rows, apart=K, mean=mean, square=square, own=own), moved
