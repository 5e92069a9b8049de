"""Has training diverged? The judge of :mod:`hdet.rule.judge` on arrays; that file says what it means."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from hdet.jax.numbers import Array, absent, middle, number, up_to
from hdet.rule.constants import BLOCKS, FEW, FEWEST, LIMITS, REMEMBERED, UPPER_QUARTILE
from hdet.rule.enums import Verdict


class Blocks(NamedTuple):
    """The losses of a round."""

    rows: Array
    """Of the blocks with finite losses, one after the other: the means of these losses, and the blocks' steps; NaN
    behind them. All blocks that are remembered are such rows."""
    count: Array
    nonfinite: Array
    """Steps with losses after these blocks."""

    @classmethod
    def of(cls, mean: Array, steps: Array, given: Array) -> Blocks:
        """Of the blocks of a round; ``given``: those with any loss."""
        known = given & jnp.isfinite(mean)
        seen = jnp.cumsum(known)
        is_later = given & ~known & (seen == seen[-1])
        order = jnp.sum(seen <= jnp.arange(BLOCKS)[:, None], axis=1)  # the places of known blocks; behind them, none
        rows = jnp.stack([mean, steps]).at[:, order].get(mode="fill", fill_value=jnp.nan)
        nonfinite = jnp.sum(jnp.where(is_later, steps, 0)).astype(jnp.int32)
        return cls(rows, seen[-1].astype(jnp.int32), nonfinite)

    @property
    def mean(self) -> Array:
        return self.rows[0]

    def only_if(self, condition: Array) -> Blocks:
        """These blocks, or none."""
        count = jnp.where(condition, self.count, 0)
        return self._replace(rows=jnp.where(condition, self.rows, jnp.nan), count=count)

    def behind(self, rows: Array) -> Array:
        """Blocks that are at the end of their rows, and these behind them."""
        return jnp.concatenate([rows, self.rows], axis=1)

    def last(self, rows: Array) -> Array:
        """The last ones of some blocks and these, at the end of rows as long as those."""
        return jax.lax.dynamic_slice_in_dim(self.behind(rows), self.count, rows.shape[1], axis=1)


class LossHistory(NamedTuple):
    """What is remembered of the losses so far."""

    lowest: Array
    gain: Array
    before: Array
    recent: Array
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
            recent=absent(2, FEWEST),
            second_differences=absent(REMEMBERED),
            latest=absent(BLOCKS),
            nonfinite_streak=jnp.zeros((), jnp.int32),
            suspect_level=number(jnp.nan),
        )

    def suspecting(self, level: Array, expected: Array) -> LossHistory:
        """After a round that counts as diverged because of its level; ``expected``: the loss of the weights that are
        put back."""
        new = LossHistory.new()
        before = new.before.at[1].set(expected)
        emptied = self._replace(recent=new.recent, latest=new.latest, nonfinite_streak=new.nonfinite_streak)
        return emptied._replace(before=before, suspect_level=level)

    def cleared(self) -> LossHistory:
        """If weights that count as diverged are kept."""
        new = LossHistory.new()
        return self._replace(before=new.before, suspect_level=new.suspect_level)

    def after(self, judged: Judged, blocks: Blocks) -> LossHistory:
        """A round has ended with these losses and this verdict. Its second differences get :meth:`longer` apart."""
        level, verdict = judged.level, judged.verdict
        is_bad, is_freed = verdict == Verdict.DIVERGED, verdict == Verdict.FALSE_ALARM
        is_told = (blocks.count > 0) & ~is_bad
        is_fine, lowest = is_told & ~is_freed, jnp.fmin(level, self.lowest)
        recent = blocks.last(jnp.where(is_freed, jnp.nan, self.recent))
        latest = _second_differences(blocks.behind(self.recent[:, -2:]))
        before = jnp.stack([jnp.where(is_freed, jnp.nan, self.before[1]), level])
        return self._replace(
            lowest=jnp.where(is_fine, lowest, self.lowest),
            gain=self.gain + jnp.where(is_fine, jnp.nan_to_num(self.lowest - lowest), 0.0),
            before=jnp.where(is_told, before, self.before),
            recent=jnp.where(is_bad, jnp.nan, recent),
            latest=jnp.where(is_fine, latest, jnp.where(is_bad | is_freed, jnp.nan, self.latest)),
            nonfinite_streak=judged.nonfinite_streak,
            suspect_level=jnp.where(is_bad, level, jnp.where(is_told, jnp.nan, self.suspect_level)),
        )

    def longer(self, added: Array) -> Array:
        """The second differences, and so many of the last round."""
        both = jnp.concatenate([self.second_differences, self.latest])
        return jax.lax.dynamic_slice_in_dim(both, added, REMEMBERED)


def noise_in(ordered: Array) -> Array:
    """The standard deviation of a single step's loss, by ordered second differences; infinite if these are few."""
    count, none = up_to(jnp.inf, ordered), up_to(0.0, ordered)
    usual, second = (ordered.at[at].get(mode="fill", fill_value=jnp.nan) for at in (3 * count // 4, none + 1))
    grain = jnp.where(none + 1 < count, second / 2, 0.0)
    return jnp.where(count < FEWEST, jnp.inf, jnp.maximum(usual / UPPER_QUARTILE, grain) * (1 + FEW / jnp.sqrt(count)))


class Judged(NamedTuple):
    """What is to be thought of a round; verdicts are numbers of :class:`hdet.rule.judge.Verdict`."""

    verdict: Array
    on_finite: Array
    """The verdict on the finite losses alone, whatever the gradients say."""
    level: Array
    nonfinite_streak: Array


def judge(history: LossHistory, noise: Array, blocks: Blocks, falling: Array, doubted: Array) -> Judged:
    """One round; ``noise``: that of the history."""
    count, is_known = blocks.count, blocks.count > 0
    streak = blocks.nonfinite + jnp.where(is_known, 0, history.nonfinite_streak)
    recent = blocks.last(history.recent)[0]
    level, _ = middle(jnp.where(count >= FEWEST, blocks.mean, jnp.concatenate([recent, absent(BLOCKS - FEWEST)])))
    is_free = is_known & jnp.isfinite(history.suspect_level) & _is_as_bad_at_once(history, blocks)
    can_diverge, is_long = is_known & ~jnp.isnan(recent[0]), streak >= FEWEST
    verdict, on_finite = (
        jnp.where(is_free, Verdict.FALSE_ALARM, jnp.where(can_diverge & one, Verdict.DIVERGED, Verdict.FINE))
        for one in _has_diverged(history, noise, level, falling, doubted)
    )
    return Judged(
        jnp.where(is_long, Verdict.DIVERGED, verdict),
        on_finite,
        jnp.where(is_long, jnp.inf, level),
        jnp.where(is_long | (verdict == Verdict.DIVERGED), 0, streak),
    )


def _is_as_bad_at_once(history: LossHistory, blocks: Blocks) -> Array:
    before, is_first = jnp.fmin(*history.before), jnp.arange(BLOCKS) < jnp.maximum(blocks.count >> 1, 2)
    lowest = jnp.min(jnp.where(is_first & ~jnp.isnan(blocks.mean), blocks.mean, jnp.inf))
    return lowest > before + LIMITS.as_bad * (history.suspect_level - before)


def _has_diverged(
    history: LossHistory, noise: Array, level: Array, falling: Array, doubted: Array
) -> tuple[Array, Array]:
    """Whether it is, and whether it would be without doubts."""
    lost = jnp.where(falling, history.gain, LIMITS.lost * history.gain)
    is_known, rise = ~jnp.isnan(history.second_differences[0]), level - jnp.fmin(*history.before)
    fewer = jnp.where(doubted & is_known & ~falling, LIMITS.doubted, LIMITS.noise)
    return rise > jnp.maximum(lost, fewer * noise), rise > jnp.maximum(lost, LIMITS.noise * noise)


def _second_differences(rows: Array) -> Array:
    """From the first one on that is known."""
    means, steps = rows
    shortest = jnp.minimum(jnp.minimum(steps[:-2], steps[1:-1]), steps[2:])
    found = jnp.abs(means[:-2] - 2 * means[1:-1] + means[2:]) * jnp.sqrt(shortest)
    return jax.lax.dynamic_slice_in_dim(jnp.concatenate([found, absent(2)]), jnp.sum(jnp.isnan(means[:2])), BLOCKS)
