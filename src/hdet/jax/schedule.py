"""The schedule of a search: a trapezoid whose fall can be moved, or the shape of an optax schedule."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hdet.checks import must_be
from hdet.errors import ArgumentError
from hdet.jax.numbers import Array, number
from hdet.jax.progress import LONGEST
from hdet.rule.constants import CLIMB, DEFAULT, DIV_FACTOR, FINAL_DIV_FACTOR, HOLD, RISE

_FLOOR, _START = 1 / (DIV_FACTOR * FINAL_DIV_FACTOR), 1 / DIV_FACTOR
"""Of the peak: where a trapezoid ends, and where it begins without a search."""
_POINTS = 2**20
"""So many steps of a schedule are looked at for its peak, at most."""


class Plan(NamedTuple):
    """Where the schedule rises and falls."""

    total: Array
    """Steps of the run; :data:`hdet.jax.progress.LONGEST`: the length is unknown."""
    peak: Array
    """Where the search's own climb ends, and a trapezoid's rise."""
    falls_from: Array
    is_given: Array
    """Whether the run follows a schedule of the user's, which has an end of its own."""

    @classmethod
    def of(cls, total_steps: int | None, shape: Shape | None) -> Plan:
        """Of a run; ``shape``: that of a schedule of the user's."""
        peak = DEFAULT.min_steps if total_steps is None else RISE * total_steps - 1
        if shape is not None:
            peak = max(shape.step, CLIMB * (total_steps or 0))
        total, hold = jnp.asarray(total_steps or LONGEST, jnp.int32), HOLD * (total_steps or 0) - 1
        return cls(total, number(peak), number(hold), jnp.asarray(shape is not None))

    @property
    def is_endless(self) -> Array:
        return self.total == LONGEST

    def held(self, t: Array) -> Array:
        """A trapezoid over its peak, held at 1 until it falls, by 1 - sqrt."""
        span = self.total - 1 - self.falls_from
        part = jnp.where(span > 0, jnp.clip((t - self.falls_from) / span, 0.0, 1.0), 0.0)
        return jnp.where(self.is_endless, 1.0, _FLOOR + (1 - _FLOOR) * (1 - jnp.sqrt(part)))

    def plain(self, t: Array) -> Array:
        """The same with its rise, along a line."""
        rising = _START + (1 - _START) * t / jnp.where(self.peak > 0, self.peak, 1.0)
        return jnp.where(t < self.peak, rising, self.held(t))

    def finished(self, now: Array, steps: int) -> Plan:
        """It falls over ``steps`` steps from ``now`` on; if it falls already, it does so faster, or slower."""
        has_fallen = (now > self.falls_from) & ~self.is_endless & (steps > 1)
        pace = number(steps - 1.0) / jnp.maximum(self.total - 1 - now, 1)
        begin = jnp.where(has_fallen, now + pace * (self.falls_from - now), now - 1).astype(self.peak.dtype)
        return self._replace(total=(now + steps).astype(self.total.dtype), peak=begin, falls_from=begin)


class Shape(NamedTuple):
    """A schedule of the user's, over its peak."""

    schedule: Callable[[Array], Array]
    step: int
    """Of its peak: the first step at which it is highest."""
    rate: float

    @classmethod
    def of(cls, schedule: Any, total_steps: int) -> Shape:
        """Raises unless it gives a finite number for each step, and one above 0."""
        cure = f"for instance optax.cosine_decay_schedule(1.0, {total_steps})"
        must_be("a function from a step to a rate, as optax's are", callable(schedule), cure, schedule=schedule)
        steps = np.arange(0, total_steps, math.ceil(total_steps / _POINTS), dtype=np.int32)
        with jax.ensure_compile_time_eval():
            values = np.asarray(jax.vmap(lambda t: jnp.asarray(schedule(t), jnp.result_type(float)))(steps))
        if values.shape != steps.shape or not np.isfinite(values).all() or not values.max() > 0 or values.min() < 0:
            raise ArgumentError(
                f"schedule must give one finite number for each of {total_steps} steps, not below 0 and not always 0, "
                f"but got values from {values.min()} to {values.max()}, of shape {values.shape[1:]}; {cure}"
            )
        first = int(np.argmax(values >= values.max() * (1 - 1e-6)))
        return cls(schedule, int(steps[first]), float(values.max()))

    def plain(self, t: Array) -> Array:
        """Over its peak."""
        return jnp.asarray(self.schedule(t), jnp.result_type(float)) / self.rate

    def held(self, t: Array) -> Array:
        """The same, and 1 until the peak."""
        return jnp.where(t < self.step, 1.0, self.plain(t))
