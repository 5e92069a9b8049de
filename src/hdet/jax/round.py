"""A round of steps: where it ends, which of its steps are sampled, and what every step adds to it."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from hdet.jax.numbers import Array, Sum, absent, number, quotient, where
from hdet.jax.progress import ENDS, LONGEST
from hdet.jax.schedule import Plan
from hdet.rule.constants import BLOCKS
from hdet.rule.constants import DEFAULT as C
from hdet.rule.enums import Phase

_ENDS = np.resize(np.array(ENDS, np.int32), (len(ENDS) // 32 + 1, 32))
"""In rows, the first ones again at the end: over rows this short, XLA makes one kernel of a minimum, not three."""


class Round(NamedTuple):
    """Where a round begins and ends, and what was sampled in it."""

    begun: Array
    """Steps that had been made when it began."""
    end: Array
    """Steps that will have been made when it ends."""
    sizes: Array
    """The largest absolute value of each gradient that was sampled; -1: not sampled yet."""
    returns: Array
    """Where the next call leads, to remove what rounding has left of a rollback; -1: it is a step of training."""

    @classmethod
    def beginning(cls, step: Array, phase: Array, plan: Plan, returns: Array = -1) -> Round:
        """After ``step`` steps."""
        sizes = jnp.full_like(absent(BLOCKS), -1.0)
        return cls(step, cls.end_of(step, phase, plan), sizes, jnp.asarray(returns, jnp.int32))

    @staticmethod
    def end_of(begun: Array, phase: Array, plan: Plan) -> Array:
        """The last two steps of a run end rounds too, and each step does until a first one was measured."""
        full = jnp.min(jnp.where(begun < _ENDS, _ENDS, LONGEST))
        end = jnp.minimum(full, jnp.where(begun < plan.total - 1, plan.total - 1, plan.total))
        return jnp.where(phase == Phase.FIRST, begun + 1, jnp.maximum(end, begun + 1))

    @property
    def length(self) -> Array:
        return self.end - self.begun

    @property
    def stride(self) -> Array:
        """Every such step is sampled."""
        return quotient(self.length + C.max_samples - 1, C.max_samples)


class Steps(NamedTuple):
    """What changes in every step."""

    made: Array
    """How many there were."""
    rate: Array
    """Of the last one, in units of the guess."""
    rates: Sum
    """Of all steps of the path."""
    losses: Array
    """Of the round. Three rows with a number for each block: the mean of its finite losses, how many these are, and
    whether any loss was given."""
    withheld: Array
    """Whether an update was withheld because it would have made weights NaN or infinite. Then no weight moves until the
    round ends."""

    @classmethod
    def new(cls) -> Steps:
        """Before the first one."""
        losses = jnp.zeros((3, BLOCKS), jnp.result_type(float)).at[0].set(jnp.nan)
        return cls(jnp.zeros((), jnp.int32), number(0.0), Sum.zero(), losses, jnp.zeros((), bool))

    def next(self, round: Round, rate: Array, loss: Array | None, is_sound: Array) -> Steps:
        """One more. Its loss counts as NaN if updates are withheld."""
        losses = self.losses
        if loss is not None:
            spot, count = self.made - round.begun, jnp.minimum(round.length, BLOCKS)
            is_its = jnp.arange(BLOCKS) == quotient((spot + 1) * count - 1, round.length)
            is_finite = is_its & jnp.isfinite(loss) & ~self.withheld
            mean, finite, given = losses
            more = jnp.where(finite > 0, mean + (loss - mean) / (finite + 1), loss)
            rows = jnp.where(is_finite, more, mean), finite + is_finite, jnp.where(is_its, 1.0, given)
            losses = jnp.stack(rows)
        return Steps(self.made + 1, rate, self.rates.plus(rate), losses, self.withheld | ~is_sound)

    def with_new_round(self, resets_path: Array) -> Steps:
        """The next step begins a round, and a path too if ``resets_path``."""
        fresh = Steps.new()
        return fresh._replace(made=self.made, rate=self.rate, rates=where(resets_path, fresh.rates, self.rates))

    def judged(self, round: Round, has_losses: Array, is_searching: Array) -> tuple[Array, Array, Array]:
        """What :class:`Blocks` are made of: losses or, if none was ever given, logarithms of the gradients' sizes."""
        length, sizes, k = round.length, round.sizes, jnp.arange(BLOCKS)
        count = jnp.minimum(length, BLOCKS)
        steps = quotient((k + 1) * length, count) - quotient(k * length, count)
        losses = self.losses[0], steps.astype(sizes.dtype), self.losses[2] > 0
        mean = jnp.where((sizes > 0) & jnp.isfinite(sizes), jnp.log(sizes), jnp.nan)
        instead = mean, jnp.ones_like(sizes), is_searching & (sizes != -1) & (sizes != 0)
        return where(has_losses, losses, instead)
