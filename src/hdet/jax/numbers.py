"""Small arrays of numbers in which NaN means that nothing is there: the lists of the rule, at a fixed length.

This is also the array module that :mod:`hdet.rule` takes as ``xp``, with the functions of
:class:`hdet.rule.state.Plain`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

Array: TypeAlias = Any
"""A jax array, or a number where that will do. ``Any``: the types of jax are not there when hdet is checked."""
_Tree = TypeVar("_Tree")
clip, exp, log, maximum, minimum, sqrt = jnp.clip, jnp.exp, jnp.log, jnp.maximum, jnp.minimum, jnp.sqrt
isfinite, isinf, isnan, logical_not = jnp.isfinite, jnp.isinf, jnp.isnan, jnp.logical_not


def number(value: float) -> Array:
    """A float64 with ``jax_enable_x64``, else a float32."""
    return jnp.asarray(value, dtype=jnp.result_type(float))


def absent(*shape: int) -> Array:
    """Room for an array of numbers."""
    return jnp.full(shape, jnp.nan, dtype=jnp.result_type(float))


def where(condition: Array, yes: _Tree, no: _Tree) -> _Tree:
    """One of two trees of arrays."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), yes, no)


def typed_as(tree: _Tree, like: _Tree) -> _Tree:
    """Each array in the type of its counterpart, as loops require."""

    def typed(new: Array, old: Array) -> Array:
        return new if getattr(new, "dtype", None) == old.dtype else jnp.asarray(new, old.dtype)

    return jax.tree.map(typed, tree, like)


def when(condition: Array, change: Callable[[_Tree], _Tree], tree: _Tree) -> _Tree:
    """``change(tree)`` if the condition holds, else the tree.

    A loop of at most one turn: it hands its arrays on in place, while ``lax.cond`` copies all of them in every step.
    """

    def turn(carried: tuple[Array, _Tree]) -> tuple[Array, _Tree]:
        return jnp.zeros_like(carried[0]), typed_as(change(carried[1]), carried[1])

    return jax.lax.while_loop(lambda carried: carried[0], turn, (condition, tree))[1]


class Apart(NamedTuple):
    """Calls a function apart from all else, so that it compiles fast.

    XLA copies what a number is made of into the kernel of each number that is made of it, and a kernel takes 20 ms to
    compile. What comes out of a loop is not copied. On a CPU, a loop is even one kernel if all that it reads and writes
    is less than 1 kB, and it does not sort.
    """

    sure: Array
    """A truth value that is true, which XLA cannot know."""

    def __call__(self, make: Callable[[], _Tree]) -> _Tree:
        made = jax.jit(make)  # so that it is traced once
        return when(self.sure, lambda _: made(), jax.tree.map(_any, jax.eval_shape(made)))


def _any(like: Any) -> Array:
    """Some constant; of equal numbers, XLA would fill the array by a kernel."""
    return (np.arange(like.size) == 0).reshape(like.shape).astype(like.dtype)


def quotient(number: Array, by: Array) -> Array:
    """``number // by`` of integers that are not negative, in one operation instead of ten."""
    return jax.lax.div(*(jnp.asarray(x, jnp.int32) for x in (number, by)))


def count_of(values: Array) -> Array:
    """How many are there."""
    return jnp.sum(~jnp.isnan(values), dtype=jnp.int32)


def at(values: Array, *place: Array) -> Array:
    """One of them."""
    indices = [jnp.asarray(index, jnp.int32) for index in place]
    return jax.lax.dynamic_slice(values, indices, (1,) * len(place)).reshape(())


def up_to(limit: Array, ordered: Array) -> Array:
    """How many are there, and not above the limit; ``ordered``: by size, and NaN last."""
    return jnp.searchsorted(ordered, limit, side="right").astype(jnp.int32)


def middle(values: Array) -> tuple[Array, Array]:
    """The two numbers in the middle; infinite: there is none. All are compared with all, which needs no sort."""
    count, lower = count_of(values), jnp.sum(values <= values[:, None], axis=1)
    ranks = (count - 1) >> 1, count >> 1
    low, high = (jnp.min(jnp.where(lower > rank, values, jnp.inf)) for rank in ranks)
    return low, high


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
