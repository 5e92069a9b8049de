"""Has training been ruined? The judge of :mod:`hdet.rollback.ruin` on arrays; that file says what it means."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from hdet.jax.numbers import Array, absent, choose, kth, lower_median, number, pushed_left, pushed_right, running
from hdet.rollback.ruin import BLOCKS, FEWEST, LIMITS, REMEMBERED, Verdict


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


class Course(NamedTuple):
    """What is remembered of the losses so far."""

    lowest: Array
    gain: Array
    before: Array
    recent: Array
    recent_steps: Array
    kinks: Array
    latest: Array
    dark: Array
    accused: Array

    @classmethod
    def new(cls) -> Course:
        """Before any loss."""
        return cls(
            lowest=number(jnp.nan),
            gain=number(0.0),
            before=absent(2),
            recent=absent(FEWEST),
            recent_steps=jnp.ones_like(absent(FEWEST)),
            kinks=absent(REMEMBERED),
            latest=absent(BLOCKS),
            dark=jnp.zeros((), jnp.int32),
            accused=number(jnp.nan),
        )

    def accused_of(self, level: Array) -> Course:
        """After a round that is called ruined for its level."""
        none, zero = jnp.full_like(self.recent, jnp.nan), jnp.zeros_like(self.dark)
        latest = jnp.full_like(self.latest, jnp.nan)
        return self._replace(recent=none, latest=latest, dark=zero, accused=jnp.asarray(level, self.accused.dtype))

    def expecting(self, good: Array) -> Course:
        """The weights that are put back are expected to have this loss."""
        return self._replace(before=jnp.full_like(self.before, jnp.nan).at[1].set(good))

    def acquitted(self) -> Course:
        """If weights that were called ruined are kept."""
        none = jnp.full_like(self.before, jnp.nan)
        return self._replace(accused=jnp.full_like(self.accused, jnp.nan), before=none)

    @property
    def noise(self) -> Array:
        """The standard deviation of a single step's loss; infinite as long as nothing is known of it."""
        count = jnp.sum(~jnp.isnan(self.kinks))
        usual = kth(self.kinks, 3 * count // 4) / 2.82
        second = kth(jnp.where(self.kinks > 0, self.kinks, jnp.nan), 1) / 2
        found = jnp.maximum(usual, jnp.nan_to_num(second, posinf=jnp.inf)) * (1 + 5 / jnp.sqrt(jnp.maximum(count, 1)))
        return jnp.where(count < FEWEST, jnp.inf, found)


class Judged(NamedTuple):
    """What is to be thought of a round; verdicts are numbers of :class:`hdet.rollback.ruin.Verdict`."""

    course: Course
    verdict: Array
    on_finite: Array
    """The verdict on the finite losses alone, whatever the gradients say."""


def judge(course: Course, blocks: Blocks, falling: Array, doubted: Array) -> Judged:
    """One round."""
    count, dark = jnp.sum(blocks.known), _dark(course.dark, blocks)
    means, steps = blocks.behind(course.recent, course.recent_steps)
    there = ~jnp.isnan(means)
    is_last = there & (jnp.sum(there) - running(there) < jnp.maximum(count, FEWEST))
    level = lower_median(jnp.where(is_last, means, jnp.nan))
    is_dark, is_known = dark >= FEWEST, count > 0
    is_free = jnp.isfinite(course.accused) & _is_as_bad_at_once(course, blocks)
    is_ruined, is_surely = ((jnp.sum(is_last) >= FEWEST) & one for one in _is_ruined(course, level, falling, doubted))

    own, own_steps = pushed_right(FEWEST, *blocks.behind(*(row[:0] for row in (means, steps))))
    freed = course.acquitted().expecting(level)
    freed = freed._replace(recent=own, recent_steps=own_steps, latest=jnp.full_like(course.latest, jnp.nan), dark=dark)

    recent, recent_steps = pushed_right(FEWEST, means, steps)
    lowest = jnp.fmin(level, course.lowest)
    fine = Course(
        lowest=lowest,
        gain=course.gain + jnp.nan_to_num(course.lowest - lowest),
        before=jnp.stack([course.before[1], level]),
        recent=recent,
        recent_steps=recent_steps,
        kinks=pushed_right(REMEMBERED, jnp.concatenate([course.kinks, course.latest]))[0],
        latest=_kinks(*blocks.behind(course.recent[-2:], course.recent_steps[-2:])),
        dark=dark,
        accused=jnp.full_like(course.accused, jnp.nan),
    )
    found = choose(is_ruined, course.accused_of(level), fine)
    found = choose(is_free, freed, found)
    found = choose(is_known, found, course._replace(dark=dark))
    found = choose(is_dark, course.accused_of(jnp.inf), found)
    verdict, on_finite = (
        jnp.where(is_known & is_free, Verdict.ACQUITTED, jnp.where(is_known & one, Verdict.RUINED, Verdict.FINE))
        for one in (is_ruined, is_surely)
    )
    return Judged(found, jnp.where(is_dark, Verdict.RUINED, verdict), on_finite)


def _dark(before: Array, blocks: Blocks) -> Array:
    """Steps without a finite loss at the end of all blocks so far."""
    seen = running(blocks.known)
    is_later = blocks.given & ~blocks.known & (seen == seen[-1])
    longer = jnp.sum(jnp.where(is_later, blocks.steps, 0)).astype(before.dtype)
    return longer + jnp.where(seen[-1] > 0, 0, before)


def _is_as_bad_at_once(course: Course, blocks: Blocks) -> Array:
    before, known = jnp.nanmin(course.before), blocks.known
    is_first = known & (running(known) <= jnp.maximum(jnp.sum(known) // 2, 2))
    lowest = jnp.min(jnp.where(is_first, blocks.mean, jnp.inf))
    return lowest > before + LIMITS.as_bad * (course.accused - before)


def _is_ruined(course: Course, level: Array, falling: Array, doubted: Array) -> tuple[Array, Array]:
    """Whether it is, and whether it would be without doubts."""
    lost = jnp.where(falling, course.gain, LIMITS.lost * course.gain)
    is_known = ~jnp.any(jnp.isnan(course.kinks))
    rise, noise = level - jnp.nanmin(course.before), course.noise
    fewer = jnp.where(doubted & is_known & ~falling, LIMITS.doubted, LIMITS.noise)
    return rise > jnp.maximum(lost, fewer * noise), rise > jnp.maximum(lost, LIMITS.noise * noise)


def _kinks(means: Array, steps: Array) -> Array:
    means, steps = pushed_left(means, steps)
    shortest = jnp.minimum(jnp.minimum(steps[:-2], steps[1:-1]), steps[2:])
    return jnp.abs(means[:-2] - 2 * means[1:-1] + means[2:]) * jnp.sqrt(shortest)
