"""States in a checkpoint: plain numbers in lists and dicts, checked before they are read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from enum import Enum
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from hdet._version import __version__
from hdet.checks import is_int, is_real, shown
from hdet.errors import ArgumentError, HdetError

STATE_VERSION = 8
"""Of the states of runs. Those of 0.1.0 have 8. When it is raised, states of earlier versions are turned as they are
read: ``tests/versions`` loads them for ever."""
STATE_WORDS = "the checkpoint's hdet state"
_SHOWN = 8
"""So many keys of a foreign state are shown."""
_CURE = "the checkpoint is damaged or of something else: load an earlier one, or the right one"
_CURES = {
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


def written(version: int) -> dict[str, Any]:
    """What every state says first: the version of its format, and the hdet that wrote it."""
    return {"version": version, "hdet": __version__}


def check_version(what: str, state: Mapping[str, Any], own: int) -> None:
    """Raise unless a state is of the version that is read here. ``what``: the state, for messages."""
    if state.get("version") != own:
        raise ArgumentError(version_words(what, state.get("version"), own, state.get("hdet")))


def version_words(what: str, version: object, own: int, writer: object) -> str:
    """Why a format cannot be read, and what to do: it is newer than this hdet, or of before 0.1.0, or damaged.

    Args:
        what: has the format.
        version: of it.
        own: the one that this hdet reads.
        writer: the hdet that wrote it, as far as that is known.

    >>> version_words("the state", 9, 8, "0.2.0").replace(__version__, "0.1.0")
    'the state has version = 9 (written by hdet 0.2.0), but hdet 0.1.0 reads version 8; update hdet to 0.2.0 or later'
    """
    by = f" (written by hdet {writer})" if isinstance(writer, str) else ""
    cure = "it is damaged or of something else: load an earlier one, or the right one"
    if is_int(version):
        newer = f"update hdet to {writer if by else 'the one that wrote it'} or later"
        cure = newer if version > own else "load it with the hdet that wrote it"  # type: ignore[operator]  # a number
    return f"{what} has version = {shown(version)}{by}, but hdet {__version__} reads version {own}; {cure}"


def run_state(kind: str, knobs: Sequence[str], spreads: Sequence[float]) -> dict[str, Any]:
    """What every run saves of itself. ``kind``: "search" or "replicas"."""
    return {**written(STATE_VERSION), "way": kind, "knobs": list(knobs), "spreads": list(spreads)}


def check_run(state: Mapping[str, Any], kind: str, knobs: Sequence[str]) -> None:
    """Raise unless a state is that of such a run, of this version, with these knobs."""
    check_version(STATE_WORDS, state, STATE_VERSION)
    own = {"way": kind, "knobs": list(knobs)}
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


def numbers_from(kind: type[Record], saved: Iterable[Sequence[Any]], writer: object = __version__) -> Record:
    """A named tuple of numbers from :func:`in_pairs`, which must have exactly its names: one that is missing, or that
    nothing asks for any more, would change the run. All are finite, and whole ones are at least 1: rounds of
    no step would never end. ``writer``: the hdet that wrote them.

    >>> from hdet.rule.constants import LIMITS, Limits
    >>> numbers_from(Limits, in_pairs(LIMITS._asdict())) == LIMITS
    True
    """
    given = {str(name): value for name, value in saved}
    names = set(get_type_hints(kind))
    if (unknown := sorted(set(given) - names)) and isinstance(writer, str) and writer != __version__:
        raise ArgumentError(
            f"the rule of hdet {writer}, which wrote this state, has {shown(unknown)}, and that of hdet {__version__} "
            f"has not; update hdet to {writer} or later"
        )
    if set(given) != names:
        raise ValueError(f"numbers of another rule: {shown(sorted(set(given) ^ names))}")
    wrong = {name: given[name] for name, hint in get_type_hints(kind).items() if not _fits(hint, given[name])}
    if wrong:
        raise ValueError(f"no rule has such numbers: {shown(wrong)}")
    return from_fields(kind, given)


def _fits(hint: type, value: Any) -> bool:
    return is_int(value) and value >= 1 if hint is int else is_real(value) and math.isfinite(value)


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
