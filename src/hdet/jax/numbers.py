"""Small arrays of numbers in which NaN means that nothing is there: the lists of the rule, at a fixed length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp

Array: TypeAlias = Any
"""A jax array, or a number where that will do. ``Any``: the types of jax are not there when hdet is checked."""
_Tree = TypeVar("_Tree")


def number(value: float) -> Array:
    """A float64 with ``jax_enable_x64``, else a float32."""
    return jnp.asarray(value, dtype=jnp.result_type(float))


def absent(count: int) -> Array:
    """Room for ``count`` numbers."""
    return jnp.full(count, jnp.nan, dtype=jnp.result_type(float))


def choose(condition: Array, yes: _Tree, no: _Tree) -> _Tree:
    """One of two trees of arrays."""
    found: _Tree = jax.tree.map(lambda a, b: jnp.where(condition, a, b), yes, no)
    return found


def typed_as(tree: _Tree, like: _Tree) -> _Tree:
    """Each array in the type of its counterpart, as loops require."""
    found: _Tree = jax.tree.map(lambda new, old: jnp.asarray(new, jnp.asarray(old).dtype), tree, like)
    return found


def when(condition: Array, change: Callable[[_Tree], _Tree], tree: _Tree) -> _Tree:
    """``change(tree)`` if the condition holds, else the tree.

    A loop of at most one turn: it hands its arrays on in place, while ``lax.cond`` copies all of them in every step.
    """

    def turn(carried: tuple[Array, _Tree]) -> tuple[Array, _Tree]:
        return jnp.zeros_like(carried[0]), typed_as(change(carried[1]), carried[1])

    found: _Tree = jax.lax.while_loop(lambda carried: carried[0], turn, (condition, tree))[1]
    return found


def running(values: Array) -> Array:
    """Sums up to each number. By a table: of a few numbers that compiles faster than a scan, and a rank than a sort."""
    count = len(values)
    return jnp.sum(jnp.where(jnp.tri(count, dtype=bool), values, 0), axis=1)


def pushed_left(values: Array, *more: Array) -> tuple[Array, ...]:
    """Those that are there come first, in their order; ``more``: arrays that go with them."""
    return _moved(running(~jnp.isnan(values)) - 1, values, more, len(values))


def pushed_right(count: int, values: Array, *more: Array) -> tuple[Array, ...]:
    """The last ``count`` of those that are there, at the end."""
    place = running(~jnp.isnan(values))
    return _moved(place - place[-1] + count - 1, values, more, count)


def _moved(places: Array, values: Array, more: tuple[Array, ...], count: int) -> tuple[Array, ...]:
    goes = (places[:, None] == jnp.arange(count)) & ~jnp.isnan(values)[:, None]
    is_there = jnp.any(goes, axis=0)
    rows = (jnp.sum(jnp.where(goes, row[:, None], 0), axis=0) for row in (values, *more))
    both = zip(rows, (jnp.nan, *[1] * len(more)), strict=True)
    return tuple(jnp.where(is_there, row, other) for row, other in both)


def ranked(values: Array) -> Array:
    """The rank of each number, from 0 on; those that are not there come last."""
    count = len(values)
    size = jnp.where(jnp.isnan(values), jnp.inf, values)
    is_earlier = jnp.tri(count, k=-1, dtype=bool)
    return jnp.sum((size < size[:, None]) | ((size == size[:, None]) & is_earlier), axis=1)


def kth(values: Array, rank: Array) -> Array:
    """The number of this rank; NaN: there are not as many."""
    is_it = (ranked(values) == rank) & ~jnp.isnan(values)
    return jnp.where(jnp.any(is_it), jnp.sum(jnp.where(is_it, values, 0)), jnp.nan)


def lower_median(values: Array) -> Array:
    """The lower one of the two in the middle."""
    return kth(values, (jnp.sum(~jnp.isnan(values)) - 1) // 2)


def median(values: Array) -> Array:
    """The mean of the two in the middle; NaN: there is no number."""
    return (lower_median(values) + kth(values, jnp.sum(~jnp.isnan(values)) // 2)) / 2


class Sum(NamedTuple):
    """A sum that does not lose small terms in float32: what rounding has lost is kept apart (Kahan)."""

    total: Array
    lost: Array

    @classmethod
    def zero(cls, *shape: int) -> Sum:
        return cls(*(jnp.zeros(shape, jnp.result_type(float)) for _ in range(2)))

    def plus(self, term: Array) -> Sum:
        """The sum and one term more."""
        term = term - self.lost
        total = self.total + term
        return Sum(total, (total - self.total) - term)
