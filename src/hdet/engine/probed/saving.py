"""The state of a probed run in a checkpoint: plain numbers. What lies in tensors is saved beside it, if at all."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hdet.algorithm.auto.pilot import Phase, Pilot, PilotState
from hdet.algorithm.knob import FACTOR_LIMITS
from hdet.engine.checkpoint import STATE_WORDS, in_pairs
from hdet.state_rules import Rule, check_state, count, flag, number

__all__ = ["check_search", "loaded", "saved"]


_MAYBE_NUMBER = Rule("a number", lambda value: isinstance(value, (int, float)) and not math.isinf(value))


def saved(pilot: Pilot, state: PilotState) -> dict[str, Any]:
    """Plain numbers, lists and strings."""
    search = {**state._asdict(), "phase": int(state.phase)}
    del search["moments"]
    return {"searches": pilot.searches, "search": in_pairs(search)}


def check_search(search: Any) -> None:
    """Raise unless :func:`loaded` can read it."""
    low, high = map(math.log, FACTOR_LIMITS)
    check_state(
        dict(search),
        {
            "phase": count(min(Phase), max(Phase)),
            "level": Rule(
                f"a number from {low:g} to {high:g}", lambda value: number.fits(value) and low <= value <= high
            ),
            "peak": number,
            **dict.fromkeys(("first", "pace", "rate"), _MAYBE_NUMBER),
            **dict.fromkeys(("worse", "idle", "dark"), count(0)),
            "seen": flag,
        },
        f"{STATE_WORDS}, in what it says about the search,",
    )


def loaded(state: Mapping[str, Any], total_steps: int | None) -> tuple[Pilot, PilotState]:
    """Rules and state of a checkpoint."""
    search = {name: value for name, value in state["search"] if name in PilotState._fields}
    pilot_state = PilotState(**{**search, "phase": Phase(search["phase"])})
    return Pilot(total_steps, bool(state["searches"])), pilot_state
