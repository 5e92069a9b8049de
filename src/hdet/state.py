"""States in a checkpoint: plain numbers in lists and dicts, checked before they are read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from enum import Enum
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from hdet.checks import shown
from hdet.errors import ArgumentError, HdetError

STATE_VERSION = 7
STATE_WORDS = "the checkpoint's hdet state"
_SHOWN = 8
"""So many keys of a foreign state are shown."""
_CURE = "the checkpoint is damaged or of something else: load an earlier one, or the right one"
_CURES = {
    "version": "load it with the hdet that wrote it",
    "way": "build the scheduler as it was when it was saved: hdet.auto makes a search, hdet.OneCycleLR replicas",
    "knobs": "build the optimizer and the knobs as they were when it was saved",
}
Record = TypeVar("Record")


def refuse_foreign(state: Any, needed: Set[str], own: str, expected: str) -> None:
    """Raise unless a state is a dict with the keys that are needed. torch itself loads any dict without checking it.

    Args:
        state: what the user has given.
        needed: the keys.
        own: the class whose state is expected.
        expected: that state, and others that can be loaded, in words.
    """
    if not isinstance(state, Mapping) or not needed <= set(state):
        raise ArgumentError(
            f"load_state_dict() was given {state_in_words(state)}, but {expected} was expected; give it what "
            f"state_dict() of a {own} returned, or load the whole file by hdet.load"
        )


def state_in_words(state: Any) -> str:
    """Something that a user takes for a state, for messages."""
    if not isinstance(state, Mapping):
        return f"a {type(state).__name__}"
    return f"a dict with the keys {shown(sorted(map(str, state))[:_SHOWN])}"


def refuse_other_groups(saved: int, here: int) -> None:
    """Raise unless a state is of an optimizer with as many parameter groups as there are here."""
    if saved != here:
        raise ArgumentError(
            f"the checkpoint has the rates of {saved} parameter groups, but the optimizer has {here}; build the "
            "optimizer as it was when it was saved, or load the right checkpoint"
        )


@contextmanager
def reading(what: str, cure: str = _CURE) -> Iterator[None]:
    """Inside, a state is read: any error becomes one that says what to do."""
    try:
        yield
    except HdetError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise ArgumentError(f"{what} does not fit ({type(error).__name__}: {error}); {cure}") from error


def run_state(kind: str, knobs: Sequence[str], spreads: Sequence[float]) -> dict[str, Any]:
    """What every run saves of itself. ``kind``: "search" or "replicas"."""
    return {"version": STATE_VERSION, "way": kind, "knobs": list(knobs), "spreads": list(spreads)}


def check_run(state: Mapping[str, Any], kind: str, knobs: Sequence[str]) -> None:
    """Raise unless a state is that of such a run, of this version, with these knobs."""
    own = {"version": STATE_VERSION, "way": kind, "knobs": list(knobs)}
    for name, cure in _CURES.items():
        if state.get(name) != own[name]:
            here = f"but here it is {shown(own[name])}"
            raise ArgumentError(f"{STATE_WORDS} has {name} = {shown(state.get(name))}, {here}; {cure}")


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


def fields_of(record: object) -> dict[str, Any]:
    """The fields of a NamedTuple or a dataclass, as plain numbers in lists."""
    return {name: plain(getattr(record, name)) for name in get_type_hints(type(record))}


def from_fields(kind: type[Record], saved: Mapping[str, Any]) -> Record:
    """A new record from :func:`fields_of`. Raises if a field is missing or of another type; others are ignored."""
    return kind(**{name: _made(hint, saved[name]) for name, hint in get_type_hints(kind).items()})


def plain(value: Any) -> Any:
    """Tuples as lists, and members of an enum as their values.

    >>> plain((1, (2.0, None)))
    [1, [2.0, None]]
    """
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value.value if isinstance(value, Enum) else value


def _made(kind: Any, saved: Any) -> Any:
    """A value of a type, from what :func:`plain` has made of it.

    >>> _made(tuple[float, ...], [1.0, 2.0]), _made(int | None, None)
    ((1.0, 2.0), None)
    """
    inside = get_args(kind)
    if isinstance(kind, UnionType):
        return None if saved is None else _made(inside[0], saved)
    if inside:
        return get_origin(kind)(_made(inside[0], item) for item in saved)
    if hasattr(kind, "_fields"):
        return from_fields(kind, dict(zip(kind._fields, saved, strict=True)))
    return saved if kind is float and isinstance(saved, (int, float)) else kind(saved)


def in_pairs(values: Mapping[str, Any]) -> list[list[Any]]:
    """A dict as a list of pairs: torch.distributed.checkpoint would take a dict apart by its keys."""
    return [[name, list(value) if isinstance(value, list) else value] for name, value in values.items()]
