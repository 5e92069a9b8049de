"""Has the train loss fallen? :mod:`hdet.rule.progress` on arrays; that file says what it means."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from hdet.jax.judge import Blocks
from hdet.jax.numbers import Apart, Array, absent, at, count_of, middle, number, up_to, when
from hdet.rule.constants import CLEAR, DEFAULT, FAR, FEW, FEWEST, HALF, LATEST, LEAST, RISEN, ROUNDED, SURE
from hdet.rule.decision import next_end
from hdet.rule.enums import Phase

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


class Outlook(NamedTuple):
    """What follows from the losses so far."""

    first: Array
    latest: Array
    is_below: Array
    """Whether the loss is clearly lower than it was, by however little; also if nothing is known of that."""
    has_gained: Array
    """Whether it is lower, if only by chance; also if nothing is known of that."""
    is_undone: Array
    """Whether it is above where it began, beyond its noise, or back there after it had fallen."""


class Scale(NamedTuple):
    """What falls are measured by. Losses are above the first: in float32 differences are more exact than losses."""

    first: Array
    """The loss at the beginning; NaN: none is known."""
    few: Array
    """Steps that it is the mean of."""
    single: Array
    """The noise of a single step; 0 if nothing is known of it."""
    doubt: Array
    place: Array
    """The place of the first round in the last quarter of the steps, the latest ones."""
    latest: Array
    """The mean loss of the latest steps."""
    share: Array
    """1 over the number of the latest steps."""

    @property
    def is_known(self) -> Array:
        """Whether there are enough losses to compare."""
        return jnp.isfinite(self.first) & (self.place > 1)


class Progress(NamedTuple):
    """The losses so far, by rounds."""

    start: Array
    """The first two blocks."""
    losses: Array
    """Two rows: level and noise of each round."""
    steps: Array
    """Two rows: how many steps with losses there were before each round, and how many at all."""
    count: Array
    """Rounds that are remembered: the first of those above."""
    last: Array
    """The last two blocks."""
    fell: Array

    @classmethod
    def new(cls) -> Progress:
        """Before any loss."""
        two, steps, count = absent(2, 2), jnp.zeros((2, _ROOM + 1), jnp.int32), jnp.zeros((), jnp.int32)
        return cls(two, absent(2, _ROOM), steps, count, two, jnp.zeros((), bool))

    def after(self, apart: Apart, blocks: Blocks, end: Array, phase: Array) -> tuple[Progress, Outlook]:
        """A round of this phase has ended with these losses, of which there may be none."""
        noise = apart(lambda: self._noise(blocks))
        found = when(apart.sure, lambda one: one._with_round(blocks, noise, end, phase == Phase.FIRST), self)
        noises = found._noises
        scale = apart(lambda: found._scale(noises))
        fell, outlook = apart(lambda: found._outlook(scale))
        return found._replace(fell=fell), outlook

    def _noise(self, blocks: Blocks) -> Array:
        """Of a single step, by three neighbours each."""
        means, steps = blocks.behind(self.last)
        bends = jnp.abs(means[:-2] - 2 * means[1:-1] + means[2:])
        noises = bends / jnp.sqrt(1 / steps[:-2] + 4 / steps[1:-1] + 1 / steps[2:]) / HALF
        return jnp.where(count_of(noises) > 0, sum(middle(noises)) / 2, jnp.nan)

    def _with_round(self, blocks: Blocks, noise: Array, end: Array, is_first: Array) -> Progress:
        is_known, begun = blocks.count > 0, count_of(self.start[0])
        place = jnp.where(is_first & is_known, jnp.minimum(self.count, _FIRST_STEPS), self.count)
        steps = jnp.nansum(blocks.rows[1]).astype(jnp.int32)
        losses, ends = jnp.stack([sum(middle(blocks.mean)) / 2, noise]), jnp.stack([self._until(place) + steps, end])
        row = jnp.zeros_like(place)
        start = jax.lax.dynamic_update_slice(blocks.behind(self.start), blocks.rows, (row, begun))[:, :2]
        return self._replace(
            start=start,
            losses=jax.lax.dynamic_update_slice(self.losses, losses[:, None], (row, place)),
            steps=jax.lax.dynamic_update_slice(self.steps, ends[:, None], (row, place + 1)),
            count=jnp.where(is_known, place + 1, self.count),
            last=blocks.last(self.last),
        )

    def cleared(self) -> Progress:
        """Earlier losses are no measure any more."""
        none, no = jnp.full_like(self.last, jnp.nan), jnp.zeros_like(self.fell)
        return self._replace(start=none, count=jnp.zeros_like(self.count), last=none, fell=no)

    def rolled_back(self, before: Progress, step: Array) -> Progress:
        """The round that has just ended has diverged: training goes on from the weights of an earlier step.

        ``before``: without that round.
        """

        def is_later(count: Array) -> Array:
            return (count > 0) & (at(self.steps, 1, count) > step)

        count = jax.lax.while_loop(is_later, lambda count: count - 1, before.count)
        return self.cleared()._replace(start=before.start, count=count)

    # -- what follows -------------------------------------------------------------------------------------------------

    def has_fallen(self, deviations: float = SURE) -> Array:
        """Whether the loss is lower than it was, beyond its noise; also if nothing is known."""
        scale = self._scale(self._noises)
        return ~scale.is_known | self._any_fall(scale, deviations)[-1]

    @property
    def _noises(self) -> Array:
        """By size."""
        return jnp.sort(jnp.where(jnp.arange(_ROOM) < self.count, self.losses[1], jnp.nan))

    def _until(self, place: Array) -> Array:
        """Steps with losses before a round."""
        return at(self.steps, 0, place)

    def _above(self, first: Array, place: Array) -> tuple[Array, Array]:
        """A round's loss above the first, and its steps."""
        steps = self._until(place + 1) - self._until(place)
        return at(self.losses, 0, place) - first, steps.astype(first.dtype)

    def _scale(self, noises: Array) -> Scale:
        known, (means, steps) = up_to(jnp.inf, noises), self.start
        few, doubt = jnp.nansum(steps), 1 + FEW / jnp.sqrt(jnp.maximum(known, 1))
        median = (at(noises, jnp.maximum(known - 1, 0) >> 1) + at(noises, known >> 1)) / 2
        first, zero = jnp.nansum(means * steps) / few, number(0.0)
        least = jnp.maximum(LATEST * self._until(self.count), FEWEST)

        def longer(latest: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            place, total, many = latest
            above, steps = self._above(first, place - 1)
            return place - 1, total + above * steps, many + steps

        place, total, many = jax.lax.while_loop(
            lambda latest: (latest[2] < least) & (latest[0] > 0), longer, (self.count, zero, zero)
        )
        return Scale(first, few, jnp.where(known > 0, median, 0.0), doubt, place, total / many, 1 / many)

    def _outlook(self, scale: Scale) -> tuple[Array, Outlook]:
        """Whether the loss had clearly fallen at the end of any round, and what follows."""
        first = scale.first
        fell, is_below, has_not_risen, gained, _ = self._any_fall(scale)
        fell = self.fell | fell
        is_undone, has_gained = scale.is_known & (~has_not_risen | (fell & ~gained)), ~scale.is_known | gained
        return fell, Outlook(first, first + scale.latest, jnp.isnan(first) | is_below, has_gained, is_undone)

    def _any_fall(self, scale: Scale, deviations: float = SURE) -> Array:
        """Of any fall from a beginning to the latest losses: whether it is clear however little is known of the noise,
        is clear, is no rise, is not 0, and is beyond so many deviations and more than next to nothing."""
        first, few, single, doubt, zero = scale.first, scale.few, scale.single, scale.doubt, number(0.0)
        rounded = ROUNDED * jnp.abs(first)

        def answers(mean: Array, steps: Array) -> Array:
            fall, size, noise = mean - scale.latest, jnp.abs(first + mean), single * jnp.sqrt(1 / steps + scale.share)
            least = jnp.maximum(jnp.minimum(LEAST * size, FAR * single), ROUNDED * size)
            found = (
                fall > jnp.maximum(CLEAR * doubt * noise, rounded),
                fall > jnp.maximum(CLEAR * noise, rounded),
                ~(-fall > RISEN * doubt * noise),
                ~(fall <= 0),
                fall > jnp.maximum(deviations * noise, least),
            )
            return scale.is_known & jnp.stack(found)

        def goes_on(beginning: tuple[Array, Array, Array]) -> Array:
            """A round after a rise is in no beginning."""
            above, steps = self._above(first, beginning[0])
            return (beginning[0] < scale.place) & (above <= RISEN * single * jnp.sqrt(1 / few + 1 / steps))

        def longer(beginning: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            place, total, found = beginning
            above, steps = self._above(first, place)
            total, many = total + above * steps, self._until(place + 1)
            return place + 1, total, found | ((many > few) & answers(total / many, many))

        return jax.lax.while_loop(goes_on, longer, (jnp.zeros_like(self.count), zero, answers(zero, few)))[2]
