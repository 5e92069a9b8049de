r"""Has training been ruined? A judge of training losses, round by round. Pure.

The *level* of a round is the lower median of its losses, in up to eight blocks of steps: single batches far above the
others do not count. A round is ruined if its level is above that of the rounds before by more than a part of all that
was gained so far, *and* by more than single batches differ:

.. math:: \text{level} - \text{level before} > \max(0.3 \cdot \text{gain},\ 12\,\sigma).

Where gradients turn against the way so far, three deviations are enough, once 48 kinks of the noise are known: harder
data do not turn them. While the schedule falls it takes the whole gain. Four steps in a row without a finite loss are
ruin, too.

For rounds of a few steps (:data:`LOOKS`) the last changes of the level stand in place of the gain: a leap is ruin if it
is twice the largest of them and above the noise, even if little of all that was gained is lost.

Gain and noise are differences of losses. So a constant added to the loss makes no difference, nor its unit, nor whether
it is above 0. Lower is better: the caller turns losses that are maximised.

Losses cannot tell ruined weights from harder data. After going back they can: data that are harder are so for the
earlier weights, too. Then the verdict was wrong, and is taken back (:attr:`Verdict.FALSE_ALARM`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum
from itertools import pairwise
from statistics import fmean
from typing import NamedTuple

BLOCKS = 8
"""Blocks of a round, at most."""
FEWEST = BLOCKS // 2
"""Blocks that a level is made of, at least; where a round has fewer, those of earlier ones are added. It takes as many
steps to see an explosion: so many without a finite loss are ruin, and snapshots are as far apart."""
REMEMBERED = 6 * BLOCKS
"""Kinks that the noise is estimated from, at most."""
CHANGES = 12
"""Changes of the level that a leap is compared with: they must be known before one is called ruin."""


class Limits(NamedTuple):
    """What a round may lose without being called ruined. LOG, *nothing to hand over*, has what they cost."""

    lost: float = 0.3
    """This part of the gain; all of it while the schedule falls, since only an explosion may undo a trained model."""
    noise: float = 12.0
    """So many noise deviations of a single step: harder data may be ten above easy ones ..."""
    doubted: float = 3.0
    """... and so many where the gradients, too, say that the way so far was wrong, and the noise is well known (LOG, a
    network that dies)."""
    leap: float = 0.0
    """So many times the largest of the last changes of the level, in either direction. 0: these do not matter."""
    as_bad: float = 0.5
    """After a roll back the data were at fault if the first losses are above by this part of what was lost."""


LIMITS = Limits()
ROUNDS = LIMITS._replace(leap=2.0)
"""For a run at a rate that nobody searches."""
LOOKS = Limits(lost=0.0, noise=3.0, leap=2.0, as_bad=1 / 3)
"""For levels of a few steps each: what was reached and is lost at once, whatever part of the gain that is (LOG, a guard
that looks more often)."""


class Block(NamedTuple):
    """Some steps in a row."""

    mean: float
    """Of their finite losses; NaN: there was none."""
    steps: int


def blocks_of(losses: Sequence[float]) -> tuple[Block, ...]:
    """Means of the finite ones of neighbours, in up to eight blocks of equal length.

    >>> blocks_of([1.0, 2.0, math.nan] * 8)[:2]
    (Block(mean=1.5, steps=3), Block(mean=1.5, steps=3))
    """
    count = min(len(losses), BLOCKS)
    cuts = [k * len(losses) // count for k in range(count + 1)] if count else []
    rows = [losses[begin:end] for begin, end in pairwise(cuts)]
    finite = [[loss for loss in row if math.isfinite(loss)] for row in rows]
    return tuple(Block(fmean(own) if own else math.nan, len(row)) for own, row in zip(finite, rows, strict=True))


class Verdict(IntEnum):
    """What is to be thought of a round."""

    FINE = 0
    DIVERGED = 1
    """Its weights are no good: go back."""
    FALSE_ALARM = 2
    """The round before was called ruined, and going back did not help: it was the data."""


class LossHistory(NamedTuple):
    """What is remembered of the losses so far; plain numbers."""

    lowest: float = math.nan
    """The lowest level."""
    gain: float = 0.0
    """By how much the level has fallen in all."""
    before: tuple[float, ...] = ()
    """Levels of the last two rounds that were fine."""
    recent: tuple[Block, ...] = ()
    """The last blocks, for levels of short rounds."""
    second_differences: tuple[float, ...] = ()
    """How far blocks are from the line through their neighbours, as single steps would be: until the round before the
    last ..."""
    latest: tuple[float, ...] = ()
    """... and in the last: where an explosion has just begun, it is not to be taken for noise."""
    nonfinite_streak: int = 0
    """Steps without a finite loss, in a row."""
    suspect_level: float = math.nan
    """The level of a round that was called ruined, until the next one has shown whether it was."""
    changes: tuple[float, ...] = ()
    """By how much the level has changed from one round to the next, in either direction."""
    tolerated: float = 0.0
    """The largest leap that harder data have made."""

    def suspecting(self, level: float, good: float | None = None) -> LossHistory:
        """The course after a round that is called ruined for its level. The next shows whether going back has helped.

        ``good``: what is expected of the weights that are put back, if not the levels of the last rounds.
        """
        before = self.before if good is None else (good,)
        return self._replace(before=before, recent=(), latest=(), nonfinite_streak=0, suspect_level=level)

    def cleared(self) -> LossHistory:
        """The course if weights that were called ruined are kept: the next losses are the measure."""
        return self._replace(suspect_level=math.nan, before=())

    @property
    def noise(self) -> float:
        """The standard deviation of a single step's loss; infinite as long as nothing is known of it.

        Kinks of normal numbers: three quarters are below 2.82 deviations. Few of them may be small by chance.
        """
        count = len(self.second_differences)
        if count < FEWEST:
            return math.inf
        ordered = sorted(self.second_differences)
        usual = ordered[3 * count // 4] / 2.82
        sizes = [kink for kink in ordered if kink > 0]
        bits = sizes[1] / 2 if len(sizes) > 1 else 0.0  # losses of few bits: half a step between neighbours
        return max(usual, bits) * (1 + 5 / math.sqrt(count))


def judge(
    history: LossHistory, blocks: Sequence[Block], *, falling: bool, doubted: bool = False, limits: Limits = LIMITS
) -> tuple[LossHistory, Verdict]:
    """One round.

    Args:
        history: what is remembered.
        blocks: the round's losses; none where no loss was given.
        falling: whether the schedule falls.
        doubted: whether the gradients say that the way so far was wrong.
        limits: what a round may lose.

    >>> history = LossHistory()
    >>> for loss in (5.0, 4.1, 3.0, 2.2, 1.9, 2.1):
    ...     history, verdict = judge(history, [Block(loss, 1), Block(loss + 0.1, 1)], falling=False)
    >>> judge(history, [Block(2.3, 1), Block(2.2, 1)], falling=False)[1].name
    'FINE'
    >>> judge(history, [Block(40.0, 1), Block(50.0, 1)] * 2, falling=False)[1].name
    'DIVERGED'
    """
    known = tuple(block for block in blocks if math.isfinite(block.mean))
    nonfinite_streak = _nonfinite_streak(history.nonfinite_streak, blocks)
    if nonfinite_streak >= FEWEST:
        return history.suspecting(math.inf), Verdict.DIVERGED
    if not known:
        return history._replace(nonfinite_streak=nonfinite_streak), Verdict.FINE
    recent = (*history.recent, *known)[-max(len(known), FEWEST) :]
    level = _lower_median([block.mean for block in recent])
    if math.isfinite(history.suspect_level) and history.before and _is_as_bad_at_once(history, known, limits.as_bad):
        leap = max(history.tolerated, history.suspect_level - min(history.before))
        freed = history._replace(
            before=(level,),
            recent=known,
            latest=(),
            nonfinite_streak=nonfinite_streak,
            suspect_level=math.nan,
            tolerated=leap,
        )
        return freed, Verdict.FALSE_ALARM
    highest = _highest((*history.recent, *known), level) if limits.leap else level
    if len(recent) >= FEWEST and _has_diverged(history, highest, falling, doubted, limits):
        return history.suspecting(highest), Verdict.DIVERGED
    latest = _second_differences((*history.recent[-2:], *known))
    second_differences = (*history.second_differences, *history.latest)[-REMEMBERED:]
    lowest = level if math.isnan(history.lowest) else min(level, history.lowest)
    gain = history.gain + (history.lowest - lowest if not math.isnan(history.lowest) else 0.0)
    changes = (*history.changes, *(abs(level - last) for last in history.before[-1:]))[-CHANGES:]
    before = (*history.before[-1:], level)
    found = LossHistory(
        lowest, gain, before, recent[-FEWEST:], second_differences, latest, nonfinite_streak, changes=changes
    )
    return found._replace(tolerated=history.tolerated), Verdict.FINE


def _is_as_bad_at_once(history: LossHistory, blocks: Sequence[Block], part: float) -> bool:
    """Whether weights that were put back are as bad from the first steps on: so it was the data. Weights that explode
    once more are good at first."""
    first, before = blocks[: max(len(blocks) // 2, 2)], min(history.before)
    return min(block.mean for block in first) > before + part * (history.suspect_level - before)


def _nonfinite_streak(before: int, blocks: Sequence[Block]) -> int:
    """Steps without a finite loss at the end of all blocks so far."""
    for block in blocks:
        before = 0 if math.isfinite(block.mean) else before + block.steps
    return before


def _has_diverged(history: LossHistory, level: float, falling: bool, doubted: bool, limits: Limits) -> bool:
    if not history.before:
        return False
    lost = history.gain if falling else limits.lost * history.gain
    is_known = (
        len(history.second_differences) == REMEMBERED
    )  # early on, gradients turn and losses jump in runs that are well
    noise = limits.doubted if doubted and is_known and not falling else limits.noise
    leap = limits.leap * _usual_leap(history, noise * history.noise) if limits.leap else 0.0
    return level - min(history.before) > max(lost, noise * history.noise, leap)


def _usual_leap(history: LossHistory, noise: float) -> float:
    """Infinite as long as too little is known, and while the level is above the lowest: losses that rise by themselves,
    as those of adversaries do, say nothing."""
    is_at_its_best = min(history.before) - history.lowest <= noise
    is_known = len(history.changes) == CHANGES
    return max(*history.changes, history.tolerated) if is_known and is_at_its_best else math.inf


def _highest(blocks: Sequence[Block], level: float) -> float:
    """The highest level of as many neighbours as make one: a leap need not begin where a round does."""
    means = [block.mean for block in blocks]
    levels = [_lower_median(means[i : i + FEWEST]) for i in range(len(means) - FEWEST + 1)]
    return max([*levels, level])


def _second_differences(blocks: Sequence[Block]) -> tuple[float, ...]:
    """|a - 2 b + c| of three neighbours, times the root of their length: a mean of n losses has the noise of one over
    sqrt(n). A loss that falls along a line has none."""
    triples = zip(blocks, blocks[1:], blocks[2:], strict=False)
    return tuple(abs(a.mean - 2 * b.mean + c.mean) * math.sqrt(min(a.steps, b.steps, c.steps)) for a, b, c in triples)


def _lower_median(values: Sequence[float]) -> float:
    return sorted(values)[(len(values) - 1) // 2]
