"""The optimizer that a search is put around: how its rate is set, and whether that can be done at all."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from hdet.errors import ArgumentError
from hdet.jax.flow import Kind, kinds_of_results
from hdet.jax.measure import Tree
from hdet.jax.numbers import Array

_RATE = "learning_rate"
_INJECTED = (optax.InjectStatefulHyperparamsState, optax.InjectHyperparamsState)
_OWN_RATE = (
    *("COCOBState", "DAdaptAdamWState", "DoGState", "DoWGState", "MechanicState", "MomoAdamState", "MomoState"),
    *("ProdigyState", "ReduceLROnPlateauState", "ScaleByBacktrackingLinesearchState"),
    *("ScaleByDistanceOverGradientsState", "ScaleByRpropState", "ScaleByZoomLinesearchState", "ScheduleFreeState"),
)
"""States of optimizers that find a rate of their own: two searches in one would fight."""
_MANY = 100
"""Of more arrays than this one of each kind is looked at: the update of a thousand takes seconds to trace."""
_CURE = "give one whose updates are the rate times something, such as optax.adam(1.0)"


def _is_injected(node: Any) -> bool:
    return isinstance(node, _INJECTED) and _RATE in node.hyperparams


def parts_of(state: Tree, wanted: Callable[[Any], bool]) -> list[Any]:
    """Parts of a state, from the outside in."""
    leaves = jax.tree.leaves(state, is_leaf=wanted)
    return [leaf for leaf in leaves if wanted(leaf)]


def rates_in(state: Tree) -> tuple[Array, ...]:
    """The rates that ``optax.inject_hyperparams`` keeps in a state; none: updates are multiplied instead."""
    found = parts_of(state, _is_injected)
    return tuple(jnp.asarray(one.hyperparams[_RATE], jnp.result_type(float)) for one in found)


def with_rates(state: Tree, rates: tuple[Array, ...]) -> Tree:
    """The state with other rates, each of the type that was there."""
    rest = iter(rates)

    def put(node: Any) -> Any:
        if not _is_injected(node):
            return node
        rate = jnp.asarray(next(rest), jnp.asarray(node.hyperparams[_RATE]).dtype)
        return node._replace(hyperparams={**node.hyperparams, _RATE: rate})

    return jax.tree.map(put, state, is_leaf=_is_injected)


# -- which optimizers can be searched ---------------------------------------------------------------------------------


def check_base(base: Any) -> None:
    """Raise if two weights show that the rate of an optimizer cannot be found.

    One that cannot do with two weights, since it is made for the names in a tree, shows nothing here.
    """
    if not isinstance(base, optax.GradientTransformation):
        raise ArgumentError(
            f"base must be an optax optimizer, but got {type(base).__name__}; for instance optax.adam(1.0), or "
            "optax.inject_hyperparams(optax.adam)(learning_rate=1e-3)"
        )
    with jax.ensure_compile_time_eval():
        weights = {"w": jnp.ones(2)}
        try:
            state = base.init(weights)
        except Exception:
            return
        rates = [float(rate) for rate in rates_in(state)]
    check_updates(base, state, weights)
    if not all(0 < rate < math.inf for rate in rates):
        raise ArgumentError(
            f"the learning_rate in optax.inject_hyperparams must be above 0 and finite, but got {rates}; any guess "
            "will do, such as 1e-3"
        )


def check_updates(base: optax.GradientTransformation, state: Tree, params: Tree) -> None:
    """Raise if the rate of an optimizer with this state cannot be found. Nothing is computed."""
    _check_state(state)
    kinds = _kinds(base, _few(params)) or _kinds(base, params)
    if kinds is None and _kinds(base, params, value=1.0) is not None:
        raise ArgumentError(
            f"base must make updates without the loss, but this one asks for value=, to find a rate of its own; {_CURE}"
        )
    right = {Kind.FREE, Kind.RATED} if rates_in(state) else {*Kind} - {Kind.BENT}
    if not (kinds or set()) <= right:
        raise ArgumentError(
            "base must make updates that are proportional to its rate, but something in this one does not scale with "
            "it, such as clipping or decay after the rate; put it first: optax.chain(optax.clip_by_global_norm(1.0), "
            "optax.adam(1.0)), and inject the rates of all groups or of none"
        )


def _check_state(state: Tree) -> None:
    own = parts_of(state, lambda node: type(node).__name__ in _OWN_RATE)
    if own:
        raise ArgumentError(
            f"base must not find a rate of its own, but got one with a {type(own[0]).__name__}; {_CURE}, or use it "
            "without hdet.jax.auto"
        )
    if parts_of(state, lambda node: isinstance(node, optax.ScaleByScheduleState)) or any(
        _RATE in getattr(one, "hyperparams_states", {}) for one in parts_of(state, _is_injected)
    ):
        raise ArgumentError(
            "the learning rate of base must be a number, but got a schedule, which would be multiplied by that of the "
            "search; give the schedule apart: hdet.jax.auto(optax.adam(1.0), total_steps, schedule=your_schedule)"
        )


def _kinds(base: optax.GradientTransformation, params: Tree, **more: Any) -> set[Kind] | None:
    """Of the updates; None: the optimizer cannot make any of these."""

    def updates(rates: tuple[Array, ...], gradients: Tree, state: Tree, params: Tree) -> Tree:
        return base.update(gradients, with_rates(state, rates), params, **more)[0]

    try:
        state = jax.eval_shape(base.init, params)
        trees = jax.eval_shape(lambda state: (rates_in(state), params, state, params), state)
        return kinds_of_results(updates, trees, (Kind.RATED, Kind.GRADIENT, Kind.FREE, Kind.FIXED))
    except Exception:
        return None


def _few(params: Tree) -> Tree:
    """Of many arrays, those that differ from earlier ones in more than numbers in the path: layers are alike."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(params)
    if len(leaves) <= _MANY:
        return params
    kinds = [(re.sub(r"\d+", "", jax.tree_util.keystr(path)), x.shape, x.dtype) for path, x in leaves]
    first = {kind: i for i, kind in reversed([*enumerate(kinds)])}
    return jax.tree.unflatten(structure, [x if first[kinds[i]] == i else None for i, (_, x) in enumerate(leaves)])
