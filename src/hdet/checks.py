"""Checks of arguments and of states, before anything is changed. Messages say the value, the rule and the cure."""

from __future__ import annotations

import inspect
import math
import sys
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Integral, Real
from types import FrameType
from typing import Any

from hdet.errors import ArgumentError, HdetError

_LONGEST = 200
STATE_VERSION = 7
STATE_WORDS = "the checkpoint's hdet state"
_CURE = "the checkpoint is damaged or of something else: load an earlier one, or the right one"


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


def is_equal(value: object, other: object) -> bool:
    """Whether two values are equal. An array with several elements, which cannot say so, is not."""
    try:
        return bool(value == other)
    except (RuntimeError, TypeError, ValueError):
        return False


def is_flag(value: object) -> bool:
    """Whether it is True or False, or equals one of them."""
    return is_equal(value, True) or is_equal(value, False)


def items_of(value: Any) -> list[Any] | None:
    """The items of a list or of anything else that can be iterated over; None if there are none to be had.

    A tensor or an array without dimensions says that it can be iterated over, and cannot.
    """
    try:
        return list(value)
    except TypeError:
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
    """The ``stacklevel`` of a warning that is to point at the user's line: the first one that is not hdet's."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == "hdet":
        level, frame = level + 1, frame.f_back
    return level


def not_by_steps(config: Any) -> str | None:
    """What is wrong if Lightning does not step a scheduler at every step, by its config; None: nothing."""
    if (config.interval, config.frequency) == ("step", 1):
        return None
    return (
        f"hdet counts optimizer steps, but Lightning steps the scheduler by interval={config.interval!r}, "
        f'frequency={config.frequency}; return {{"optimizer": optimizer, "lr_scheduler": {{"scheduler": scheduler, '
        '"interval": "step"}} from configure_optimizers, or return only the optimizer and give the trainer '
        "callbacks=[hdet.integrations.lightning.AutoLR()]"
    )


def warn_unless_by_steps() -> None:
    """Warn if it is Lightning that steps a scheduler, and not at every step: by epochs, unless it is told otherwise.

    Without a callback of hdet nothing else would say so, and the schedule would hardly move.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        if package in ("lightning", "pytorch_lightning") and hasattr(frame.f_locals.get("config"), "interval"):
            break
        frame = frame.f_back
    words = not_by_steps(frame.f_locals["config"]) if frame is not None else None
    if words is not None:
        warnings.warn(words, UserWarning, stacklevel=users_level())


@contextmanager
def reading(what: str, cure: str = _CURE) -> Iterator[None]:
    """Inside, a state is read: any error becomes one that says what to do."""
    try:
        yield
    except HdetError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise ArgumentError(f"{what} does not fit ({type(error).__name__}: {error}); {cure}") from error


def in_pairs(values: Mapping[str, Any]) -> list[list[Any]]:
    """A dict as a list of pairs: torch.distributed.checkpoint would take a dict apart by its keys."""
    return [[name, list(value) if isinstance(value, list) else value] for name, value in values.items()]


def run_state(kind: str, knobs: Sequence[str], spreads: Sequence[float]) -> dict[str, Any]:
    """What every run saves of itself. ``kind``: "search" or "replicas"."""
    return {"version": STATE_VERSION, "way": kind, "knobs": list(knobs), "spreads": list(spreads)}


class EqualByState:
    """A run equals another that holds the same state and writes to the same journals.

    Schedulers that hold the same state compare equal attribute by attribute, and a run is an attribute: torch's own
    tests of its schedulers compare the one that was saved with the one that was loaded in this way.
    """

    journal_writer: Any

    def state(self) -> dict[str, Any]:
        raise NotImplementedError

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, type(self)):
            return False
        same = repr(self.state()) == repr(other.state())  # as texts: NaN is equal to NaN
        return same and bool(self.journal_writer.sinks == other.journal_writer.sinks)

    __hash__ = None  # type: ignore[assignment]  # equal by value and, like a list, not meant as a key


def check_run(state: Mapping[str, Any], kind: str, knobs: Sequence[str]) -> None:
    """Raise unless a state is that of such a run, of this version, with these knobs."""
    if state.get("version") != STATE_VERSION:
        raise ArgumentError(
            f"{STATE_WORDS} has version {shown(state.get('version'))}, this hdet reads {STATE_VERSION}; "
            "load it with the hdet that wrote it"
        )
    if state.get("way") != kind:
        raise ArgumentError(
            f'the checkpoint is of a run of the kind "{state.get("way")}", but here it is "{kind}" '
            '(max_lr="auto" is a search, a number is not); build the scheduler as it was when it was saved'
        )
    if state.get("knobs") != list(knobs):
        raise ArgumentError(
            f"the checkpoint has the knobs {shown(state.get('knobs'))}, but here they are {shown(list(knobs))}; "
            "build the optimizer and the knobs as they were when it was saved"
        )
