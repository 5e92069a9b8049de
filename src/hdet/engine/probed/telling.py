"""What is told of a round of a probed run: a record for the journal, a warning for people."""

from __future__ import annotations

import math
from typing import Any

from hdet.algorithm.auto.evidence import Evidence
from hdet.algorithm.auto.pilot import BLIND, NEVER_MOVED, NO_GRADIENT, NOT_FINITE, NOT_FOLLOWED, Order, PilotState
from hdet.distributed.rollcall import RollCall
from hdet.engine.records import round_record
from hdet.engine.way import RoundEnd

__all__ = ["record_of", "warning_of"]

_CURES = {
    BLIND: "Give probe= a loss of the model that trains",
    NOT_FINITE: "Look for NaN in the probe batch, and for a loss that overflows",
    NO_GRADIENT: "Give the optimizer that is stepped itself, and leave gradients in place until scheduler.step()",
    NOT_FOLLOWED: "Use an optimizer all of whose steps are proportional to lr, or give it rates that are right",
    NEVER_MOVED: "Call optimizer.step() before scheduler.step(), with gradients that are not zero",
}


def record_of(
    k: int,
    end: RoundEnd,
    roll: RollCall,
    evidence: Evidence,
    before: PilotState,
    then: list[float],
    order: Order,
    lead: int,
    seconds: dict[str, float],
) -> dict[str, Any]:
    """The round as one record: the one model stands where replicas would, with the ranks' mean loss.

    ``then`` is the schedule before the round's last step: once the guess is kept to, there is another one. ``lead``:
    the knob whose rate stands for all.
    """
    after, now, knobs = order.state, end.schedule(end.after), len(then)
    base = _base(before, then, end.before)
    finite = [loss for loss in roll.losses if math.isfinite(loss)]
    loss = math.fsum(finite) / len(finite) if finite else math.nan
    shown = roll._replace(losses=[loss], signals=[evidence.now], finite=[True])
    record = round_record(
        k=k,
        step=end.after,
        roll=shown,
        base=base,
        values=[base],
        multipliers=[[1.0] * knobs],
        update=None,
        controller_state=None,
        learned=[after.factor] * knobs,
        new_base=_base(after, now, end.after),
        divergence=[0.0],
        seconds={**seconds, "converge": 0.0},
    )
    heard = {"loss_before": evidence.before, "reach": math.exp(evidence.reach) * then[lead]}
    unheard = [rank for rank, own in enumerate(roll.losses) if roll.has_losses and not math.isfinite(own)]
    story = {"not_finite": unheard, "event": order.event, "went_back_to": order.went_back_to, "alarm": order.alarm}
    return {**record, "shape": now, **heard, **story}


def warning_of(order: Order, step: int) -> str | None:
    """What people must know at once."""
    if order.alarm is None:
        return None
    why, cure = order.alarm, _CURES[order.alarm]
    return f"{why}, at step {step}: the learning rate cannot be found, and the guess is kept to. {cure}"


def _base(state: PilotState, schedule: list[float], t: int) -> list[float]:
    return [value * state.factor * state.rise(t) for value in schedule]
