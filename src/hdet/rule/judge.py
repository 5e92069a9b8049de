r"""Has training diverged, and where is it rolled back to? What the search and ``hdet.Guard`` share. Pure.

The judge compares a round with those before it. :mod:`hdet.rule.progress` answers another question: has the loss
fallen at all since the run began?

:func:`judge` takes what is remembered of the losses and those of a round, and gives a verdict. The *level* of a round
is the lower median of its losses, in up to eight *blocks* (steps in a row, with the mean of their losses), so that
single batches far above the others do not count. Training has diverged if the level is above that of the rounds before
by more than a part of all that was gained so far, *and* by more than single batches differ:

.. math:: \text{level} - \text{level before} > \max(0.3 \cdot \text{gain},\ 12\,\sigma).

The gain is how far the level has fallen in all, and :math:`\sigma` is the noise: the standard deviation of a single
step's loss, estimated from second differences of the blocks: how far each is from the line through its neighbours. If
the gradients have turned against the path of the weights so far, which harder data do not make them do, the round is
*doubted*: 3 deviations are enough, once 48 second differences are known. While the schedule falls, it takes the whole
gain. Four steps in a row without a finite loss have diverged, too. These numbers are in :mod:`hdet.rule.constants`.

For a guard (``LOOKS``, ``ROUNDS``) the level must also rise by more than twice the largest of its last 12
changes. Until 12 are known, and while the level is above its lowest, no level counts as divergence. For looks, which
have a few steps each, this takes the place of the gain: a leap has diverged even if little of all that was gained is
lost.

Gain and noise are differences of losses. So neither a constant added to the loss nor its unit makes a difference. Lower
is better: the caller negates losses that are maximised.

Losses cannot tell diverged weights from harder data. After a rollback they can: harder data are harder for the earlier
weights, too. If the losses after the rollback are as high at once, it was a false alarm
(:attr:`Verdict.FALSE_ALARM`): the guard undoes the rollback, and the search raises the rate back.

Search and guard keep snapshots of the last good weights. A *round* is some steps in a row that are judged together:

================= =============================================== =====================================================
question          search (:class:`hdet.rule.decision.Rule`)         guard (:class:`~.guard_policy.GuardPolicy`)
================= =============================================== =====================================================
snapshot is due   at a round's end, after 4 steps (`is_due`)      at a look, after 8 steps; on a device, after a round
rolled back to    the older of two; if a batch is to blame, the   the last one from before the losses were strange; if
                  last                                            that is no better, one further back
no snapshot       the weights stay, the rate is lowered; an error the weights stay; an error if they are NaN or
                  if they are NaN or infinite                     infinite
rate              divided by 3, then raised again by the search   as it was the first time, then times ``factor``
false alarm       the rate is raised back, the weights stay       rate and weights are as before the rollback
================= =============================================== =====================================================
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from hdet.rule.constants import BLOCKS, CHANGES, FEW, FEWEST, LIMITS, REMEMBERED, UPPER_QUARTILE, Limits
from hdet.rule.enums import Verdict


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

    For each block: whether it has a loss, and the mean of those that are finite. Last, the mean of all.
    """
    count, given = min(max(length, 1), BLOCKS), list(losses)
    blocks: list[list[float]] = [[] for _ in range(BLOCKS)]
    for step, loss in given:
        blocks[min(((step + 1) * count - 1) // max(length, 1), count - 1)].append(loss)
    numbers = [number for own in blocks for number in (float(bool(own)), mean_of(filter(math.isfinite, own)))]
    return [*numbers, mean_of([loss for _, loss in given])]


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


# -- has training diverged? --------------------------------------------------------------------------------------------


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
    """How far blocks are from the line through their neighbours, scaled to single steps: until the round before the
    last."""
    latest: tuple[float, ...] = ()
    """The same in the last round: if an explosion has just begun there, it must not be taken for noise."""
    nonfinite_streak: int = 0
    """Steps without a finite loss, in a row."""
    suspect_level: float = math.nan
    """The level that a rollback was made for, until the next round has shown whether that was right."""
    changes: tuple[float, ...] = ()
    """By how much the level has changed from one round to the next, in either direction."""
    tolerated: float = 0.0
    """The largest leap that harder data have made."""

    def suspecting(self, level: float, good: float | None = None) -> LossHistory:
        """The history after a rollback that was made for a level. The next round shows whether it has helped.

        ``good``: the level that is expected after the rollback, if not those of the last rounds.
        """
        before = self.before if good is None else (good,)
        return self._replace(before=before, recent=(), latest=(), nonfinite_streak=0, suspect_level=level)

    def cleared(self) -> LossHistory:
        """The history if weights that have diverged are kept: the next losses are the measure."""
        return self._replace(suspect_level=math.nan, before=())

    def tolerating(self, leap: float) -> LossHistory:
        """The history if a leap was made by harder data: the next losses are the measure."""
        tolerated = max(self.tolerated, leap) if math.isfinite(leap) else self.tolerated
        return self.cleared()._replace(recent=(), latest=(), nonfinite_streak=0, tolerated=tolerated)

    @property
    def noise(self) -> float:
        """The standard deviation of a single step's loss; infinite until enough is known.

        A few second differences may be small by chance, so that the noise is taken to be larger.
        """
        count = len(self.second_differences)
        if count < FEWEST:
            return math.inf
        ordered = sorted(self.second_differences)
        usual = ordered[3 * count // 4] / UPPER_QUARTILE
        sizes = [size for size in ordered if size > 0]
        grain = sizes[1] / 2 if len(sizes) > 1 else 0.0  # losses of few digits: half the distance of neighbours
        return max(usual, grain) * (1 + FEW / math.sqrt(count))


def judge(
    history: LossHistory, blocks: Sequence[Block], *, falling: bool, doubted: bool = False, limits: Limits = LIMITS
) -> tuple[LossHistory, Verdict]:
    """The verdict on one round, and what is remembered after it.

    Args:
        history: what is remembered.
        blocks: the round's losses; none if no loss was given.
        falling: whether the schedule falls.
        doubted: whether the gradients have turned against the path so far; a guard does not know.
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
        freed = history._replace(before=(level,), recent=known, latest=(), suspect_level=math.nan, tolerated=leap)
        return freed._replace(nonfinite_streak=nonfinite_streak), Verdict.FALSE_ALARM
    highest = _highest((*history.recent, *known), level) if limits.leap else level
    if len(recent) >= FEWEST and _has_diverged(history, highest, falling, doubted, limits):
        return history.suspecting(highest), Verdict.DIVERGED
    lowest = min(level, level if math.isnan(history.lowest) else history.lowest)
    after = LossHistory(
        lowest=lowest,
        gain=history.gain + (0.0 if math.isnan(history.lowest) else history.lowest - lowest),
        before=(*history.before[-1:], level),
        recent=recent[-FEWEST:],
        second_differences=(*history.second_differences, *history.latest)[-REMEMBERED:],
        latest=_second_differences((*history.recent[-2:], *known)),
        nonfinite_streak=nonfinite_streak,
        changes=(*history.changes, *(abs(level - last) for last in history.before[-1:]))[-CHANGES:],
        tolerated=history.tolerated,
    )
    return after, Verdict.FINE


def _is_as_bad_at_once(history: LossHistory, blocks: Sequence[Block], part: float) -> bool:
    """Whether the first losses after a rollback are as bad: then it was the data. Weights that explode once more are
    good at first."""
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
    is_known = len(history.second_differences) == REMEMBERED  # early on, losses jump in runs that are well
    noise = limits.doubted if doubted and is_known and not falling else limits.noise
    leap = limits.leap * _usual_leap(history, noise * history.noise) if limits.leap else 0.0
    return level - min(history.before) > max(lost, noise * history.noise, leap)


def _usual_leap(history: LossHistory, noise: float) -> float:
    """Infinite until enough is known, and while the level is above the lowest: losses that rise by themselves, as those
    of adversaries do, say nothing."""
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


# -- where training is rolled back to ----------------------------------------------------------------------------------


class Snapshot(NamedTuple):
    """Weights, buffers and optimizer state as they were after ``step``, stored in ``slot``."""

    step: int
    slot: int


def is_due(kept: Sequence[Snapshot], t: int, spacing: int) -> bool:
    """Whether it is time for another snapshot; ``kept``: the snapshots there are, the oldest first."""
    return not kept or t - kept[-1].step >= spacing


def with_another(kept: tuple[Snapshot, ...], t: int) -> tuple[Snapshot, ...]:
    """The last snapshot and a new one of step ``t``, in the slot (0 or 1) that the last one does not use, if it is due.

    Rounds are short at first, and an explosion takes some steps to be seen: snapshots are as far apart.

    >>> with_another(with_another((), 4), 8), with_another((Snapshot(4, 0),), 7)
    ((Snapshot(step=4, slot=0), Snapshot(step=8, slot=1)), (Snapshot(step=4, slot=0),))
    """
    if not is_due(kept, t, FEWEST):
        return kept
    last = kept[-1:]
    return (*last, Snapshot(t, 1 - last[0].slot if last else 0))
