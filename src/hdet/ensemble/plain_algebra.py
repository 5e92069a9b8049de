"""Small least squares in plain floats: every replica gets the same bits, whatever its BLAS."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["centred", "centred_columns", "dot", "inverse", "standardised", "times"]


def times(matrix: list[list[float]], vector: Sequence[float]) -> list[float]:
    """Matrix times vector."""
    return [dot(row, vector) for row in matrix]


def dot(a: Sequence[float], b: Sequence[float]) -> float:
    """``fsum``: does not depend on the order of the replicas, to the last bit."""
    return math.fsum(u * v for u, v in zip(a, b, strict=True))


def centred(values: Sequence[float]) -> list[float]:
    """Less their mean."""
    mean = math.fsum(values) / len(values)
    return [v - mean for v in values]


def centred_columns(rows: list[list[float]]) -> list[list[float]]:
    """Each column less its mean."""
    columns = [centred(column) for column in zip(*rows, strict=True)]
    return [list(row) for row in zip(*columns, strict=True)]


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
    """Gauss-Jordan with pivoting."""
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
