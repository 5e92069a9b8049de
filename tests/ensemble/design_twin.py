"""The slow twin of the designs, in plain letters: hashes of text, places as fractions, every candidate in full."""

from __future__ import annotations

from fractions import Fraction
from hashlib import sha256

__all__ = ["balanced", "pi"]


def pi(seed: int, k: int, g: int, N: int) -> list[int]:
    """The permutation of knob g in round k: replicas ranked by a hash."""
    if k == 0:
        return list(range(N))
    h = {r: sha256(f"{seed}:{k}:{g}:{r}".encode()).hexdigest() for r in range(N)}
    return sorted(h, key=lambda r: h[r])


def balanced(N: int, G: int, seed: int, k: int) -> list[list[Fraction]]:
    """x[r][g] of the balanced design: knob g takes the candidate with the least overlap with the knobs before it."""
    delta = max(Fraction(N - 1, 2), Fraction(1, 2))
    x = [(r - Fraction(N - 1, 2)) / delta for r in range(N)]
    columns: list[list[Fraction]] = []
    for g in range(G):
        best = None
        for column in candidates(x, G, g, seed, k):
            overlap = sum(sum(a * b for a, b in zip(column, other, strict=True)) ** 2 for other in columns)
            if best is None or overlap < best[0]:
                best = overlap, column
        assert best is not None
        columns.append(best[1])
    return [[column[r] for column in columns] for r in range(N)]


def candidates(x: list[Fraction], G: int, g: int, seed: int, k: int) -> list[list[Fraction]]:
    """What knob g chooses from: hashed permutations, or from 100 replicas on rotations of that of knob 0."""
    N = len(x)
    if N >= 100 and g < N // 2:
        first = [x[i] for i in pi(seed, k + 1, 0, N)]
        D = min(32 + 2 * G, N // 2) if g > 0 else 1
        return [[first[(r + d) % N] for r in range(N)] for d in range(D)]
    C = 24 if N < 100 else 1
    while C > 1 and (C * N * G > 2048 or not 0 < g < N - 1):
        C -= 1
    return [[x[i] for i in pi(seed, k + 1, g + c * G, N)] for c in range(C)]
