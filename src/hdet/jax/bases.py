"""The optimizer that a search is put around: how its rate is set, and whether that can be done at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hdet.errors import ArgumentError
from hdet.jax.measure import Tree
from hdet.jax.numbers import Array

_RATE = "learning_rate"
_INJECTED = (optax.InjectStatefulHyperparamsState, optax.InjectHyperparamsState)
_OWN_RATE = (
    "DAdaptAdamWState",
    "DoGState",
    "DoWGState",
    "MechanicState",
    "MomoAdamState",
    "MomoState",
    "ProdigyState",
    "ReduceLROnPlateauState",
    "ScheduleFreeState",
    "COCOBState",
    "ScaleByBacktrackingLinesearchState",
    "ScaleByZoomLinesearchState",
)
"""States of optimizers that find a rate of their own: two searches in one would fight."""
_CURE = "give one whose updates are the rate times something, such as optax.adam(1.0)"


def _is_injected(node: Any) -> bool:
    return isinstance(node, _INJECTED) and _RATE in node.hyperparams


def _parts(state: Tree, wanted: Callable[[Any], bool]) -> list[Any]:
    """Parts of a state, from the outside in."""
    leaves = jax.tree.leaves(state, is_leaf=wanted)
    return [leaf for leaf in leaves if wanted(leaf)]


def rates_in(state: Tree) -> tuple[Array, ...]:
    """The rates that ``optax.inject_hyperparams`` keeps in a state; none: updates are multiplied instead."""
    found = _parts(state, _is_injected)
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


def check_state(state: Tree) -> None:
    """Raise if the rate of an optimizer with this state cannot be found."""
    own = _parts(state, lambda node: type(node).__name__ in _OWN_RATE)
    if own:
        raise ArgumentError(
            f"base must not find a rate of its own, but got one with a {type(own[0]).__name__}; {_CURE}, or use it "
            "without hdet.jax.auto"
        )
    for one in _parts(state, _is_injected):
        if _RATE in getattr(one, "hyperparams_states", {}):
            raise ArgumentError(
                "the learning_rate in optax.inject_hyperparams must be a number, the guess, but got a schedule; give "
                "the schedule to hdet.jax.auto(..., schedule=...)"
            )


_WEIGHTS, _GRADIENT = {"w": np.array([1.0, -2.0], np.float32)}, {"w": np.array([0.25, 0.5], np.float32)}


def _second(base: optax.GradientTransformation, state: Tree, rates: tuple[Array, ...]) -> Array:
    """The second update: the first one of some is 0."""
    weights, gradient = (jax.tree.map(jnp.asarray, tree) for tree in (_WEIGHTS, _GRADIENT))
    _, state = base.update(gradient, with_rates(state, rates), weights)
    return base.update(gradient, with_rates(state, rates), weights)[0]["w"]


def check_base(base: Any) -> None:
    """Raise unless updates are proportional to the rate, as far as two weights show. Nothing is traced.

    A base that cannot do with two weights, since it is made for the names in a tree, shows nothing here.
    """
    if not isinstance(base, optax.GradientTransformation):
        raise ArgumentError(
            f"base must be an optax optimizer, but got {type(base).__name__}; for instance optax.adam(1.0), or "
            "optax.inject_hyperparams(optax.adam)(learning_rate=1e-3)"
        )
    with jax.ensure_compile_time_eval():
        try:
            state = base.init(jax.tree.map(jnp.asarray, _WEIGHTS))
        except Exception:
            return
        check_state(state)
        rates = rates_in(state)
        if not all(bool((rate > 0) & (rate < jnp.inf)) for rate in rates):
            raise ArgumentError(
                f"the learning_rate in optax.inject_hyperparams must be above 0 and finite, but got "
                f"{[float(rate) for rate in rates]}; any guess will do, such as 1e-3"
            )
        try:
            full, half = (_second(base, state, tuple(part * rate for rate in rates)) for part in (1.0, 0.5))
        except Exception:
            return
        if rates and not bool(jnp.allclose(full, 2 * half, rtol=1e-3, atol=0.0)):
            raise ArgumentError(
                f"base must make updates that are proportional to its rate, but at half the rate they are {half} and "
                f"not half of {full}; {_CURE}"
            )
