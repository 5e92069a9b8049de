"""What a search has learned, in a checkpoint: plain numbers in lists. What lies in tensors is saved beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hdet.auto.rule import HIGHEST, LOWEST, Phase, State
from hdet.engine.checkpoint import STATE_WORDS, in_pairs
from hdet.rollback.ruin import Block, Course
from hdet.state_rules import Rule, check_state, count, number, pairs

__all__ = ["check_saved", "loaded", "saved"]

_ANY_NUMBER = Rule("a number", lambda value: isinstance(value, (int, float)) and not isinstance(value, bool))
_NUMBERS = Rule("a list of numbers", lambda value: _is_list(value) and all(map(_ANY_NUMBER.fits, value)))
_BLOCKS = Rule(
    "pairs of numbers", lambda value: _is_list(value) and all(_NUMBERS.fits(x) and len(x) == 2 for x in value)
)
_LEVEL = Rule(
    f"a number from {LOWEST:g} to {HIGHEST:g}", lambda value: number.fits(value) and LOWEST <= value <= HIGHEST
)
_STATE = {
    "phase": count(min(Phase), max(Phase)),
    "level": _LEVEL,
    "peak": number,
    **dict.fromkeys(("ceiling", "slowed_from", "pace", "rate"), _ANY_NUMBER),
    "course": pairs,
}
_COURSE = {
    **dict.fromkeys(("lowest", "gain", "accused"), _ANY_NUMBER),
    **dict.fromkeys(("before", "kinks", "latest"), _NUMBERS),
    "recent": _BLOCKS,
    "dark": count(0),
}


def saved(state: State) -> list[list[Any]]:
    """Without snapshots: they are saved with what lies in them."""
    course = {name: _listed(value) for name, value in state.course._asdict().items()}
    found = {**state._asdict(), "phase": int(state.phase), "course": in_pairs(course)}
    del found["snapshots"]
    return in_pairs(found)


def check_saved(search: Sequence[Sequence[Any]]) -> None:
    """Raise unless :func:`loaded` can read it."""
    what = f"{STATE_WORDS}, in what it says about the search,"
    found = {str(name): value for name, value in search}
    check_state(found, _STATE, what)
    check_state(dict(found["course"]), _COURSE, what)


def loaded(search: Sequence[Sequence[Any]]) -> State:
    """From :func:`saved`."""
    found = _known(search, State._fields)
    course: dict[str, Any] = {
        name: tuple(value) if isinstance(value, (list, tuple)) else value
        for name, value in _known(found["course"], Course._fields).items()
    }
    course["recent"] = tuple(Block(mean, int(steps)) for mean, steps in course["recent"])
    return State(**{**found, "phase": Phase(found["phase"]), "course": Course(**course)})


def _known(pairs: Sequence[Sequence[Any]], names: Sequence[str]) -> Mapping[str, Any]:
    return {name: value for name, value in pairs if name in names}


def _listed(value: Any) -> Any:
    return [_listed(item) for item in value] if isinstance(value, tuple) else value


def _is_list(value: object) -> bool:
    return isinstance(value, (list, tuple))
