"""What a guard tells people: warnings, the log, and why a run ends."""

from __future__ import annotations

from collections.abc import Sequence

from hdet.rollback.guard_policy import PATIENCE, GuardPolicy
from hdet.rollback.guard_state import Cause, GuardDecision, Outcome, Slowed, Step
from hdet.rule.enums import Action

__all__ = ["in_words", "left_out_in_words", "why_given_up", "why_not_rolled_back"]

_CAUSES = {
    Cause.LOSSES: "the losses have risen too far",
    Cause.STEP: "losses or gradients were NaN, infinite or out of all proportion",
    Cause.WEIGHTS: "weights, buffers or optimizer state are NaN, infinite or out of all proportion",
}
_SHOWN = 4
"""How many names a message shows."""


def in_words(decision: GuardDecision, t: int, policy: GuardPolicy, before: Slowed) -> str:
    """What a decision at step ``t`` has done to the weights; empty if nothing. ``before``: as it was until now."""
    ended, hold, slowed = decision.ended, decision.state.hold, decision.state.slowed
    if ended is not None and decision.outcome is Outcome.HARDER_DATA:
        return (
            f"the losses stayed as they were after the rollback of step {ended.begun}: the data are harder, and the "
            f"weights are as before it; {ended.batches} batches were left out"
        )
    if ended is not None and decision.outcome is Outcome.BAD_DATA:
        return (
            f"the data were bad around step {ended.begun}, and are as usual again at step {t}: rolled back to step "
            f"{ended.back}, and {ended.batches} batches were left out"
        )
    if hold is not None:
        if decision.action is not Action.ROLL_BACK:
            return ""
        why = f"{_CAUSES[hold.cause]}: rolled back to step {hold.back} at step {t}"
        return f"{why}, and up to {hold.allowed} batches are left out, to see whether weights or data are at fault"
    if ended is None and decision.action not in (Action.ROLL_BACK, Action.GO_ON):
        return ""
    at, cause, back = (t, decision.cause, decision.step) if ended is None else (ended.begun, ended.cause, ended.back)
    what = f"rolled back to step {back}"
    if decision.action is Action.GO_ON:
        what = "no snapshot fits the parameters that train now, so they stay"
    is_lowered = slowed.low < policy.factor_at(before, t)
    rate = f"the rate is multiplied by {slowed.low:.3g}" if is_lowered else "the rate stays as it is"
    often = f"rollback {slowed.rollbacks}, {slowed.in_a_row} of at most {policy.max_rollbacks} in a row"
    return f"training diverged at step {at}: {what}, and {rate} ({_CAUSES[cause]}; {often})"


def left_out_in_words(seen: Sequence[Step], steps: range) -> str:
    """Which of these steps were left out because of their gradients; empty if none was."""
    bad = [f"{t} (norm {one.norm:.3g})" for t, one in zip(steps, seen, strict=True) if one.left_out and one.norm]
    return f"gradients out of all proportion were not used, and training goes on: step {', '.join(bad)}" if bad else ""


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
    if not has_snapshot:
        return (
            f"{what}: NaN or infinite at step {t}, and there is no snapshot to roll back to; load an earlier checkpoint"
        )
    return (
        f"training diverged at step {t}: {what}: NaN or infinite, and was not rolled back, since this optimizer does "
        "not train it and no snapshot has it. Load it from an earlier checkpoint, and find out what has written to it"
    )
