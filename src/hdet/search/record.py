"""A round of a search as one record of the journal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hdet.search.gathering import Gathered
from hdet.search.memory import Memory
from hdet.search.rule import Decision, Evidence


def record_of(
    memory: Memory,
    gathered: Gathered,
    evidence: Evidence,
    decision: Decision,
    bases: tuple[Sequence[float], Sequence[float]],
    schedules: tuple[list[float], list[float]],
    lead: int,
    seconds: dict[str, float],
) -> dict[str, Any]:
    """The round as one record. The journal's fields for replicas have one entry: the model, with the ranks' mean loss.

    Args:
        memory: what the search remembers, after the round.
        gathered, evidence, decision: what the ranks have seen, and what was decided.
        bases: the rates of the round's last step, and of the step after it.
        schedules: the schedule before the round's last step, and after it: another one if the search has stopped.
        lead: the group whose rate stands for all.
        seconds: by what was done at the round's end.
    """
    (base, new_base), (then, now), knobs = map(list, bases), schedules, len(bases[0])
    finite = [loss for loss in gathered.losses if math.isfinite(loss)]
    loss = math.fsum(finite) / len(finite) if finite else math.nan
    model = {"loss": loss if gathered.has_losses else None, "signal": loss, "values": base}
    status, why = memory.status
    return {
        "kind": "round",
        "round": memory.rounds,
        "step": evidence.span[1],
        "replicas": [{**model, "multipliers": [1.0] * knobs, "divergence": 0.0}],
        "excluded": [],
        **dict.fromkeys(("weights", "delta", "velocity", "error")),  # there is no controller
        "learned": [decision.state.peak_factor] * knobs,
        "base_before": base,
        "base": new_base,
        "seconds": seconds,
        "shape": now,
        "estimated_rate": math.exp(evidence.estimated_level) * then[lead],
        "found": memory.rate,
        "found_rates": list(memory.rates),
        "status": status,
        "why": None if why is None else why.value,
        "not_finite": [r for r, own in enumerate(gathered.losses) if gathered.has_losses and not math.isfinite(own)],
        "event": None if decision.event is None else decision.event.value,
        "rolled_back_to": decision.rolled_back_to,
    }
