"""The state of a probed run in a checkpoint: plain numbers. What lies in tensors is saved beside it, if at all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hdet.algorithm.auto.pilot import Phase, Pilot, PilotState
from hdet.engine.checkpoint import in_pairs

__all__ = ["loaded", "saved"]


def saved(pilot: Pilot, state: PilotState) -> dict[str, Any]:
    """Plain numbers, lists and strings."""
    search = {**state._asdict(), "phase": int(state.phase)}
    del search["moments"]
    return {"searches": pilot.searches, "search": in_pairs(search)}


def loaded(state: Mapping[str, Any], total_steps: int | None) -> tuple[Pilot, PilotState]:
    """Rules and state of a checkpoint."""
    search = dict(state["search"])
    pilot_state = PilotState(**{**search, "phase": Phase(search["phase"])})
    return Pilot(total_steps, bool(state["searches"])), pilot_state
