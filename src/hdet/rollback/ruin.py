r"""Has training been ruined? A judge of training losses, round by round. Pure.

The *level* of a round is the lower median of its losses, in up to eight blocks of steps: single batches far above the
others do not count. A round is ruined if its level is above that of the rounds before by more than a part of all that
was gained so far, *and* by more than single batches differ:

.. math:: \text{level} - \text{level before} > \max(\text{LOST} \cdot \text{gain},\ \text{NOISE} \cdot \sigma).

Gain and noise are differences of losses. So a constant added to the loss, its unit and its sign make no difference.

Losses cannot tell ruined weights from harder data. After going back they can: data that are harder are so for the
earlier weights, too. Then the verdict was wrong, and is taken back (:attr:`Verdict.ACQUITTED`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

__all__ = ["BLOCKS", "Block", "Course", "Verdict", "judge"]

BLOCKS = 8
"""Blocks of a round, at most."""
LOST = 0.3
"""A ruined round has lost more than this part of the gain ..."""
LOST_FALLING = 1.0
"""... and while the schedule falls more than all of it: by then an explosion alone may undo what was trained."""
NOISE = 16.0
"""How many noise deviations of a single step a ruined round is above those before: harder data may be ten above."""
FEWEST = 4
"""Blocks that a level is made of, at least; where a round has fewer, those of earlier ones are added."""
REMEMBERED = 48
"""Differences between neighbouring blocks that the noise is estimated from, at most."""


class Block(NamedTuple):
    """Some steps in a row."""

    mean: float
    """Of their finite losses; NaN: there was none."""
    steps: int


class Verdict(IntEnum):
    """What is to be thought of a round."""

    FINE = 0
    RUINED = 1
    """Its weights are no good: go back."""
    ACQUITTED = 2
    """The round before was called ruined, and going back did not help: it was the data."""


class Course(NamedTuple):
    """What is remembered of the losses so far; plain numbers."""

    lowest: float = math.nan
    """The lowest level."""
    gain: float = 0.0
    """By how much the level has fallen in all."""
    before: tuple[float, ...] = ()
    """Levels of the last two rounds that were fine."""
    recent: tuple[Block, ...] = ()
    """The last blocks, for levels of short rounds."""
    differences: tuple[float, ...] = ()
    """Between neighbouring blocks, as those of single steps would be."""
    dark: int = 0
    """Steps without a finite loss, in a row."""
    accused: float = math.nan
    """The level of a round that was called ruined, until the next one has shown whether it was."""

    @property
    def noise(self) -> float:
        """The standard deviation of a single step's loss; infinite as long as nothing is known of it."""
        ordered = sorted(self.differences)
        if len(ordered) < 2 * FEWEST:
            return math.inf
        usual = ordered[(3 * len(ordered)) // 4] / 1.63  # of normal numbers: three quarters differ by less
        steps = [d for d in ordered if d > 0][1:2] or [0.0]  # losses of few bits: the step between neighbours
        return max(usual, steps[0] / 2) * (1 + 2 / math.sqrt(len(ordered)))  # few differences may be small by chance


def judge(course: Course, blocks: Sequence[Block], *, falling: bool) -> tuple[Course, Verdict]:
    """One round.

    Args:
        course: what is remembered.
        blocks: the round's losses; none where no loss was given.
        falling: whether the schedule falls.

    >>> course = Course()
    >>> for loss in (5.0, 4.1, 3.0, 2.2, 1.9, 2.1):
    ...     course, verdict = judge(course, [Block(loss, 1), Block(loss + 0.1, 1)], falling=False)
    >>> judge(course, [Block(2.3, 1), Block(2.2, 1)], falling=False)[1].name
    'FINE'
    >>> judge(course, [Block(40.0, 1), Block(50.0, 1)] * 2, falling=False)[1].name
    'RUINED'
    """
    known = tuple(block for block in blocks if math.isfinite(block.mean))
    dark = _dark(course.dark, blocks)
    if dark >= FEWEST:
        return course._replace(recent=(), dark=0, accused=math.inf), Verdict.RUINED
    if not known:
        return course._replace(dark=dark), Verdict.FINE
    recent = (*course.recent, *known)[-max(len(known), FEWEST) :]
    level = _lower_median([block.mean for block in recent])
    if math.isfinite(course.accused) and course.before and level > (course.accused + min(course.before)) / 2:
        return course._replace(before=(level,), recent=known, dark=dark, accused=math.nan), Verdict.ACQUITTED
    if len(recent) >= FEWEST and _is_ruined(course, level, falling):
        return course._replace(recent=(), dark=0, accused=level), Verdict.RUINED
    differences = (*course.differences, *_differences((*course.recent[-1:], *known)))[-REMEMBERED:]
    lowest = level if math.isnan(course.lowest) else min(level, course.lowest)
    gain = course.gain + (course.lowest - lowest if not math.isnan(course.lowest) else 0.0)
    before = (*course.before[-1:], level)
    return Course(lowest, gain, before, recent[-FEWEST:], differences, dark), Verdict.FINE


def _dark(before: int, blocks: Sequence[Block]) -> int:
    """Steps without a finite loss at the end of all blocks so far."""
    for block in blocks:
        before = 0 if math.isfinite(block.mean) else before + block.steps
    return before


def _is_ruined(course: Course, level: float, falling: bool) -> bool:
    if not course.before:
        return False
    lost = (LOST_FALLING if falling else LOST) * course.gain
    return level - min(course.before) > max(lost, NOISE * course.noise)


def _differences(blocks: Sequence[Block]) -> list[float]:
    """Between neighbours, times the root of their length: a mean of n losses has the noise of one over sqrt(n)."""
    pairs = zip(blocks, blocks[1:], strict=False)
    return [abs(b.mean - a.mean) * math.sqrt(min(a.steps, b.steps)) for a, b in pairs]


def _lower_median(values: Sequence[float]) -> float:
    return sorted(values)[(len(values) - 1) // 2]
