"""Rounds: where they end, which of their steps are sampled, and their losses in blocks.

A *round* is some steps in a row: one step, then two each, later a fifth of the steps so far. A *block* is some steps of
a round with the mean of their losses.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from hdet.rule.constants import BLOCKS, DEFAULT, Constants


@lru_cache(maxsize=64)  # every step asks for the end of its round
def next_end(t: int, constants: Constants = DEFAULT) -> int:
    """The first end of a round after ``t`` steps. The first round is one step; one that begins at t has max(2, 0.2 t).

    >>> ends = [1]
    >>> while ends[-1] < 100:
    ...     ends.append(next_end(ends[-1]))
    >>> ends
    [1, 3, 5, 7, 9, 11, 13, 15, 18, 21, 25, 30, 36, 43, 51, 61, 73, 87, 104]
    """
    end = 1
    while end <= t:
        end += max(constants.min_round, int(constants.round_growth * end))
    return end


def is_sampled(step: int, length: int, constants: Constants = DEFAULT) -> bool:
    """Whether the gradient of step ``step`` of a round, counted from 0, is sampled: 8 of ``length`` at most.

    >>> [step for step in range(40) if is_sampled(step, 40)]
    [0, 5, 10, 15, 20, 25, 30, 35]
    """
    return step % max(1, math.ceil(length / constants.max_samples)) == 0


class Block(NamedTuple):
    """Some steps in a row."""

    mean: float
    """The mean of their finite losses; NaN: there was none."""
    steps: int


def blocks_of(losses: Sequence[float]) -> tuple[Block, ...]:
    """The losses of single steps in up to eight blocks of equal length: the means of those that are finite.

    >>> blocks_of([1.0, 2.0, math.nan] * 8)[:2]
    (Block(mean=1.5, steps=3), Block(mean=1.5, steps=3))
    """
    return merged([table_of(enumerate(losses), len(losses))], len(losses))


def table_of(losses: Iterable[tuple[int, float]], length: int) -> list[float]:
    """(step, loss) of a round of ``length`` steps, in eight blocks: as many numbers on every rank.

    For each block: whether it has a loss, and the mean of those that are finite.
    """
    count = min(max(length, 1), BLOCKS)
    blocks: list[list[float]] = [[] for _ in range(BLOCKS)]
    for step, loss in losses:
        blocks[min(((step + 1) * count - 1) // max(length, 1), count - 1)].append(loss)
    return [number for own in blocks for number in (float(bool(own)), mean_of(filter(math.isfinite, own)))]


def merged(tables: Sequence[Sequence[float]], length: int) -> tuple[Block, ...]:
    """The blocks of a round from the tables of all ranks: means over those that have a finite one.

    >>> merged([table_of([(0, 4.0), (1, 2.0), (2, math.nan)], 3), table_of([(0, 2.0), (2, math.inf)], 3)], length=3)
    (Block(mean=3.0, steps=1), Block(mean=2.0, steps=1), Block(mean=nan, steps=1))
    """
    count, blocks = min(max(length, 1), BLOCKS), []
    for k in range(count):
        given, means = ([table[2 * k + i] for table in tables] for i in (0, 1))
        if any(given):
            steps = (k + 1) * length // count - k * length // count
            blocks.append(Block(mean_of(filter(math.isfinite, means)), steps))
    return tuple(blocks)


def mean_of(values: Iterable[float]) -> float:
    """The mean; NaN if there are none."""
    found = list(values)
    try:
        return math.fsum(found) / len(found) if found else math.nan
    except (OverflowError, ValueError):  # losses near the largest float; or infinite ones of both signs
        return sum(value / len(found) for value in found)
