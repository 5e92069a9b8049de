"""The functions of an array module, for plain numbers.

The rule is arithmetic on numbers or on arrays: torch's search gives it this module as ``xp``, ``hdet.jax`` gives it
:mod:`hdet.jax.numbers`. Both branches of :func:`where` are computed, so that none may raise for what is not chosen.
"""

from __future__ import annotations

import math
from operator import not_ as logical_not
from typing import TypeVar

__all__ = ["clip", "exp", "isfinite", "isinf", "isnan", "log", "logical_not", "maximum", "minimum", "sqrt", "where"]

_Value = TypeVar("_Value")
exp, sqrt = math.exp, math.sqrt
isfinite, isinf, isnan = math.isfinite, math.isinf, math.isnan
minimum, maximum = min, max


def where(condition: bool, yes: _Value, no: _Value) -> _Value:
    """One of two."""
    return yes if condition else no


def clip(number: float, low: float, high: float) -> float:
    """The number, within bounds."""
    return min(max(number, low), high)


def log(number: float) -> float:
    """The logarithm, -infinite for 0.

    >>> log(1.0), log(0.0)
    (0.0, -inf)
    """
    return math.log(number) if number > 0 or math.isnan(number) else -math.inf
