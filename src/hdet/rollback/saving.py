"""What a judge and a guard remember, and the losses of a round, in a checkpoint: plain numbers in lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hdet.checks import in_pairs
from hdet.distributed.group import Seat
from hdet.rollback.losses import Losses
from hdet.rollback.retreat import Kept, Retreat, Slowed, Usual
from hdet.rollback.ruin import Block, Course

_PLAIN = ("losses", "usual", "kept", "slowed", "before", "replaced")
"""What a guard remembers that is made of numbers."""


def saved_course(course: Course) -> list[list[Any]]:
    """As pairs of a name and plain numbers."""
    return in_pairs({name: _listed(value) for name, value in course._asdict().items()})


def loaded_course(saved: Sequence[Any]) -> Course:
    """From :func:`saved_course`."""
    given: dict[str, Any] = dict(saved)
    found: dict[str, Any] = {
        name: tuple(given[name]) if isinstance(given[name], (list, tuple)) else given[name] for name in Course._fields
    }
    found["recent"] = tuple(Block(mean, int(steps)) for mean, steps in found["recent"])
    return Course(**found)


def saved_retreat(state: Retreat) -> dict[str, Any]:
    """By name."""
    courses = {"near": saved_course(state.near), "far": saved_course(state.far)}
    plain = {name: _listed(getattr(state, name)) for name in _PLAIN}
    return {**courses, **plain, "begun": state.begun, "since_well": state.since_well, "withheld": state.withheld}


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
