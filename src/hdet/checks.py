"""Questions about arguments that never raise, whatever was passed: an array, a number that no float holds, a class.

And how such a thing, or a text of somebody else, is put into words, and whom a warning is for.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Collection
from numbers import Integral, Real
from typing import Any

__all__ = ["harmless", "is_finite", "is_int", "is_one_of", "is_real", "shown", "takes", "users_level"]

_LONGEST = 200


def is_int(value: object) -> bool:
    """Whether it is an integer; True and False are not."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_real(value: object) -> bool:
    """Whether it is a real number that a float can hold."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    try:
        float(value)
    except OverflowError:
        return False
    return True


def is_finite(value: object) -> bool:
    """Whether it is a finite real number.

    >>> is_finite(0.5), is_finite(3), is_finite(True), is_finite(10**400), is_finite("3"), is_finite(math.inf)
    (True, True, False, False, False, False)
    """
    return is_real(value) and math.isfinite(value)  # type: ignore[arg-type]  # a number


def is_one_of(value: object, words: Collection[str | None]) -> bool:
    """Whether it is one of some words. An array is none, and does not say so by itself."""
    return (value is None or isinstance(value, str)) and value in words


def takes(function: Any, *arguments: object) -> bool:
    """Whether it can be called with so many arguments, as far as Python knows. A class is no function.

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
    return getattr(getattr(function, "forward", None), "__name__", "") != "_forward_unimplemented"


def shown(value: object) -> str:
    """For a message: not longer than a few lines, whatever it is."""
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def harmless(text: str) -> str:
    r"""For a terminal: whatever it would obey, not show, is spelled out, but for ends of lines and tabs.

    >>> print(harmless("\x1b[31mred, \u202e, caf\xe9"))
    \x1b[31mred, \u202e, café
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def users_level() -> int:
    """The ``stacklevel`` of a warning that is to point at the user's line: the first one that is not hdet's."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == "hdet":
        level, frame = level + 1, frame.f_back
    return level
