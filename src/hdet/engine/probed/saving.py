"""The state of a probed run in a checkpoint. Weights kept for going back are not in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from hdet.algorithm.auto.course import Course
from hdet.algorithm.auto.pilot import Pilot, PilotState
from hdet.algorithm.auto.takeoff import Phase, TakeOffState
from hdet.engine.checkpoint import controller_from, controller_saved, in_pairs

__all__ = ["loaded", "saved"]


def saved(pilot: Pilot, state: PilotState) -> dict[str, Any]:
    """Plain numbers, lists and strings."""
    return {
        "sync_every": pilot.length if pilot.length is not None else "auto",
        "seed": pilot.seed,
        "auto_lr_start": pilot.start,
        "points": pilot.points,
        "learned": list(state.learned),
        **controller_saved(pilot.controller, state.controller),
        "takeoff": in_pairs({**state.takeoff._asdict(), "phase": int(state.takeoff.phase)}),
        "course": in_pairs(state.course._asdict()),
        "landed": state.landed,
        "held": state.held,
        "scale": state.scale,
        "worse": state.worse,
        "low": state.low,
        "alarmed": state.alarmed,
    }


def loaded(pilot: Pilot, state: Mapping[str, Any], total_steps: int | None) -> tuple[Pilot, PilotState]:
    """Rules and state of a checkpoint. ``pilot``: those that were built here."""
    controller, memory = controller_from(state, pilot.controller, pilot.knobs)
    rules = dataclasses.replace(
        pilot,
        controller=controller,
        total_steps=total_steps,
        length=None if state["sync_every"] == "auto" else int(state["sync_every"]),
        points=int(state["points"]),
        spread=float(max(state["spreads"], default=pilot.spread)),
        seed=int(state["seed"]),
        start=int(state["auto_lr_start"]),
    )
    takeoff = dict(state["takeoff"])
    return rules, PilotState(
        TakeOffState(**{**takeoff, "phase": Phase(takeoff["phase"])}),
        Course(**dict(state["course"])),
        None if state["landed"] is None else int(state["landed"]),
        list(state["learned"]),
        memory,
        held=bool(state["held"]),
        scale=state["scale"],
        worse=int(state["worse"]),
        low=state["low"],
        alarmed=bool(state["alarmed"]),
    )
