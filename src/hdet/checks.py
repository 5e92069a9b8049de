"""Checks of arguments and of states, before anything is changed. Messages say the value, the rule and the cure."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Collection
from numbers import Integral, Real
from typing import Any

from hdet.errors import ArgumentError

_LONGEST = 200


def is_int(value: object) -> bool:
    """Whether it is an integer that a float can hold; True and False are not."""
    return isinstance(value, Integral) and is_real(value)


def is_real(value: object) -> bool:
    """Whether it is a real number that a float can hold, or NaN or infinite; True and False are not.

    >>> is_real(3), is_real(math.inf), is_real(10**400), is_real(True)
    (True, True, False, False)
    """
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    try:
        float(value)
    except OverflowError:
        return False
    return True


def is_finite(value: object) -> bool:
    """Whether it is a finite real number.

    >>> is_finite(0.5), is_finite(3), is_finite(True), is_finite("3"), is_finite(math.inf), is_finite(10**400)
    (True, True, False, False, False, False)
    """
    return is_real(value) and math.isfinite(value)  # type: ignore[arg-type]  # a number


def is_one_of(value: object, words: Collection[str | None]) -> bool:
    """Whether it is one of some words. An array is not, though ``==`` would compare each of its elements."""
    return (value is None or isinstance(value, str)) and value in words


def items_of(value: Any) -> list[Any] | None:
    """The items of a list or of anything else that can be iterated over; None if there are none to be had.

    A tensor or an array without dimensions says that it can be iterated over, and cannot; and so does what has items by
    name.
    """
    try:
        return list(value)
    except (TypeError, KeyError):
        return None


def takes(function: Any, *arguments: object) -> bool:
    """Whether it is a function that can be called with these arguments, as far as Python knows; classes do not count.

    >>> takes(lambda x: x, 1), takes(lambda x: x), takes(3), takes(int)
    (True, False, False, False)
    """
    if not callable(function) or isinstance(function, type):
        return False
    try:
        inspect.signature(getattr(function, "forward", function)).bind(*arguments)  # a module's __call__ takes anything
    except TypeError:
        return False
    except ValueError:  # written in C
        return True
    module = getattr(sys.modules.get("torch.nn"), "Module", None)
    own = getattr(getattr(function, "forward", None), "__func__", None)
    return module is None or own is not module.forward  # that one raises: the user's class has none


def shown(value: object) -> str:
    """A text for messages, of at most a few lines.

    >>> shown([1, 2]), len(shown("x" * 10**7)), shown(10**9999)
    ('[1, 2]', 203, 'an object of class int without a text of its own')
    """
    try:
        text = repr(value)
    except Exception:  # an integer of more than 4300 digits, or an object of the user's
        text = f"an object of class {type(value).__name__} without a text of its own"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def must_be(rule: str, fits: object, cure: str, **given: object) -> None:
    """Raise unless the one argument that was given, by its name, fits its rule; ``cure``: what to do about it.

    >>> must_be("True or False", False, "leave it out", flag=3)
    Traceback (most recent call last):
    hdet.errors.ArgumentError: flag must be True or False, but got flag=3; leave it out
    """
    if not fits:
        ((name, value),) = given.items()
        if isinstance(value, int) and not is_real(int(value)):
            rule += ", and a float must be able to hold it"
        raise ArgumentError(f"{name} must be {rule}, but got {name}={shown(value)}; {cure}")


def must_count(low: int, cure: str, *, high: float = math.inf, **given: Any) -> int:
    """The one argument that was given, by its name. Raises unless it is an integer between two bounds.

    >>> must_count(1, "leave it out for 2", keep=0)
    Traceback (most recent call last):
    hdet.errors.ArgumentError: keep must be an integer, at least 1, but got keep=0; leave it out for 2
    """
    (value,) = given.values()
    rule = f"an integer, at least {low}" if high == math.inf else f"an integer from {low} to {high}"
    must_be(rule, is_int(value) and low <= value <= high, cure, **given)
    return int(value)


def users_level() -> int:
    """The ``stacklevel`` of a warning that is to point at the user's line.

    The first one that is neither hdet's nor torch's, which calls hooks.
    """
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in ("hdet", "torch"):
        level, frame = level + 1, frame.f_back
    return level
