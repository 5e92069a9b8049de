"""What a guard tells people: warnings, the log, and why a run ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hdet.rollback.guard_policy import PATIENCE, GuardPolicy
from hdet.rollback.guard_state import Cause, GuardDecision, Outcome, Slowed, Step
from hdet.rule.enums import Action

_CAUSES = {
    Cause.LOSSES: "the losses have risen too far",
    Cause.STEP: "losses or gradients were NaN, infinite or out of all proportion",
    Cause.WEIGHTS: "weights, buffers or optimizer state are NaN, infinite or out of all proportion",
}
_SHOWN = 4
"""How many names a message shows."""


def in_words(decision: GuardDecision, t: int, policy: GuardPolicy, before: Slowed, seen: Mapping[int, Step]) -> str:
    """What a decision at step ``t`` has done to the weights, or which gradients were not used; empty if nothing.

    ``before``: how far training was slowed down until now. ``seen``: the steps that were looked at.
    """
    ended, hold, slowed = decision.ended, decision.state.hold, decision.state.slowed
    if hold is not None:
        if decision.action is not Action.ROLL_BACK:
            return ""
        why = f"{_CAUSES[hold.cause]}: rolled back to step {hold.back} at step {t}"
        return f"{why}, and up to {hold.allowed} batches are left out, to see whether weights or data are at fault"
    at, cause, what = t, decision.cause, f"rolled back to step {decision.step}"
    if ended is not None:
        at, cause, what = ended.begun, ended.cause, f"rolled back to step {ended.back}"
        if decision.outcome is Outcome.HARDER_DATA:
            return (
                f"the losses stayed as they were after the rollback of step {at}: the data are harder, and the weights "
                f"are as before it; {ended.batches} batches were left out"
            )
        if decision.outcome is Outcome.BAD_DATA:
            data = f"the data were bad around step {at}, and are as usual again at step {t}"
            return f"{data}: {what}, and {ended.batches} batches were left out"
    elif decision.action is Action.CANNOT_ROLL_BACK:
        what = "no snapshot fits the parameters that train now, so they stay"
    elif decision.action is not Action.ROLL_BACK:
        bad = ", ".join(f"{k} (norm {one.norm:.3g})" for k, one in seen.items() if one.left_out and one.norm)
        return bad and f"gradients out of all proportion were not used, and training goes on: step {bad}"
    is_lowered = slowed.low < policy.factor_at(before, t)
    rate = f"the rate is multiplied by {slowed.low:.3g}" if is_lowered else "the rate stays as it is"
    often = f"rollback {slowed.rollbacks}, {slowed.in_a_row} of at most {policy.max_rollbacks} in a row"
    return f"training diverged at step {at}: {what}, and {rate} ({_CAUSES[cause]}; {often})"


def why_given_up(decision: GuardDecision, t: int, policy: GuardPolicy) -> str:
    """Why the run ends at step ``t``."""
    if decision.state.nonfinite >= PATIENCE:
        return (
            f"the losses or gradients of the last {decision.state.nonfinite} steps were NaN or infinite, and were not "
            f"used (step {t}). Look at the data and at the loss"
        )
    return (
        f"training diverged at step {t}, after {policy.max_rollbacks} rollbacks that each followed soon after another "
        f"(max_rollbacks={policy.max_rollbacks}). Load an earlier checkpoint; lower the rate, or look at the data"
    )


def why_not_rolled_back(names: Sequence[str], t: int, *, has_snapshot: bool) -> str:
    """Why the run ends at step ``t``, although only these tensors are NaN or infinite. No names: it is other state."""
    what = f"{', '.join(names[:_SHOWN]) or 'the optimizer state'}{' and more' if len(names) > _SHOWN else ''}"
    why = "this optimizer does not train it and no snapshot has it" if has_snapshot else "there is no snapshot"
    return (
        f"training diverged at step {t}: {what} has values that are NaN or infinite, and could not be rolled back, "
        f"because {why}. Load an earlier checkpoint, and find out what has written to it"
    )
