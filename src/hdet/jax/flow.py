"""Is an update the rate times something? This is read from the program that makes it; nothing is computed.

Each number in the program is of a :class:`Kind`. If the rate is an argument, updates must be proportional to it. If it
is a constant, as in ``optax.adam(1.0)``, it stands where the gradient's sign is turned, and what comes after must be
proportional to what comes out there: ``optax.clip`` is not, and does no harm before the rate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal


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


def kinds_of_results(function: Callable[..., Any], arguments: Sequence[Any], kinds: Sequence[Kind]) -> set[Kind]:
    """The kinds in what a function returns, from those of its arguments, each a tree of arrays or of their shapes."""
    given = [kind for tree, kind in zip(arguments, kinds, strict=True) for _ in jax.tree.leaves(tree)]
    return {*_results(jax.make_jaxpr(function)(*arguments), given, turns=Kind.RATED not in given)}


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
