"""What a search tells people: what it has found, warnings, lines of the log, and records of the journal.

The *journal* is a file with one line of JSON, a record, for each round.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from hdet.checks import users_level
from hdet.errors import SearchWarning
from hdet.events import Event, Reason
from hdet.parameters import Rate

if TYPE_CHECKING:
    from hdet.search.memory import Memory
    from hdet.search.progress import Progress
    from hdet.search.rule import Decision, Evidence

NEW_CYCLE = "begins a new OneCycle with that peak"
"""What ``max_lr=`` does with a rate that was found ..."""
REPLAYS = "replays the rates of the run step by step"
"""... and what ``hdet.schedule_from`` does."""
_logger = logging.getLogger("hdet")
Status: TypeAlias = Literal["searching", "settled", "unsure", "stopped", "too short"]
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


@dataclass(frozen=True)
class Found:
    """What :class:`hdet.OneCycleLR` with ``max_lr="auto"``, or :func:`hdet.auto`, has found so far.

    Args:
        rate: the peak rate, of the first parameter group that is searched. NaN until a round has ended.
        status: "searching"; "settled": the schedule has begun to fall, the rate is at its bound, or nothing was raised
            for three rounds of a run of unknown length; and the train loss, if given, has fallen beyond its noise;
            "unsure": the same, but the rate may well be wrong, and ``why`` says what speaks against it; "stopped": no
            rate will be found; "too short": the run has fewer steps than the search needs.
        rolled_back: how often training was rolled back to earlier weights.
        rates: the peak rates of all parameter groups, also of those that are not searched and of those that were added
            in the run. As ``max_lr=list(rates)`` they begin a new OneCycle with these peaks. Empty until a round has
            ended.
        why: what has stopped the search, what makes it unsure, or that the rate has settled at the bound; otherwise
            empty.
        within: two times out of three the best rate is within this factor of ``rate``, above or below. Infinite while
            nothing but a lower bound is known.

    >>> print(Found(0.0671234, "settled", rolled_back=1, within=2.4))
    found 0.067 within a factor 2.4, settled, rolled back once
    >>> print(Found(0.0671234, "unsure", why=Reason.STILL_RISING.text))
    found 0.067, unsure (the schedule fell while the rate was still rising), never rolled back
    >>> print(Found(0.01, "settled", why=Reason.AT_BOUND.text))
    found 0.01, settled (at the bound you gave), never rolled back
    >>> print(Found(0.067, "stopped", why=Reason.NOT_FALLEN.text))
    at 0.067, stopped (the train loss has not fallen, or hardly), never rolled back
    >>> print(Found(0.067, rates=(0.0, 0.067)))
    found [0, 0.067], still searching, never rolled back
    """

    rate: float
    status: Status = "searching"
    rolled_back: int = 0
    rates: tuple[float, ...] = ()
    why: str = ""
    within: float = math.inf

    @property
    def settled(self) -> bool:
        """Whether the rate is found."""
        return self.status == "settled"

    @property
    def max_lr(self) -> str:
        """The rates as ``max_lr`` takes them, for people."""
        return listed(self.rates or (self.rate,))

    def __str__(self) -> str:
        if math.isnan(self.rate):
            return "found nothing yet"
        words = {0: "never rolled back", 1: "rolled back once"}
        often = words.get(self.rolled_back, f"rolled back {self.rolled_back} times")
        status = "still searching" if self.status == "searching" else self.status
        why = f" ({self.why})" if self.why else ""
        verb = "found" if self.status in ("searching", "settled", "unsure") else "at"
        is_told = self.status in ("settled", "unsure") and self.within < math.inf
        within = f" within a factor {self.within:.2g}" if is_told else ""
        return f"{verb} {self.max_lr}{within}, {status}{why}, {often}"


def warn(text: str, kind: type[Warning] = SearchWarning) -> None:
    """Warn at the user's own line."""
    warnings.warn(text, kind, stacklevel=users_level())


def warn_of(decision: Decision, t: int) -> None:
    """Warn of what people must know at once about the end of a round: that a search has stopped, or of a rollback."""
    back = f"rolled back to step {decision.rolled_back_to}"
    if decision.why is not None:
        why, cure = decision.why.text, _CURES[decision.why]
        warn(f"search stopped at step {t}: {why}; using the given rate. {cure}")
    elif decision.event is Event.BAD_BATCH:
        warn(f"the weights were NaN or infinite at step {t}: {back}, at the same rate. Look at its batch")
    elif decision.rolled_back_to is not None:
        warn(
            f"training diverged at step {t}: {back}, and the rate is lowered. If the loss says nothing about the "
            "weights (as in GANs), give none: scheduler.step()"
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
    """Log what was found in a run. ``has_peak``: whether the schedule is OneCycle, which is given its peaks."""
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
        "step": evidence.span[1],
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


def listed(rates: Iterable[Rate]) -> str:
    """The rates of all parameter groups in words: one number, or a list if they differ.

    >>> listed([0.05, 0.05]), listed([0.0, 0.0671])
    ('0.05', '[0, 0.067]')
    """
    words = [f"{float(rate):.2g}" for rate in rates]
    return words[0] if len(set(words)) == 1 else f"[{', '.join(words)}]"


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

    ``AutoLR`` is the callback for Lightning, transformers and torchtitan, ``auto`` the function for DeepSpeed,
    ``keep_search`` that for Accelerate.
    """
    missing = "its snapshots" + ("" if is_falling else " and the path measured so far")
    return (
        f"resumed at step {step} with the rate found so far, but without {missing}: the rounds from here on make new "
        "ones; hdet.save keeps them, in a framework what hdet.integrations has for it (AutoLR, auto, keep_search), and "
        "elsewhere search_state_dict() beside state_dict()"
    )
