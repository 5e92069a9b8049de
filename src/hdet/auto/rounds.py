"""The rounds of a search: they grow with the run."""

from __future__ import annotations

import math
from bisect import bisect_right
from functools import lru_cache

from hdet.auto.constants import DEFAULT, Constants

__all__ = ["is_sampled", "next_end", "round_of"]


def next_end(t: int, constants: Constants = DEFAULT) -> int:
    """The first end of a round after ``t`` steps. The first round is one step; one that begins at t has max(2, 0.2 t).

    >>> ends = [1]
    >>> while ends[-1] < 100:
    ...     ends.append(next_end(ends[-1]))
    >>> ends
    [1, 3, 5, 7, 9, 11, 13, 15, 18, 21, 25, 30, 36, 43, 51, 61, 73, 87, 104]
    """
    ends = _ends(1 << int(max(t, 1)).bit_length(), constants)
    return ends[bisect_right(ends, t)]


def round_of(t: int, constants: Constants = DEFAULT) -> int:
    """How many rounds have ended after ``t`` steps."""
    return bisect_right(_ends(1 << int(max(t, 1)).bit_length(), constants), t)


def is_sampled(step: int, length: int, constants: Constants = DEFAULT) -> bool:
    """Whether the gradient of step ``step`` of a round of so many, counted from 0, is sampled: 8 at most.

    >>> [step for step in range(40) if is_sampled(step, 40)]
    [0, 5, 10, 15, 20, 25, 30, 35]
    """
    return step % max(1, math.ceil(length / constants.sampled)) == 0


@lru_cache(maxsize=64)
def _ends(beyond: int, constants: Constants) -> tuple[int, ...]:
    ends = [1]
    while ends[-1] <= beyond:
        ends.append(ends[-1] + max(constants.short, int(constants.growing * ends[-1])))
    return tuple(ends)
