r"""What a guard decides: when it holds still, when it rolls back, to which snapshot, and at which rate. Pure.

A guard hears of every step: its loss, the norm of its gradient, and whether the optimizer was kept from using it.
Every :data:`LOOK` steps it has a *look*, at which all ranks make the same decision (:meth:`GuardPolicy.after_look`). A
step is *strange* if its gradient is NaN, infinite or out of all proportion, or if its loss is far above the last ones
(:class:`hdet.rollback.guard_state.RecentSteps`).

1. **A strange gradient is not used**, if the optimizer can be kept from it. That costs one batch and nothing else.
2. **If two steps in a row are strange**, weights or data are at fault: the weights are rolled back, and the guard
   *holds still*. It leaves steps out, whose losses are then those of the snapshot. If the first two are as usual, the
   weights had diverged. If two later ones are, the data were bad for a while, and only these batches are lost. If no
   two of the batches that may be left out are (:meth:`GuardPolicy.allowed`), the data have become harder: the replaced
   weights are restored, and from then on their losses count as usual.

Weights are rolled back at once if they are NaN, infinite or out of all proportion themselves. The guard also rolls back
and holds still if the losses of a look leap (:data:`hdet.rule.constants.LOOKS`), or if those of a round of
``check_every`` steps have lost too much of what was gained (:data:`hdet.rule.constants.ROUNDS`). Both compare the level
of the losses with its last 12 changes from look to look, or from round to round, and need to know as many.

The first rollback leaves the rate as it is. One that follows within twice the time to recover multiplies it by
``factor``, and this factor grows back to a ceiling, 1 at first, over ``recover`` rounds. If that has happened before,
and training has been well in between, the rate is at fault: the lowered factor becomes the ceiling, so it does not grow
back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from hdet.rollback.guard_state import (
    ASIDE,
    RECENT,
    Cause,
    GuardDecision,
    GuardState,
    Hold,
    Outcome,
    RecentSteps,
    Slowed,
    Step,
)
from hdet.rule.constants import FEWEST, LOOKS, Limits
from hdet.rule.enums import Action, Verdict
from hdet.rule.judge import Block, LossHistory, Snapshot, blocks_of, is_due, judge

LOOK = FEWEST
"""Steps from one look to the next: a level is made of as many losses."""
SPACING = 2 * LOOK
"""Steps between snapshots of tensors in host memory. A leap is seen at the end of the look after the one in which it
began, at the latest. Tensors on a device are copied once a round."""
PATIENCE = 64
"""The run ends if the losses or gradients of this many steps in a row were NaN or infinite."""
HELD_PART = 50
"""While a guard holds still, it leaves out a fiftieth of the steps made at most, without those that it has left out
before; and :data:`CALM` at least."""
CALM = 2
"""Losses in a row that must be as usual. If the data are harder, single ones are as usual by chance."""
_Levels: TypeAlias = tuple[float, float, float]
"""The level of the losses before, the one that is suspected, and the part of the way between them that counts as bad.
NaN: unknown, or not needed."""


@dataclass(frozen=True)
class GuardPolicy:
    """What a guard decides, by the arguments that the user gave.

    Args:
        check_every: steps of a round.
        factor: what the rate is multiplied by at a rollback that follows another one.
        recover: rounds in which the rate grows back; None: it stays low.
        max_rollbacks: rollbacks that each follow soon after another, at most.
    """

    check_every: int
    factor: float
    recover: int | None
    max_rollbacks: int

    def factor_at(self, slowed: Slowed, t: int) -> float:
        """The factor on the rate of step ``t``.

        >>> policy = GuardPolicy(check_every=10, factor=0.25, recover=2, max_rollbacks=3)
        >>> [policy.factor_at(Slowed(2, since=100, low=0.25), t) for t in (100, 110, 120, 130)]
        [0.25, 0.5, 1.0, 1.0]
        """
        if self.recover is None or slowed.low >= slowed.ceiling:
            return slowed.low
        part = min((t - slowed.since) / (self.recover * self.check_every), 1.0)
        return min(slowed.low * math.pow(slowed.ceiling / slowed.low, part), slowed.ceiling)

    @staticmethod
    def until_next_look(state: GuardState) -> int:
        """Steps from one look to the next. While the guard holds still, every loss counts."""
        return 1 if state.hold is not None or state.strange else LOOK

    def allowed(self, state: GuardState, t: int) -> int:
        """How many batches may be left out at ``t``, because the data may be bad or harder.

        >>> policy = GuardPolicy(check_every=50, factor=0.25, recover=2, max_rollbacks=3)
        >>> [policy.allowed(GuardState(), t) for t in (60, 1000, 10_000)], policy.allowed(GuardState(held=15), 1000)
        ([2, 20, 50], 5)
        """
        return max(CALM, min(self.check_every, t // HELD_PART - state.held))

    def after_look(
        self,
        state: GuardState,
        t: int,
        steps: Sequence[Step],
        *,
        is_sound: bool = True,
        spacing: int = SPACING,
        delay: int = 0,
    ) -> GuardDecision:
        """What follows from one look.

        Args:
            state: what is remembered.
            t: steps made.
            steps: those that were read since the last look.
            is_sound: whether the snapshot that is not proven yet, if there is one, is finite and in proportion.
            spacing: steps between snapshots.
            delay: how many of the last steps were not read yet.
        """
        proven = None
        if state.unproven is not None:
            if not is_sound:
                return self._diverged(state, t, t, Cause.WEIGHTS, (math.nan, math.nan, math.nan))
            state, proven = self._proven(state, state.unproven, spacing)
        if state.hold is not None:
            return self._holding(state, state.hold, t, steps)._replace(proven=proven)
        return self._after_steps(state, t, steps, spacing, t - delay)._replace(proven=proven)

    def _proven(self, state: GuardState, new: Snapshot, spacing: int) -> tuple[GuardState, int]:
        """The last snapshot is sound, and is copied to a slot of its own. One from before this round stays, too."""
        *others, last = state.kept or (new,)
        old = [one for one in others if one.step <= new.step - self.check_every][-1:] or others[:1]
        staying = [*(old if 2 * spacing < self.check_every else []), *([last] if state.kept else [])]
        slot = min({1, 2, 3} - {one.slot for one in staying})
        return state._replace(kept=(*staying, Snapshot(new.step, slot)), unproven=None, since_kept=0), slot

    def _after_steps(self, state: GuardState, t: int, steps: Sequence[Step], spacing: int, known: int) -> GuardDecision:
        """Single steps are judged first, then the levels of their losses. ``known``: the number of steps read."""
        before_first_strange = known - len(steps) - state.strange - 1
        state = _having_seen(state, steps)
        if state.nonfinite >= PATIENCE:
            return GuardDecision(state, Action.GIVE_UP, cause=Cause.STEP)
        if state.strange > 1:
            losses = [one.loss for one in steps if one.loss is not None and state.usual.is_exceeded_by(Step(one.loss))]
            levels = state.usual.median_loss, losses[-1] if losses else math.nan, state.look_limits.as_bad
            return self._diverged(state, t, before_first_strange, Cause.STEP, levels)
        if state.strange or 0 < len(state.unjudged) < LOOK:
            return GuardDecision(state)
        return self._judged(state, t, spacing, known)

    def _judged(self, state: GuardState, t: int, spacing: int, known: int) -> GuardDecision:
        """The level of a look is judged, then that of a round that ends. Another snapshot is made if it is due."""
        blocks, latest = [Block(loss, 1) for loss in state.unjudged], known - SPACING
        looks, verdict = judge(state.looks, blocks, falling=False, limits=state.look_limits)
        levels = _levels(state.looks, looks, state.look_limits)
        state = state._replace(looks=looks, unjudged=())
        if verdict is not Verdict.DIVERGED and known - state.begun >= self.check_every:
            rounds, verdict = judge(state.rounds, blocks_of(state.losses), falling=False, limits=state.round_limits)
            levels, latest = _levels(state.rounds, rounds, state.round_limits), min(latest, state.begun)
            state = state._replace(rounds=rounds, begun=known, losses=())
        if verdict is Verdict.DIVERGED:
            return self._diverged(state, t, latest, Cause.LOSSES, levels)
        is_well = not blocks or _is_well(looks, blocks[-1], state.look_limits)
        if state.unproven is not None or not is_due(state.kept, t, spacing) or not is_well:
            return GuardDecision(state)  # if the last loss is not well, the next look shows what became of the weights
        return GuardDecision(state._replace(unproven=Snapshot(t, RECENT)), Action.KEEP, RECENT)

    def _holding(self, state: GuardState, hold: Hold, t: int, steps: Sequence[Step]) -> GuardDecision:
        """While the guard holds still, its weights are those of the snapshot: their losses tell data from weights."""
        nonfinite, is_strange = state.nonfinite, False
        for one in steps:
            nonfinite = 0 if one.is_finite else nonfinite + 1
            is_strange = not one.is_finite or (one.norm or 0.0) > state.usual.norm_limit
            loss = one.loss if one.loss is not None and math.isfinite(one.loss) else 0.0
            is_high = one.loss is not None and state.is_high(hold, loss)
            calm = 0 if is_strange or is_high else hold.calm + 1
            hold = hold._replace(batches=hold.batches + 1, calm=calm, losses=hold.losses + loss)
        state = state._replace(nonfinite=nonfinite, held=state.held + len(steps), hold=hold)
        if nonfinite >= PATIENCE:
            return GuardDecision(state, Action.GIVE_UP, cause=Cause.STEP)
        if nonfinite or (hold.calm < CALM and hold.batches < hold.allowed):
            return GuardDecision(state)
        ended = state._replace(hold=None, strange=0)
        if hold.calm < CALM and (is_strange or state.is_high(hold, hold.losses / hold.batches)):
            return _undone(ended, hold)
        if hold.calm == hold.batches:
            return self._slowed(GuardDecision(ended, ended=hold), t)
        slowed = state.slowed._replace(rollbacks=state.slowed.rollbacks + 1)  # the rate is not to blame
        return GuardDecision(ended._replace(slowed=slowed), ended=hold, outcome=Outcome.BAD_DATA)

    def _diverged(self, state: GuardState, t: int, latest: int, cause: Cause, levels: _Levels) -> GuardDecision:
        """Go back to a snapshot of step ``latest`` or before, if there is one. Later ones may have diverged already.

        Args:
            state: what is remembered.
            t: steps made.
            latest: the last step whose weights can be trusted.
            cause: what was strange.
            levels: of the losses.
        """
        looks, rounds = (history.suspecting(math.nan) for history in (state.looks, state.rounds))
        state = state._replace(looks=looks, rounds=rounds, begun=t, losses=(), unjudged=(), unproven=None)
        if not state.kept:  # these weights stay, and are the measure now
            state = state._replace(looks=looks.cleared(), rounds=rounds.cleared(), usual=RecentSteps(), strange=0)
            return self._slowed(GuardDecision(state, Action.CANNOT_ROLL_BACK, cause=cause), t)
        is_worse = cause is not Cause.LOSSES and state.since_kept > 0  # once more, right after a rollback
        kept = _rolled_back(state.kept, latest, further=is_worse)
        state = state._replace(kept=kept, since_kept=state.since_kept + 1)
        decision = GuardDecision(state, Action.ROLL_BACK, kept[-1].slot, kept[-1].step, cause)
        if cause is Cause.WEIGHTS:  # there is nothing to find out
            return self._slowed(decision._replace(state=state._replace(strange=0)), t)
        hold = Hold(t, kept[-1].step, cause, *levels, self.allowed(state, t), Snapshot(t, ASIDE))
        return decision._replace(state=state._replace(hold=hold))

    def _slowed(self, decision: GuardDecision, t: int) -> GuardDecision:
        """The weights had diverged. The first rollback leaves the rate as it is; one that follows soon lowers it."""
        state, slowed = decision.state, decision.state.slowed
        low = self.factor_at(slowed, t)
        is_soon = self.recover is None or t - slowed.since <= 2 * self.recover * self.check_every
        is_next = slowed.rollbacks > 0 and is_soon
        if is_next:
            low *= self.factor
        is_to_blame = is_next and (self.recover is None or (state.since_kept <= 1 and slowed.low < slowed.ceiling))
        ceiling = min(low, slowed.ceiling) if is_to_blame else slowed.ceiling
        slowed = Slowed(slowed.rollbacks + 1, slowed.in_a_row + 1 if is_next else 1, t, low, ceiling)
        is_last = slowed.in_a_row > self.max_rollbacks and decision.action is not Action.CANNOT_ROLL_BACK
        action = Action.GIVE_UP if is_last else decision.action
        return decision._replace(state=state._replace(slowed=slowed), action=action)


def _having_seen(state: GuardState, steps: Sequence[Step]) -> GuardState:
    """The state with the steps of a look; the second strange one in a row ends it."""
    losses, left_out = tuple(one.loss for one in steps if one.loss is not None), sum(one.left_out for one in steps)
    state = state._replace(left_out=state.left_out + left_out)
    state = state._replace(losses=state.losses + losses, unjudged=state.unjudged + losses)
    for one in steps:
        strange = state.is_strange(one)
        state = state._replace(
            strange=state.strange + 1 if strange else 0,
            nonfinite=0 if one.is_finite else state.nonfinite + 1,
            usual=state.usual if strange else state.usual.followed_by(one),
        )
        if state.strange > 1:
            break
    return state


def _rolled_back(kept: Sequence[Snapshot], latest: float, *, further: bool = False) -> tuple[Snapshot, ...]:
    """The snapshots that a rollback leaves, the oldest first; the last of them is the one to restore.

    Args:
        kept: the snapshots there are; none: the weights stay.
        latest: later snapshots may have been made after training began to diverge. If all were, the oldest must do.
        further: whether to go back by one more, if there is one.

    >>> kept = (Snapshot(4, 0), Snapshot(8, 1))
    >>> [_rolled_back(kept, latest)[-1].step for latest in (9, 7, 3)], _rolled_back(kept, 9, further=True)[-1].step
    ([8, 4, 4], 4)
    """
    fitting = tuple(one for one in kept if one.step <= latest) or tuple(kept[:1])
    return fitting[:-1] if further and len(fitting) > 1 else fitting


def _levels(before: LossHistory, after: LossHistory, limits: Limits) -> _Levels:
    return min(before.before, default=math.nan), after.suspect_level, limits.as_bad


def _undone(state: GuardState, hold: Hold) -> GuardDecision:
    """The data have become harder: undo the rollback. What was usual no longer counts, and such leaps are tolerated."""
    leap = abs(hold.strange - hold.usual)
    looks, rounds = (history.tolerating(leap) for history in (state.looks, state.rounds))
    state = state._replace(looks=looks, rounds=rounds, usual=RecentSteps(), losses=(), unjudged=(), since_kept=0)
    action = Action.NOTHING if hold.replaced is None else Action.TAKE_BACK
    return GuardDecision(state, action, ASIDE, ended=hold, outcome=Outcome.HARDER_DATA)


def _is_well(history: LossHistory, block: Block, limits: Limits = LOOKS) -> bool:
    """Whether a single loss shows no leap, so that the weights next to it can be trusted.

    >>> history = LossHistory()
    >>> for loss in (5.0, 4.1, 3.0, 2.2, 1.9, 2.1):
    ...     history, _ = judge(history, [Block(loss, 1), Block(loss + 0.1, 1)], falling=False)
    >>> _is_well(history, Block(2.4, 1)), _is_well(history, Block(math.nan, 1))
    (True, False)
    """
    unbiased = history._replace(suspect_level=math.nan, nonfinite_streak=0)
    return judge(unbiased, [block] * FEWEST, falling=False, limits=limits)[1] is Verdict.FINE
