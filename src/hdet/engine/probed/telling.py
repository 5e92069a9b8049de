"""What is told of a round of a probed run: a record for the journal, a warning for people."""

from __future__ import annotations

from typing import Any

from hdet.algorithm.auto.evidence import Evidence
from hdet.algorithm.auto.pilot import Order, PilotState
from hdet.algorithm.auto.takeoff import BLIND, NEVER_MOVED, NOT_FINITE
from hdet.algorithm.controller import Controller
from hdet.engine.records import round_record, verdict_records
from hdet.engine.rollcall import RollCall
from hdet.engine.way import RoundEnd

__all__ = ["record_of", "warning_of"]

_CURES = {
    BLIND: "Give probe= a loss of the model that trains",
    NOT_FINITE: "Look for NaN in the probe batch, and for a loss that overflows",
    NEVER_MOVED: "Call optimizer.step() before scheduler.step(), with gradients that are not zero",
}


def record_of(
    k: int,
    end: RoundEnd,
    roll: RollCall,
    evidence: Evidence,
    before: PilotState,
    order: Order,
    controller: Controller | None,
    seconds: dict[str, float],
) -> dict[str, Any]:
    """The round as one record: its points stand where replicas would."""
    losses, rho, after = list(evidence.losses), evidence.fan.rho, order.state
    now = end.schedule(end.after)
    base = _base(before, end.schedule(end.before), end.before)
    shown = roll._replace(losses=roll.losses[:1] * len(losses), signals=losses, finite=[True] * len(losses))
    record = round_record(
        k=k,
        step=end.after,
        roll=shown,
        base=base,
        values=[[b * multiple for b, multiple in zip(base, row, strict=True)] for row in rho],
        multipliers=rho,
        update=order.update,
        controller_state=after.controller,
        learned=after.learned,
        new_base=_base(after, now, end.after),
        divergence=[0.0] * len(rho),
        seconds={**seconds, "converge": 0.0},
    )
    verdict = verdict_records(controller, after.controller, order.update)
    story = {"event": order.event, "went_back_to": order.went_back_to, "alarm": order.alarm}
    return {**record, "shape": now, "verdict": verdict, **story}


def warning_of(order: Order, step: int) -> str | None:
    """What people must know at once."""
    if order.alarm is None:
        return None
    why, cure = order.alarm, _CURES[order.alarm]
    return f"{why}, at step {step}: the learning rate cannot be found, and the guess is kept to. {cure}"


def _base(state: PilotState, schedule: list[float], t: int) -> list[float]:
    return [value * (m * state.course.at(t)) for m, value in zip(state.learned, schedule, strict=True)]
