"""What a judge and a guard remember, and the losses of a round, in a checkpoint: plain numbers in lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hdet.checks import Rule, check_state, count, in_pairs, maybe, pairs
from hdet.distributed.group import Seat
from hdet.rollback.losses import Losses
from hdet.rollback.retreat import Kept, Retreat, Slowed, Usual
from hdet.rollback.ruin import Block, Course

any_number = Rule("a number", lambda value: isinstance(value, (int, float)) and not isinstance(value, bool))
_NUMBERS = Rule("a list of numbers", lambda value: _is_list(value) and all(map(any_number.fits, value)))


def rows_of_numbers(length: int) -> Rule:
    """A list of lists of so many numbers."""
    words = "pairs of numbers" if length == 2 else f"lists of {length} numbers"
    return Rule(words, lambda value: _is_list(value) and all(_NUMBERS.fits(x) and len(x) == length for x in value))


_BLOCKS = rows_of_numbers(2)
_SLOWED = Rule(
    "two counts and two factors",
    lambda value: (
        _NUMBERS.fits(value) and len(value) == 4 and min(value[:2]) >= 0 and all(0 < x <= 1 for x in value[2:])
    ),
)
_PLAIN = ("losses", "usual", "kept", "slowed", "before", "replaced")
"""What a guard remembers that is made of numbers."""
_RETREAT = {
    **dict.fromkeys(("near", "far"), pairs),
    **dict.fromkeys(("begun", "since_well", "withheld"), count(0)),
    "losses": _NUMBERS,
    "usual": Rule(
        "two lists of numbers", lambda value: _is_list(value) and len(value) == 2 and all(map(_NUMBERS.fits, value))
    ),
    "kept": _BLOCKS,
    "slowed": _SLOWED,
    "before": maybe(_SLOWED),
    "replaced": maybe(Rule("a pair of numbers", lambda value: _NUMBERS.fits(value) and len(value) == 2)),
}
_COURSE = {
    **dict.fromkeys(("lowest", "gain", "accused", "tolerated"), any_number),
    **dict.fromkeys(("before", "kinks", "latest", "changes"), _NUMBERS),
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


def saved_retreat(state: Retreat) -> dict[str, Any]:
    """By name."""
    courses = {"near": saved_course(state.near), "far": saved_course(state.far)}
    plain = {name: _listed(getattr(state, name)) for name in _PLAIN}
    return {**courses, **plain, "begun": state.begun, "since_well": state.since_well, "withheld": state.withheld}


def check_retreat(saved: Mapping[str, Any], what: str) -> None:
    """Raise unless :func:`loaded_retreat` can read it; ``what`` is the state in words."""
    check_state(saved, _RETREAT, what)
    for name in ("near", "far"):
        check_course(saved[name], what)


def loaded_retreat(saved: Mapping[str, Any]) -> Retreat:
    """From :func:`saved_retreat`."""
    norms, losses = saved["usual"]
    return Retreat(
        near=loaded_course(saved["near"]),
        far=loaded_course(saved["far"]),
        begun=int(saved["begun"]),
        losses=tuple(saved["losses"]),
        usual=Usual(tuple(norms), tuple(losses)),
        kept=tuple(Kept(int(step), int(slot)) for step, slot in saved["kept"]),
        slowed=Slowed(*saved["slowed"]),
        before=None if saved["before"] is None else Slowed(*saved["before"]),
        replaced=None if saved["replaced"] is None else Kept(*saved["replaced"]),
        since_well=int(saved["since_well"]),
        withheld=int(saved["withheld"]),
    )


def rows_of(rows: Sequence[Sequence[Any]], seat: Seat) -> list[Any]:
    """This rank's, of rows that were saved for each rank. Were there more or fewer ranks: all of theirs."""
    own = [rows[seat.replica]] if len(rows) == seat.size else rows
    return [row for one in own for row in one]


def losses_of(rows: Sequence[Sequence[Sequence[float]]], seat: Seat) -> Losses:
    """This rank's, from what :meth:`Losses.saved` gave on each."""
    return Losses.loaded(rows_of(rows, seat))


def _listed(value: Any) -> Any:
    return [_listed(item) for item in value] if isinstance(value, tuple) else value


def _is_list(value: object) -> bool:
    return isinstance(value, (list, tuple))
