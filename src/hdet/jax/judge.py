"""Has training diverged? The judge of :mod:`hdet.rollback.judge` on arrays; that file says what it means."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from hdet.jax.numbers import Array, absent, choose, kth, lower_median, number, pushed_left, pushed_right, running
from hdet.rollback.judge import BLOCKS, FEWEST, LIMITS, REMEMBERED, Verdict


class Blocks(NamedTuple):
    """The losses of a round."""

    mean: Array
    """Of the finite ones of each block; NaN: there was none."""
    steps: Array
    given: Array
    """Whether there was any loss."""

    @property
    def known(self) -> Array:
        """Which have a finite mean."""
        return self.given & jnp.isfinite(self.mean)

    @property
    def finite(self) -> Blocks:
        """Only those that are known."""
        return self._replace(given=self.known)

    def behind(self, means: Array, steps: Array) -> tuple[Array, Array]:
        """Some blocks and the known ones of this round behind them."""
        known = jnp.where(self.known, self.mean, jnp.nan)
        return jnp.concatenate([means, known]), jnp.concatenate([steps, self.steps])


class LossHistory(NamedTuple):
    """What is remembered of the losses so far."""

    lowest: Array
    gain: Array
    before: Array
    recent: Array
    recent_steps: Array
    second_differences: Array
    latest: Array
    nonfinite_streak: Array
    suspect_level: Array

    @classmethod
    def new(cls) -> LossHistory:
        """Before any loss."""
        return cls(
            lowest=number(jnp.nan),
            gain=number(0.0),
            before=absent(2),
            recent=absent(FEWEST),
            recent_steps=jnp.ones_like(absent(FEWEST)),
            second_differences=absent(REMEMBERED),
            latest=absent(BLOCKS),
            nonfinite_streak=jnp.zeros((), jnp.int32),
            suspect_level=number(jnp.nan),
        )

    def suspecting(self, level: Array) -> LossHistory:
        """After a round that counts as diverged because of its level."""
        none, zero = jnp.full_like(self.recent, jnp.nan), jnp.zeros_like(self.nonfinite_streak)
        latest = jnp.full_like(self.latest, jnp.nan)
        return self._replace(
            recent=none,
            latest=latest,
            nonfinite_streak=zero,
            suspect_level=jnp.asarray(level, self.suspect_level.dtype),
        )

    def expecting(self, good: Array) -> LossHistory:
        """The weights that are put back are expected to have this loss."""
        return self._replace(before=jnp.full_like(self.before, jnp.nan).at[1].set(good))

    def cleared(self) -> LossHistory:
        """If weights that count as diverged are kept."""
        none = jnp.full_like(self.before, jnp.nan)
        return self._replace(suspect_level=jnp.full_like(self.suspect_level, jnp.nan), before=none)

    @property
    def noise(self) -> Array:
        """The standard deviation of a single step's loss; infinite as long as nothing is known of it."""
        count = jnp.sum(~jnp.isnan(self.second_differences))
        usual = kth(self.second_differences, 3 * count // 4) / 2.82
        second = kth(jnp.where(self.second_differences > 0, self.second_differences, jnp.nan), 1) / 2
        found = jnp.maximum(usual, jnp.nan_to_num(second, posinf=jnp.inf)) * (1 + 5 / jnp.sqrt(jnp.maximum(count, 1)))
        return jnp.where(count < FEWEST, jnp.inf, found)


class Judged(NamedTuple):
    """What is to be thought of a round; verdicts are numbers of :class:`hdet.rollback.judge.Verdict`."""

    history: LossHistory
    verdict: Array
    on_finite: Array
    """The verdict on the finite losses alone, whatever the gradients say."""


def judge(history: LossHistory, blocks: Blocks, falling: Array, doubted: Array) -> Judged:
    """One round."""
    count, nonfinite_streak = jnp.sum(blocks.known), _nonfinite_streak(history.nonfinite_streak, blocks)
    means, steps = blocks.behind(history.recent, history.recent_steps)
    there = ~jnp.isnan(means)
    is_last = there & (jnp.sum(there) - running(there) < jnp.maximum(count, FEWEST))
    level = lower_median(jnp.where(is_last, means, jnp.nan))
    is_long, is_known = nonfinite_streak >= FEWEST, count > 0
    is_free = jnp.isfinite(history.suspect_level) & _is_as_bad_at_once(history, blocks)
    is_diverged, is_surely = (
        (jnp.sum(is_last) >= FEWEST) & one for one in _has_diverged(history, level, falling, doubted)
    )

    own, own_steps = pushed_right(FEWEST, *blocks.behind(*(row[:0] for row in (means, steps))))
    freed = history.cleared().expecting(level)
    freed = freed._replace(
        recent=own,
        recent_steps=own_steps,
        latest=jnp.full_like(history.latest, jnp.nan),
        nonfinite_streak=nonfinite_streak,
    )

    recent, recent_steps = pushed_right(FEWEST, means, steps)
    lowest = jnp.fmin(level, history.lowest)
    fine = LossHistory(
        lowest=lowest,
        gain=history.gain + jnp.nan_to_num(history.lowest - lowest),
        before=jnp.stack([history.before[1], level]),
        recent=recent,
        recent_steps=recent_steps,
        second_differences=pushed_right(REMEMBERED, jnp.concatenate([history.second_differences, history.latest]))[0],
        latest=_second_differences(*blocks.behind(history.recent[-2:], history.recent_steps[-2:])),
        nonfinite_streak=nonfinite_streak,
        suspect_level=jnp.full_like(history.suspect_level, jnp.nan),
    )
    found = choose(is_diverged, history.suspecting(level), fine)
    found = choose(is_free, freed, found)
    found = choose(is_known, found, history._replace(nonfinite_streak=nonfinite_streak))
    found = choose(is_long, history.suspecting(jnp.inf), found)
    verdict, on_finite = (
        jnp.where(is_known & is_free, Verdict.FALSE_ALARM, jnp.where(is_known & one, Verdict.DIVERGED, Verdict.FINE))
        for one in (is_diverged, is_surely)
    )
    return Judged(found, jnp.where(is_long, Verdict.DIVERGED, verdict), on_finite)


def _nonfinite_streak(before: Array, blocks: Blocks) -> Array:
    """Steps without a finite loss at the end of all blocks so far."""
    seen = running(blocks.known)
    is_later = blocks.given & ~blocks.known & (seen == seen[-1])
    longer = jnp.sum(jnp.where(is_later, blocks.steps, 0)).astype(before.dtype)
    return longer + jnp.where(seen[-1] > 0, 0, before)


def _is_as_bad_at_once(history: LossHistory, blocks: Blocks) -> Array:
    before, known = jnp.nanmin(history.before), blocks.known
    is_first = known & (running(known) <= jnp.maximum(jnp.sum(known) // 2, 2))
    lowest = jnp.min(jnp.where(is_first, blocks.mean, jnp.inf))
    return lowest > before + LIMITS.as_bad * (history.suspect_level - before)


def _has_diverged(history: LossHistory, level: Array, falling: Array, doubted: Array) -> tuple[Array, Array]:
    """Whether it is, and whether it would be without doubts."""
    lost = jnp.where(falling, history.gain, LIMITS.lost * history.gain)
    is_known = ~jnp.any(jnp.isnan(history.second_differences))
    rise, noise = level - jnp.nanmin(history.before), history.noise
    fewer = jnp.where(doubted & is_known & ~falling, LIMITS.doubted, LIMITS.noise)
    return rise > jnp.maximum(lost, fewer * noise), rise > jnp.maximum(lost, LIMITS.noise * noise)


def _second_differences(means: Array, steps: Array) -> Array:
    means, steps = pushed_left(means, steps)
    shortest = jnp.minimum(jnp.minimum(steps[:-2], steps[1:-1]), steps[2:])
    return jnp.abs(means[:-2] - 2 * means[1:-1] + means[2:]) * jnp.sqrt(shortest)
