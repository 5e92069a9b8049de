"""The optimizer that a search is put around: how its rate is set, and whether that can be done at all.

Is an update the rate times something? This is read from the program that makes it; nothing is computed. Each number in
the program is of a :class:`Kind`. If the rate is an argument, updates must be proportional to it. If it is a constant,
as in ``optax.adam(1.0)``, it stands where the gradient's sign is turned, and what comes after must be proportional to
what comes out there: ``optax.clip`` is not, and does no harm before the rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import ClosedJaxpr, Literal

from hdet.checks import must_be
from hdet.errors import ArgumentError
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
    cure = "for instance optax.adam(1.0), or optax.inject_hyperparams(optax.adam)(learning_rate=1e-3)"
    must_be("an optax optimizer", isinstance(base, optax.GradientTransformation), cure, base=base)
    with jax.ensure_compile_time_eval():
        weights = {"w": jnp.ones(2)}
        try:
            state = base.init(weights)
        except Exception:
            return
        rates = [float(rate) for rate in rates_in(state)]
    check_updates(base, state, weights)
    fits = all(0 < rate < math.inf for rate in rates)
    must_be("above 0 and finite", fits, "any guess will do, such as 1e-3", learning_rate=rates)


def check_updates(base: optax.GradientTransformation, state: Tree, params: Tree) -> None:
    """Raise if the rate of an optimizer with this state cannot be found. Nothing is computed."""
    kinds, own = _kinds(base, params), parts_of(state, lambda node: type(node).__name__ in _OWN_RATE)
    if own or (kinds is None and _kinds(base, params, value=1.0) is not None):
        what = f"has a {type(own[0]).__name__}" if own else "asks for value=, the loss"
        raise ArgumentError(
            f"base must not find a rate of its own, but got one that {what}; give one whose updates are the rate times "
            "something, such as optax.adam(1.0), or use it without hdet.jax.auto"
        )
    if parts_of(state, lambda node: isinstance(node, optax.ScaleByScheduleState)) or any(
        _RATE in getattr(one, "hyperparams_states", {}) for one in parts_of(state, _is_injected)
    ):
        raise ArgumentError(
            "the learning rate of base must be a number, but got a schedule, which would be multiplied by that of the "
            "search; give the schedule apart: hdet.jax.auto(optax.adam(1.0), total_steps, schedule=your_schedule)"
        )
    right = {Kind.FREE, Kind.RATED} if rates_in(state) else {*Kind} - {Kind.BENT}
    if not (kinds or set()) <= right:
        raise ArgumentError(
            "base must make updates that are proportional to its rate, but something in this one does not scale with "
            "it, such as clipping or decay after the rate; put it first: optax.chain(optax.clip_by_global_norm(1.0), "
            "optax.adam(1.0)), and inject the rates of all groups or of none"
        )


def _kinds(base: optax.GradientTransformation, params: Tree, **more: Any) -> set[Kind] | None:
    """Of the updates; None: the optimizer cannot make any of these."""

    def updates(rates: tuple[Array, ...], gradients: Tree, state: Tree, params: Tree) -> Tree:
        return base.update(gradients, with_rates(state, rates), params, **more)[0]

    try:
        state = jax.eval_shape(base.init, params)
        trees = jax.eval_shape(lambda state: (rates_in(state), params, state, params), state)
        kinds = zip(trees, (Kind.RATED, Kind.GRADIENT, Kind.FREE, Kind.FIXED), strict=True)
        given = [kind for tree, kind in kinds for _ in jax.tree.leaves(tree)]
        return {*_results(jax.make_jaxpr(updates)(*trees), given, turns=Kind.RATED not in given)}
    except Exception:
        return None


# -- the program of an update -----------------------------------------------------------------------------------------


class Kind(IntEnum):
    """What a number is made of. A result is of the highest kind of its operands unless :func:`_result` differs."""

    FREE = 0
    """Zeros, and what the optimizer remembers: they may be proportional to anything."""
    FIXED = 1
    """Weights, and other numbers."""
    NEGATIVE = 2
    """A constant below 0."""
    GRADIENT = 3
    RATED = 4
    """Proportional to the rate."""
    BENT = 5
    """It depends on the rate and is not proportional to it."""


_PROGRAMS = ("jaxpr", "call_jaxpr", "body_jaxpr", "branches")
"""Parameters of operations that have programs inside: jit, scan, while, cond and their like."""
_PRODUCTS = ("mul", "dot_general", "conv_general_dilated")
_CURVED = (
    *("sign", "sqrt", "rsqrt", "cbrt", "square", "integer_pow", "pow", "exp", "exp2", "expm1", "log", "log1p"),
    *("tanh", "logistic", "erf", "sin", "cos", "atan2", "round", "floor", "ceil", "rem"),
)
_KEEPS_SIGN = ("neg", "mul", "div", "convert_element_type", "broadcast_in_dim", "copy")


def _results(program: Any, given: Sequence[Kind], turns: bool) -> list[Kind]:
    """The kinds of a program's results; ``given``: those of its arguments, and maybe of others before them.

    ``turns``: the rate stands where the sign is turned.
    """
    jaxpr, constants = (program.jaxpr, program.consts) if isinstance(program, ClosedJaxpr) else (program, ())
    given = [*map(_of_constant, constants), *given[len(given) - len(jaxpr.invars) :]]
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], given, strict=True))

    def read(atoms: Iterable[Any]) -> list[Kind]:
        return [_of_constant(atom.val) if isinstance(atom, Literal) else known[atom] for atom in atoms]

    for operation in jaxpr.eqns:
        kinds, inner = read(operation.invars), [operation.params.get(name, ()) for name in _PROGRAMS]
        programs = [one for some in inner for one in (some if isinstance(some, tuple) else (some,))]
        if programs:
            bends = operation.primitive.name == "cond" and kinds[0] == Kind.BENT
            ways = zip(*(_results(one, kinds, turns) for one in programs), strict=True)
            found = [Kind.BENT if bends else _sum(way) for way in ways]
        else:
            found = [_result(operation, kinds, turns) for _ in operation.outvars]
        known.update(zip(operation.outvars, found, strict=True))
    return read(jaxpr.outvars)


def _of_constant(value: Any) -> Kind:
    is_number = jnp.ndim(value) == 0 and jnp.issubdtype(jnp.result_type(value), jnp.number)
    if not is_number or isinstance(value, jax.core.Tracer):
        return Kind.FIXED
    known = np.asarray(value)
    return Kind.FREE if known == 0 else Kind.NEGATIVE if known.real < 0 else Kind.FIXED


def _sum(kinds: Iterable[Kind]) -> Kind:
    """Of numbers that are added, or of which one is chosen."""
    found = {*kinds}
    is_mixed = Kind.RATED in found and found & {Kind.FIXED, Kind.NEGATIVE, Kind.GRADIENT}
    return Kind.BENT if is_mixed else max(found, default=Kind.FIXED)


def _result(operation: Any, kinds: list[Kind], turns: bool) -> Kind:
    name, top, out = operation.primitive.name, max(kinds, default=Kind.FIXED), operation.outvars[0].aval
    if top in (Kind.FIXED, Kind.NEGATIVE):
        if name in _PRODUCTS and Kind.FREE in kinds:
            return Kind.FREE
        is_scalar = out.ndim == 0 or name == "broadcast_in_dim"
        signs = kinds.count(Kind.NEGATIVE) + (name == "neg")
        return Kind.NEGATIVE if is_scalar and name in _KEEPS_SIGN and signs % 2 else Kind.FIXED
    if turns and top >= Kind.GRADIENT and (name == "neg" or (name in ("mul", "div") and Kind.NEGATIVE in kinds)):
        return Kind.RATED
    if top != Kind.RATED:
        return top
    if out.dtype == bool:  # proportional numbers compare alike at any rate
        return Kind.FIXED if {*kinds} <= {Kind.FREE, Kind.RATED} else Kind.BENT
    if name in _CURVED:
        return Kind.RATED if operation.params.get("y") == 1 else Kind.BENT
    if name in _PRODUCTS:
        return Kind.RATED if kinds.count(Kind.RATED) == 1 else Kind.BENT
    if name == "div":
        return Kind.RATED if kinds[1] != Kind.RATED else Kind.BENT
    both = zip(kinds, operation.invars, strict=True)
    return _sum(kind for kind, atom in both if jnp.issubdtype(atom.aval.dtype, jnp.inexact))  # not indices, conditions
