"""States in a checkpoint: tuples with names become plain numbers in lists, and are made of them again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from hdet.ranks.group import ReplicaIndex

Record = TypeVar("Record")


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


def rows_of(rows: Sequence[Sequence[Any]], replica_index: ReplicaIndex) -> list[Any]:
    """This rank's rows, of those saved for each rank; all of them if the number of ranks has changed."""
    own = [rows[replica_index.replica]] if len(rows) == replica_index.size else rows
    return [row for one in own for row in one]
