"""What a judge remembers, and the losses of a round, as they stand in a checkpoint: plain numbers in lists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hdet.checks import Rule, check_state, count, in_pairs
from hdet.distributed.group import Seat
from hdet.rollback.losses import Losses
from hdet.rollback.ruin import Block, Course

any_number = Rule("a number", lambda value: isinstance(value, (int, float)) and not isinstance(value, bool))
_NUMBERS = Rule("a list of numbers", lambda value: _is_list(value) and all(map(any_number.fits, value)))
_BLOCKS = Rule(
    "pairs of numbers", lambda value: _is_list(value) and all(_NUMBERS.fits(x) and len(x) == 2 for x in value)
)
_COURSE = {
    **dict.fromkeys(("lowest", "gain", "accused"), any_number),
    **dict.fromkeys(("before", "kinks", "latest"), _NUMBERS),
    "recent": _BLOCKS,
    "dark": count(0),
}


def saved_course(course: Course) -> list[list[Any]]:
    """As pairs of a name and plain numbers."""
    return in_pairs({name: _listed(value) for name, value in course._asdict().items()})


def check_course(saved: Sequence[Sequence[Any]], what: str) -> None:
    """Raise unless :func:`loaded_course` can read it; ``what`` is the state in words."""
    check_state({str(name): value for name, value in saved}, _COURSE, what)


def loaded_course(saved: Sequence[Sequence[Any]]) -> Course:
    """From :func:`saved_course`."""
    found: dict[str, Any] = {
        name: tuple(value) if _is_list(value) else value for name, value in saved if name in Course._fields
    }
    found["recent"] = tuple(Block(mean, int(steps)) for mean, steps in found["recent"])
    return Course(**found)


def losses_of(rows: Sequence[Sequence[Sequence[float]]], seat: Seat) -> Losses:
    """This rank's, from what :meth:`Losses.saved` gave on each. Were there more or fewer ranks: all of theirs."""
    own = [rows[seat.replica]] if len(rows) == seat.size else rows
    return Losses.loaded(row for one in own for row in one)


def _listed(value: Any) -> Any:
    return [_listed(item) for item in value] if isinstance(value, tuple) else value


def _is_list(value: object) -> bool:
    return isinstance(value, (list, tuple))
