"""The estimated rate, and how far the weights have moved: :mod:`hdet.rule.estimate` on trees of arrays.

Reductions over sharded arrays are XLA's: every device has the same sums.
"""

from __future__ import annotations

from functools import reduce
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from hdet.jax import numbers as xp
from hdet.jax.numbers import Array, number, where
from hdet.rule import estimate as rule
from hdet.rule.estimate import PathSums, Sums, weight_ratio

_Tree = TypeVar("_Tree")
Tree = Any
"""Of arrays: weights, gradients, updates."""


def as_exact(tree: Tree) -> Tree:
    """At least in float32, so that a small displacement survives."""
    return jax.tree.map(lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32)), tree)


def copied(tree: _Tree, params: Tree) -> _Tree:
    """In buffers of its own: a state may be donated only if no two of its arrays are one.

    Of params on a mesh of devices, numbers that are on one device are put on all, as the first step would leave them:
    otherwise the second would be compiled again.
    """
    places = [getattr(x, "sharding", None) for x in jax.tree.leaves(params)]
    meshes = [place.mesh for place in places if isinstance(place, NamedSharding)]

    def copy(x: Array) -> Array:
        x = jnp.array(x, copy=True)
        is_alone = not isinstance(x, jax.core.Tracer) and len(x.sharding.device_set) == 1
        return jax.device_put(x, NamedSharding(meshes[0], PartitionSpec())) if meshes and is_alone else x

    return jax.tree.map(copy, tree)


def difference(left: Tree, right: Tree) -> Tree:
    """Their difference, at least in float32."""
    return jax.tree.map(lambda a, b: a - b, as_exact(left), as_exact(right))


def dot(left: Tree, right: Tree) -> Array:
    """The inner product of two trees; a complex number counts as two."""
    products = jax.tree.map(lambda a, b: jnp.real(jnp.vdot(a, b)), left, right)
    return reduce(jnp.add, jax.tree.leaves(products), number(0.0)).astype(jnp.result_type(float))


def norms(tree: Tree) -> Array:
    """Of each array."""
    return jnp.stack([jnp.linalg.norm(x.ravel()) for x in jax.tree.leaves(tree)]).astype(jnp.result_type(float))


def largest(tree: Tree) -> Array:
    """The largest number; NaN is not hidden."""
    sizes = [jnp.max(jnp.abs(x), initial=0.0) for x in jax.tree.leaves(tree)]
    return reduce(jnp.maximum, sizes, number(0.0)).astype(jnp.result_type(float))


def sizes_of(tree: Tree) -> Array:
    """How many real numbers each array has."""
    sizes = [x.size * (2 if jnp.iscomplexobj(x) else 1) for x in jax.tree.leaves(tree)]
    return jnp.asarray(sizes, jnp.result_type(float))


def typical_norm(sizes: Array, lengths: Array, moves: Array) -> Array:
    """The norm of weights of which no minority decides; see :func:`hdet.rule.estimate.typical_norm`."""
    each, is_moved = lengths / jnp.sqrt(jnp.maximum(sizes, 1)), (sizes > 0) & (moves > 0)
    counted = jnp.where(is_moved & (each > 0), sizes, 0.0)
    up_to = jnp.sum(jnp.where(each <= each[:, None], counted, 0.0), axis=1)
    middle = jnp.min(jnp.where((counted > 0) & (up_to >= jnp.sum(counted) / 2), each, jnp.inf))
    return jnp.sqrt(jnp.sum(jnp.where(is_moved, sizes * jnp.minimum(each, middle) ** 2, 0.0)))


class Measured(rule.Measured):
    """What the steps have come to, as arrays. Rates are in units of the guess."""

    @property
    def gradient(self) -> Array:
        """The largest of all ``gradients``; below 0: none was sampled there. NaN is not hidden."""
        return jnp.max(self.gradients, initial=0.0)


class Path(NamedTuple):
    """The sums over the path since its origin. Rates are in units of the guess.

    The weights at the origin and the weighted sum of gradients are trees, which the methods are given.
    """

    sums: PathSums
    begun: Array
    """Steps that had been made at the origin."""
    rate: Array
    """Of the step that was sampled last."""
    typical: Array
    """The typical norm of the weights over their norm."""

    @classmethod
    def new(cls) -> Path:
        """Before the first step."""
        zero = number(0.0)
        return cls(PathSums(zero, zero, zero, zero), jnp.zeros((), jnp.int32), zero, number(1.0))

    def sampled(
        self, trees: tuple[Tree, Tree], gradients: Tree, params: Tree, rate: Array, rates: Array, step: Array
    ) -> tuple[tuple[Tree, Tree], Path]:
        """Add the gradients of a step to origin and sum, the ``trees``, and to the path.

        ``rate``: of the step; ``rates``: the sum of those before it; ``step``: steps before it.
        """
        begins, g, w = step == self.begun, as_exact(gradients), weight_ratio(self.rate, rate, xp)
        origin = where(begins, as_exact(params), trees[0])
        total = jax.tree.map(lambda s, x: jnp.where(begins, x, s * w.astype(s.real.dtype) + x), trees[1], g)
        known = where(begins, PathSums(), self.sums)
        sums = known.with_step(dot(g, difference(origin, params)), rates, w)
        return (origin, total), self._replace(sums=sums, rate=rate)

    def measured(
        self, sizes: Array, lengths: Array, moves: Array, denominator: Array, rates: Array, is_first: Array
    ) -> tuple[Measured, Path]:
        """What has come of a path; and the path, which learns the typical norm of the weights from a first step.

        Args:
            sizes: how many numbers each array has.
            lengths: its norm at the origin.
            moves: by how much it has moved.
            denominator: the inner product of the sum of gradients and the displacement.
            rates: the sum of those of all steps.
            is_first: whether a first step was made, of which only the length counts.
        """
        move, length = jnp.linalg.norm(moves), jnp.linalg.norm(lengths)
        found = typical_norm(sizes, lengths, moves) / length
        learns = is_first & (found > 0) & (found < jnp.inf)
        typical = jnp.where(learns, found, self.typical)
        size = length * typical
        moved = jnp.nan_to_num(jnp.where(size > 0, move / size, move), nan=jnp.inf, posinf=jnp.inf)
        is_whole = jnp.isfinite(self.sums.numerator) & jnp.isfinite(denominator)
        sums = where(is_whole & ~is_first, self.sums.over(denominator, rates), Sums(0.0, 0.0, 0.0))
        estimated, straight = rule.estimate(sums, xp), rule.straightness(sums, xp)
        measured = Measured(moved, move, estimated, straight, rule.balance(sums, xp), is_broken=~is_first & ~is_whole)
        return measured, self._replace(typical=typical)
