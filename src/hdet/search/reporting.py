"""What a search tells people: what it has found, warnings, lines of the log, and records of the journal.

The *journal* is a file with one line of JSON, a record, for each round.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from hdet.checks import users_level
from hdet.errors import SearchWarning
from hdet.rule.enums import Event, Reason
from hdet.rule.found import Found, listed

if TYPE_CHECKING:
    from hdet.optimizer import Rate
    from hdet.rule.decision import Decision, Evidence
    from hdet.rule.progress import Progress
    from hdet.search.memory import Memory

NEW_CYCLE = "begins a new OneCycle with that peak"
"""What ``max_lr=`` does with a rate that was found."""
REPLAYS = "replays the rates of the run step by step"
"""What ``hdet.schedule_from`` does with it."""
_logger = logging.getLogger("hdet")
_LEARN = (
    "See whether the model learns a single batch, and whether its layers are dead; another guess, another "
    "initialisation or highest= may help. If the loss need not fall (as in GANs and policy gradients), give none: "
    "scheduler.step()"
)
_CURES = {
    Reason.NO_GRADIENT: "Give the optimizer that is stepped, and leave gradients in place until scheduler.step()",
    Reason.RATE_IGNORED: "Use an optimizer all of whose steps are proportional to lr, or give it rates that are right",
    Reason.NEVER_MOVED: "Call optimizer.step() before scheduler.step(), with gradients that are not zero",
}


def warn(text: str, kind: type[Warning] = SearchWarning) -> None:
    """Warn at the user's own line."""
    warnings.warn(text, kind, stacklevel=users_level())


def warn_of(decision: Decision, t: int, *, has_model: bool) -> None:
    """Warn of what people must know at once about the end of a round: that a search has stopped, or of a rollback.

    ``has_model``: whether ``model=`` was given, whose buffers are rolled back.
    """
    back = f"rolled back to step {decision.rolled_back_to}"
    left = (
        "Averages of the weights are not rolled back"
        if has_model
        else ("Buffers, as in BatchNorm, are rolled back only with model=, and averages of the weights never")
    )
    if decision.why is not None:
        why, cure = decision.why.text, _CURES[decision.why]
        warn(f"search stopped at step {t}: {why}; using the given rate. {cure}")
    elif decision.event is Event.BAD_BATCH:
        warn(f"the weights were NaN or infinite at step {t}: {back}, at the same rate. Look at its batch. {left}")
    elif decision.rolled_back_to is not None:
        warn(
            f"training diverged at step {t}: {back}, and the rate is lowered. If the loss says nothing about the "
            f"weights (as in GANs), give none: scheduler.step(). {left}"
        )


def log_missing_losses(t: int) -> None:
    """Log that no loss was given. It is no warning: the loss of a GAN, for instance, must not be given."""
    _logger.info(
        "no loss was given until step %d: training that diverges is only seen if gradients show it, or if weights are "
        "NaN or infinite. scheduler.step(loss) takes a loss that falls while the model learns",
        t,
    )


def warn_of_losses(progress: Progress, t: int, sign: float, *, ends: bool) -> None:
    """Warn, at the schedule's peak and at the end, of losses that have not fallen.

    ``sign``: what losses were multiplied by, so that lower is better.
    """
    if progress.is_flat or (ends and not progress.has_fallen()):
        verdict = "nothing was learned" if progress.is_flat else "it has not fallen beyond its noise, or hardly"
        words = f"the train loss was {sign * progress.first:.4g} and is {sign * progress.latest:.4g} at step {t}"
        warn(f"{words}: {verdict}{'' if ends else ' so far'}. {_LEARN}")


def log_end(found: Found, *, has_peak: bool) -> None:
    """Log what was found in a run. ``has_peak``: whether its schedule was given by peaks alone."""
    if found.status == "stopped":
        _logger.info("%s", found)
        return
    peak = f"max_lr={found.max_lr} {NEW_CYCLE}, and " if has_peak else ""
    _logger.info("%s; use again: %shdet.schedule_from(journal, optimizer) %s", found, peak, REPLAYS)


def log_settled(found: Found, t: int) -> None:
    """Log that the rate has settled."""
    _logger.info("the rate has settled at step %d: %s", t, found.max_lr)


def record_of(
    memory: Memory,
    evidence: Evidence,
    decision: Decision,
    rates: tuple[list[float], list[float]],
    schedules: tuple[list[float], list[float]],
    seconds: dict[str, float],
) -> dict[str, Any]:
    """A round as one record of the journal, with the fields that a replica ensemble's records have.

    Fields for replicas have one entry: the model, with the mean loss, which is also its signal, the number that an
    ensemble compares. Those of an ensemble's controller, the rule that moves its rates, are None.

    Args:
        memory: what the search remembers, after the round.
        evidence, decision: what the ranks have seen, and what was decided.
        rates: those of the round's last step, and of the step after it.
        schedules: the schedule at these steps: another one afterwards if the search has stopped.
        seconds: by what was done at the round's end.
    """
    (base, new_base), (then, now) = rates, schedules
    finite, knobs, found = [loss for loss in evidence.losses if math.isfinite(loss)], len(base), memory.told
    loss = math.fsum(finite) / len(finite) if finite else math.nan
    model = {"loss": loss if evidence.losses else None, "signal": loss, "values": base}
    why = memory.status[1]
    return {
        "kind": "round",
        "round": memory.rounds,
        "step": evidence.end,
        "replicas": [{**model, "multipliers": [1.0] * knobs, "divergence": 0.0}],
        "excluded": [],
        **dict.fromkeys(("weights", "delta", "velocity", "error")),  # there is no controller
        "learned": [decision.state.peak_factor] * knobs,
        "base_before": base,
        "base": new_base,
        "seconds": seconds,
        "shape": now,
        "estimated_rate": math.exp(evidence.estimated_log_factor) * then[memory.lead],
        "found": found.rate,
        "found_rates": list(found.rates),
        "within": found.within if found.within < math.inf else None,
        "status": found.status,
        "why": None if why is None else why.value,
        "not_finite": [r for r, own in enumerate(evidence.losses) if not math.isfinite(own)],
        "event": None if decision.event is None else decision.event.value,
        "rolled_back_to": decision.rolled_back_to,
    }


def found_html(found: Found, step: int, total_steps: int | None, rates: Iterable[Rate]) -> str:
    """What a notebook shows of a scheduler: plain words and a bar, in the page's own colours.

    >>> print(found_html(Found(0.067, "settled"), 200, 300, [0.04]))
    <div>step 200 of 300: found 0.067, settled, never rolled back; the rate is 0.04<br>
    <progress value="200" max="300"></progress></div>
    """
    told = f"{found}; the rate is {listed(rates)}"
    if total_steps is None:
        return f"<div>step {step}, unknown length: {told}</div>"
    bar = f'<progress value="{step}" max="{total_steps}"></progress>'
    return f"<div>step {step} of {total_steps}: {told}<br>\n{bar}</div>"


def resumed_words(step: int, *, is_falling: bool) -> str:
    """What is missing if a run goes on without the tensors of its search.

    ``AutoLR``, ``auto`` and ``keep_search`` are names in :mod:`hdet.integrations`.
    """
    missing = "its snapshots" + ("" if is_falling else " and the path measured so far")
    return (
        f"resumed at step {step} with the rate found so far, but without {missing}: the rounds from here on make new "
        "ones. Save with hdet.save. In a framework, use AutoLR, auto or keep_search of hdet.integrations. Elsewhere, "
        "save search_state_dict() beside state_dict()"
    )
