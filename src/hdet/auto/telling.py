"""What is told of a round of a search: a record for the journal, a warning for people."""

from __future__ import annotations

import math
from typing import Any

from hdet.auto.rule import NEVER_MOVED, NO_GRADIENT, NOT_FOLLOWED, Decision, Evidence, State
from hdet.distributed.rollcall import RollCall
from hdet.engine.clock import Clock
from hdet.engine.records import round_record
from hdet.engine.way import RoundEnd

__all__ = ["NO_LOSSES", "record_of", "warning_of"]

NO_LOSSES = (
    "no loss was given until step {step}: an explosion is only seen where gradients show it, or where weights are no "
    "numbers. Give it: scheduler.step(loss)"
)
_CURES = {
    NO_GRADIENT: "Give the optimizer that is stepped itself, and leave gradients in place until scheduler.step()",
    NOT_FOLLOWED: "Use an optimizer all of whose steps are proportional to lr, or give it rates that are right",
    NEVER_MOVED: "Call optimizer.step() before scheduler.step(), with gradients that are not zero",
}


def record_of(
    k: int,
    end: RoundEnd,
    roll: RollCall,
    evidence: Evidence,
    before: State,
    then: list[float],
    decision: Decision,
    lead: int,
    clock: Clock,
) -> dict[str, Any]:
    """The round as one record: the one model stands where replicas would, with the ranks' mean loss.

    ``then`` is the schedule before the round's last step: once the guess is kept to, there is another one. ``lead``:
    the group whose rate stands for all.
    """
    after, now, knobs = decision.state, end.schedule(end.after), len(then)
    base = _base(before, then, end.before)
    finite = [loss for loss in roll.losses if math.isfinite(loss)]
    loss = math.fsum(finite) / len(finite) if finite else math.nan
    shown = roll._replace(losses=[loss], signals=[loss], finite=[True])
    record = round_record(
        k=k,
        step=end.after,
        roll=shown,
        base=base,
        values=[base],
        multipliers=[[1.0] * knobs],
        update=None,
        controller_state=None,
        learned=[after.found] * knobs,
        new_base=_base(after, now, end.after),
        divergence=[0.0],
        seconds=clock.seconds,
    )
    unheard = [rank for rank, own in enumerate(roll.losses) if roll.has_losses and not math.isfinite(own)]
    story = {"not_finite": unheard, "event": decision.event, "went_back_to": decision.rolled_back_to}
    reach = math.exp(evidence.reach) * then[lead]
    return {**record, "shape": now, "reach": reach, **story, "alarm": decision.alarm}


def warning_of(decision: Decision, step: int) -> str | None:
    """What people must know at once."""
    if decision.alarm is not None:
        why, cure = decision.alarm, _CURES[decision.alarm]
        return f"{why}, at step {step}: the learning rate cannot be found, and the guess is kept to. {cure}"
    if decision.rolled_back_to is not None:
        return (
            f"training was ruined at step {step}: the weights of step {decision.rolled_back_to} are put back, and the "
            "rate is lowered. If the loss says nothing about the weights (as in GANs), give go_back=False, or no loss"
        )
    return None


def _base(state: State, schedule: list[float], t: int) -> list[float]:
    return [value * state.factor(t) for value in schedule]
