"""What the judge, the guard and the search remember, in a checkpoint: plain numbers in lists.

What a field must be follows from its type, so that a state is checked and read in one go.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from hdet.checks import Rule, check_state, integer, is_real, pairs
from hdet.distributed.group import Seat
from hdet.rollback.losses import Losses
from hdet.rollback.retreat import Retreat
from hdet.rollback.ruin import Course


def plain(value: Any) -> Any:
    """Tuples as lists, and members of an enum as numbers."""
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return int(value) if isinstance(value, IntEnum) else value


def in_named_pairs(record: Any, but: Sequence[str] = ()) -> list[list[Any]]:
    """The fields of a named tuple: torch.distributed.checkpoint would make keys of a dict's names."""
    return [[name, plain(value)] for name, value in record._asdict().items() if name not in but]


def named(state: Mapping[str, Any], name: str, what: str) -> dict[str, Any]:
    """The pairs of names and values that are called ``name`` in a state, as a dict; ``what`` is the state in words."""
    check_state(state, {name: pairs}, what)
    return dict(state[name])


def fields_of(kind: type, saved: Mapping[str, Any], what: str, but: Sequence[str] = ()) -> dict[str, Any]:
    """The fields of a record from :func:`plain` ones. One that is missing or of another type raises; more are left out.

    Args:
        kind: the class of the record, whose annotations say what its fields are.
        saved: the fields by name.
        what: the state in words.
        but: fields that are not read.
    """
    hints = {name: hint for name, hint in get_type_hints(kind).items() if name not in but}
    rules = {name: Rule(f"of the type {_word(hint)}", _fits(hint)) for name, hint in hints.items()}
    check_state(saved, rules, what)
    return {name: _read(hint, saved[name]) for name, hint in hints.items()}


def _word(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint).replace("hdet.rollback.", "")


def _fits(hint: Any) -> Any:
    def fits(value: Any) -> bool:
        try:
            _read(hint, value)
        except (TypeError, ValueError):
            return False
        return True

    return fits


def _read(hint: Any, value: Any) -> Any:
    """A value of a type, from what :func:`plain` made of it; anything else raises."""
    kind, inner = get_origin(hint), get_args(hint)
    if kind is UnionType:  # a record or None
        return None if value is None else _read(inner[0], value)
    if kind in (tuple, list):
        return kind(_read(inner[0], item) for item in _listed(value))
    if issubclass(hint, tuple):
        hints = get_type_hints(hint).values()
        return hint(*(_read(own, item) for own, item in zip(hints, _listed(value), strict=True)))
    if issubclass(hint, int) and hint is not bool:  # a count or a member of an enum; some files make it a float
        if not integer.fits(value):
            raise TypeError(f"{value!r} is no integer")
        return hint(int(value))
    if not (is_real(value) if hint is float else isinstance(value, hint)):
        raise TypeError(f"{value!r} is no {hint.__name__}")
    return value


def _listed(value: Any) -> Sequence[Any]:
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"{value!r} is no list")
    return value


def course_of(state: Mapping[str, Any], name: str, what: str) -> Course:
    """From :func:`in_named_pairs`, as :func:`named` finds them."""
    return Course(**fields_of(Course, named(state, name, what), what))


def saved_retreat(state: Retreat) -> dict[str, Any]:
    """By name."""
    return {n: in_named_pairs(v) if isinstance(v, Course) else plain(v) for n, v in state._asdict().items()}


def loaded_retreat(saved: Mapping[str, Any], what: str) -> Retreat:
    """From :func:`saved_retreat`; ``what`` is the state in words."""
    own = fields_of(Retreat, saved, what, but=("near", "far"))
    return Retreat(near=course_of(saved, "near", what), far=course_of(saved, "far", what), **own)


def rows_of(rows: Sequence[Sequence[Any]], seat: Seat) -> list[Any]:
    """This rank's, of rows that were saved for each rank. Were there more or fewer ranks: all of theirs."""
    own = [rows[seat.replica]] if len(rows) == seat.size else rows
    return [row for one in own for row in one]


def losses_of(rows: Sequence[Sequence[Sequence[float]]], seat: Seat) -> Losses:
    """This rank's, from what :meth:`Losses.saved` gave on each."""
    return Losses.loaded(rows_of(rows, seat))
