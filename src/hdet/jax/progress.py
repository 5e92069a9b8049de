"""Has the train loss fallen? :mod:`hdet.search.progress` on arrays; that file says what it means."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import jax.numpy as jnp

from hdet.jax.judge import Blocks
from hdet.jax.numbers import Array, absent, choose, median, number, pushed_left, pushed_right, running
from hdet.rollback.judge import FEWEST
from hdet.search.constants import DEFAULT
from hdet.search.progress import CLEAR, FAR, LATEST, LEAST, RISEN, ROUNDED, SURE
from hdet.search.rule import next_end

LONGEST = 2**30
"""Steps that a run may have: they are counted in 32 bits."""


def _ends() -> tuple[int, ...]:
    ends = [1]
    while ends[-1] < LONGEST:
        ends.append(next_end(ends[-1], DEFAULT))
    return (*ends[:-1], LONGEST)


ENDS = _ends()
"""The ends of rounds of any run."""
_FIRST_STEPS = 80
"""Room for rounds of one step that come before the first round that counts; further ones replace each other."""
_ROOM = _FIRST_STEPS + len(ENDS) + 4


Falls: TypeAlias = tuple[Array, Array, Array, Array]


class Outlook(NamedTuple):
    """What follows from the losses so far."""

    first: Array
    latest: Array
    is_below: Array
    """Whether the loss is clearly lower than it was, by however little; also if nothing is known of that."""
    is_lost: Array
    """Whether it is above where it began, beyond its noise, or back there after it had fallen."""


class Progress(NamedTuple):
    """The losses so far, by rounds."""

    start: Array
    start_steps: Array
    level: Array
    steps: Array
    noise: Array
    end: Array
    count: Array
    """Rounds that are remembered: the first of the four arrays above."""
    last: Array
    last_steps: Array
    fell: Array

    @classmethod
    def new(cls) -> Progress:
        """Before any loss."""
        two, room = absent(2), absent(_ROOM)
        counts = jnp.zeros(_ROOM, jnp.int32)
        count, ones = jnp.zeros((), jnp.int32), jnp.ones_like(two)
        return cls(two, ones, room, room, room, counts, count, two, ones, jnp.zeros((), bool))

    def after(self, blocks: Blocks, end: Array, is_first: Array) -> tuple[Progress, Outlook]:
        """A round has ended with these losses; ``is_first``: it was a first step."""
        means, steps = pushed_left(*blocks.behind(self.last, self.last_steps))
        bends = jnp.abs(means[:-2] - 2 * means[1:-1] + means[2:])
        noises = bends / jnp.sqrt(1 / steps[:-2] + 4 / steps[1:-1] + 1 / steps[2:]) / 0.6745
        at = jnp.where(is_first, jnp.minimum(self.count, _FIRST_STEPS), self.count)
        start, start_steps = pushed_left(*blocks.behind(self.start, self.start_steps))
        last, last_steps = pushed_right(2, means, steps)
        found = Progress(
            start=start[:2],
            start_steps=start_steps[:2],
            level=self.level.at[at].set(median(jnp.where(blocks.known, blocks.mean, jnp.nan))),
            steps=self.steps.at[at].set(jnp.sum(jnp.where(blocks.known, blocks.steps, 0))),
            noise=self.noise.at[at].set(median(noises)),
            end=self.end.at[at].set(end),
            count=at + 1,
            last=last,
            last_steps=last_steps,
            fell=self.fell,
        )
        found = choose(jnp.any(blocks.known), found, self)
        falls = found._falls()
        return found._replace(fell=self.fell | found._is_below(falls, found._doubt)), found._outlook(falls)

    def rolled_back(self, step: Array) -> Progress:
        """The round that has just ended has diverged: training goes on from the weights of an earlier step."""
        count = jnp.sum(self._there & (self.end <= step)).astype(self.count.dtype)
        none, no = jnp.full_like(self.last, jnp.nan), jnp.zeros_like(self.fell)
        return self._replace(count=count, last=none, fell=no)

    # -- what follows -------------------------------------------------------------------------------------------------

    @property
    def first(self) -> Array:
        """The loss at the beginning; NaN: none is known."""
        steps = jnp.where(jnp.isnan(self.start), 0, self.start_steps)
        return jnp.nansum(self.start * steps) / jnp.sum(steps)

    @property
    def latest(self) -> Array:
        """The loss as it is."""
        return self.first + self._mean(self._is_latest)

    @property
    def is_known(self) -> Array:
        """Whether there are enough losses to compare."""
        return jnp.isfinite(self.first) & (self.count > jnp.sum(self._is_latest) + 1)

    def has_fallen(self, sure: float = SURE) -> Array:
        """Whether the loss is lower than it was, beyond its noise. Not if nothing is known."""
        fall, noise, least, there = self._falls()
        return jnp.any(there & (fall > jnp.maximum(sure * noise, least)))

    def _is_below(self, falls: Falls, doubt: Array) -> Array:
        fall, noise, _, there = falls
        return jnp.any(there & (fall > jnp.maximum(CLEAR * doubt * noise, ROUNDED * jnp.abs(self.first))))

    def _outlook(self, falls: Falls) -> Outlook:
        fall, noise, _, there = falls
        has_risen = jnp.all(~there | (-fall > RISEN * self._doubt * noise))
        fell = self.fell | self._is_below(falls, self._doubt)
        is_lost = jnp.any(there) & (has_risen | (fell & jnp.all(~there | (fall <= 0))))
        return Outlook(self.first, self.latest, jnp.isnan(self.first) | self._is_below(falls, 1.0), is_lost)

    @property
    def _there(self) -> Array:
        return jnp.arange(_ROOM) < self.count

    @property
    def _doubt(self) -> Array:
        known = jnp.sum(self._there & ~jnp.isnan(self.noise))
        return 1 + 5 / jnp.sqrt(jnp.maximum(known, 1))

    @property
    def _single(self) -> Array:
        """The noise of a single step; 0 if nothing is known of it."""
        return jnp.nan_to_num(median(jnp.where(self._there, self.noise, jnp.nan)), posinf=jnp.inf)

    @property
    def _is_latest(self) -> Array:
        steps = jnp.where(self._there, self.steps, 0)
        least = jnp.maximum(LATEST * jnp.sum(steps), FEWEST)
        later = jnp.sum(steps) - running(steps)
        return self._there & (later < least)

    def _mean(self, chosen: Array) -> Array:
        """Above the first loss: in float32 differences of losses are more exact than losses."""
        steps = jnp.where(chosen, self.steps, 0)
        return jnp.sum(jnp.where(chosen, (self.level - self.first) * self.steps, 0)) / jnp.sum(steps)

    def _falls(self) -> Falls:
        """From each beginning to the latest losses, with the standard deviation, what would be next to nothing, and
        whether there is such a beginning."""
        first, few, single = self.first, jnp.sum(jnp.where(jnp.isnan(self.start), 0, self.start_steps)), self._single
        above, is_latest = self.level - first, self._is_latest
        near = above <= RISEN * single * jnp.sqrt(1 / few + 1 / self.steps)
        chosen = running(~(self._there & ~is_latest & near)) == 0
        steps = running(jnp.where(chosen, self.steps, 0))
        means = running(jnp.where(chosen, above * self.steps, 0)) / steps
        means, steps = (jnp.concatenate([number(one)[None], row]) for one, row in ((0.0, means), (few, steps)))
        there = jnp.concatenate([jnp.ones(1, bool), chosen & (steps[1:] > few)]) & self.is_known
        size = jnp.abs(first + means)
        least = jnp.maximum(jnp.minimum(LEAST * size, FAR * single), ROUNDED * size)
        late = jnp.sum(jnp.where(is_latest, self.steps, 0))
        return means - self._mean(is_latest), single * jnp.sqrt(1 / steps + 1 / late), least, there
