r"""What a guard decides: when it holds still, when it rolls back, to which snapshot, and at which rate. Pure.

A guard hears of every step: its loss, the norm of its gradient, and whether the optimizer was kept from using it.
Every :data:`LOOK` steps are a *look*, at which all ranks decide alike (:meth:`GuardPolicy.after_look`). A step is
*strange* if its gradient is NaN, infinite or out of all proportion, or if its loss is far above the last ones
(:class:`Usual`).

1. **A strange gradient is not used**, if the optimizer can be kept from it. That costs one batch and nothing else.
2. **If two steps in a row are strange**, weights or data are at fault: the weights are rolled back, and the guard
   *holds still*. Steps are left out, and their losses are those of the snapshot. If the first two are as usual, the
   weights had diverged. If two later ones are, the data were bad for a while, and only these batches are lost. If no
   two of the batches that may be left out are (:meth:`GuardPolicy.allowed`), the data have become harder: the replaced
   weights are restored, and their losses are the measure from then on.

Weights are rolled back at once if they are NaN, infinite or out of all proportion themselves, and the guard holds still
as well if the losses of a look leap (:data:`hdet.rollback.judge.LOOKS`), or if those of a round of ``check_every``
steps have lost too much of what was gained (:data:`hdet.rollback.judge.ROUNDS`): their levels are compared with the
last 12 changes from look to look, or from round to round, once as many are known.

The first rollback leaves the rate as it is. One that follows within twice the time to recover multiplies it by
``factor``; what it is multiplied by grows back to a ceiling, 1 at first, over ``recover`` rounds. If that has happened
before, and training has been well in between, the rate is at fault: the lowered factor becomes the ceiling, so it does
not grow back.
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass
from enum import IntEnum
from statistics import median
from typing import NamedTuple

from hdet.rollback.judge import FEWEST, LIMITS, LOOKS, ROUNDS, Block, Limits, LossHistory, Verdict, blocks_of, judge
from hdet.rollback.policy import Action, Snapshot, is_due, rolled_back

LOOK = FEWEST
"""Steps from one look to the next: a level is made of as many losses."""
SPACING = 2 * LOOK
"""Steps between snapshots of tensors in host memory. A leap is seen at the end of the look after the one in which it
began, at the latest. Tensors on a device are copied every half round."""
RECENT, ASIDE = 0, 4
"""Slots: of the last snapshot, and of the weights that a rollback has replaced. 1 to 3 hold what was in the first one,
once that has turned out to be sound."""
REMEMBERED, KNOWN = 48, 16
"""Steps that a single one is compared with: at most, and at least."""
NORM, FAR, NEXT = 10.0, 3.0, 1.5
"""A gradient is out of all proportion if its norm is 10 times the largest of these steps, a loss if it is 3 times as
far above their median as any of them is from it; 1.5 times, right after a strange one (LOG, a guard that holds
still)."""
PATIENCE = 64
"""The run ends if the losses or gradients of this many steps in a row were NaN or infinite."""
HELD_PART = 50
"""While a guard holds still, it leaves out a fiftieth of the steps made at most, less those that it has left out
before; and :data:`CALM` at least."""
CALM = 2
"""Losses in a row that must be as usual: single ones are, by chance, if the data are harder."""
GROWN = 1e3
"""Weights have diverged if the largest is above 1000 times that in the last snapshot, and above 1000: a bit was
flipped."""
LARGEST = 3.4028234663852886e38
"""The largest number in single precision: a norm above it is infinite."""


class Step(NamedTuple):
    """What is known of one step; the same on all ranks. None: unknown."""

    loss: float | None = None
    """Lower is better; NaN if no rank has a finite one."""
    norm: float | None = None
    """Of the gradient."""
    left_out: bool = False
    """Whether the optimizer was kept from using this gradient."""

    @property
    def is_finite(self) -> bool:
        return all(math.isfinite(value) for value in (self.norm, self.loss) if value is not None)


class Usual(NamedTuple):
    """What single steps were like lately."""

    norms: tuple[float, ...] = ()
    losses: tuple[float, ...] = ()

    @property
    def norm_limit(self) -> float:
        """The largest norm that is in proportion.

        >>> Usual(norms=(1.0, 2.0) * 8).norm_limit, Usual(norms=(1.0, 2.0)).norm_limit == LARGEST
        (20.0, True)
        """
        highest = max(self.norms, default=0.0)
        return min(NORM * highest, LARGEST) if len(self.norms) >= KNOWN and highest > 0 else LARGEST

    @property
    def middle(self) -> float:
        """The median of the losses; NaN if too few are known."""
        return median(self.losses) if len(self.losses) >= KNOWN else math.nan

    def is_exceeded_by(self, step: Step, times: float = FAR) -> bool:
        """Whether a step is NaN, infinite or out of all proportion.

        >>> usual = Usual(norms=(1.0, 2.0) * 8, losses=(0.5, 0.6) * 8)
        >>> [usual.is_exceeded_by(Step(norm=norm)) for norm in (19.0, 21.0, math.nan)], usual.is_exceeded_by(Step(0.8))
        ([False, True, True], True)
        """
        if not step.is_finite or (step.norm is not None and step.norm > self.norm_limit):
            return True
        return step.loss is not None and step.loss > self.loss_limit(times)

    def loss_limit(self, times: float = 1.0) -> float:
        """So many times as far above the median as any of the losses is from it; infinite if too few are known.

        >>> Usual(losses=(1.0, 2.0, 3.0) * 8).loss_limit(3.0)
        5.0
        """
        middle = self.middle
        farthest = max((abs(loss - middle) for loss in self.losses), default=0.0)
        return middle + times * farthest if farthest > 0 else math.inf

    def noting(self, step: Step) -> Usual:
        """With one step more."""
        norms = self.norms if step.norm is None else (*self.norms, step.norm)[-REMEMBERED:]
        return Usual(norms, self.losses if step.loss is None else (*self.losses, step.loss)[-REMEMBERED:])


class Slowed(NamedTuple):
    """How often, when and how far training was slowed down."""

    rollbacks: int = 0
    """Rollbacks so far that were not undone."""
    in_a_row: int = 0
    """Those of them that each followed soon after another, and were not due to data."""
    since: int = 0
    """The step of the last one."""
    low: float = 1.0
    """The factor on the rate then."""
    ceiling: float = 1.0
    """What that factor grows back to."""


class Cause(IntEnum):
    """Why weights are rolled back."""

    LOSSES = 0
    """They have leapt, or have lost what was gained."""
    STEP = 1
    """Losses or gradients are out of all proportion, NaN or infinite."""
    WEIGHTS = 2
    """They are NaN, infinite, or one of them is out of all proportion."""


class Outcome(IntEnum):
    """What was at fault, once a guard has held still."""

    WEIGHTS = 0
    """They had diverged: the losses of the snapshot were as usual at once."""
    BAD_DATA = 1
    """The losses of the snapshot were as usual after some batches."""
    HARDER_DATA = 2
    """They were never as usual: the rollback is undone."""


class Hold(NamedTuple):
    """Training was rolled back, and the guard holds still until the losses have shown what was at fault."""

    begun: int
    """When it was rolled back."""
    back: int
    """The step whose weights were restored."""
    cause: Cause
    usual: float
    """The level of the losses before they were strange; NaN: unknown."""
    strange: float
    """The level that the rollback was made for; NaN: the gradients were strange, not the losses."""
    as_bad: float
    """The part of the way from the one to the other beyond which a loss is as bad."""
    allowed: int
    """Batches that may be left out."""
    replaced: Snapshot | None
    """The weights that were rolled back."""
    batches: int = 0
    """Batches that were left out so far."""
    calm: int = 0
    """The last of them whose losses were as usual, in a row."""
    losses: float = 0.0
    """The sum of their finite losses."""

    def is_as_bad(self, loss: float) -> bool:
        """Whether a loss shows that the rollback has not helped.

        >>> hold = Hold(9, 8, Cause.STEP, usual=1.0, strange=4.0, as_bad=1 / 3, allowed=2, replaced=None)
        >>> hold.is_as_bad(3.0), hold.is_as_bad(1.9)
        (True, False)
        """
        return loss - self.usual > self.as_bad * (self.strange - self.usual)


class GuardState(NamedTuple):
    """What a guard remembers; plain numbers."""

    looks: LossHistory = LossHistory()
    """What the judge remembers of the losses, look by look."""
    rounds: LossHistory = LossHistory()
    """The same, round by round."""
    begun: int = 0
    """When this round began."""
    losses: tuple[float, ...] = ()
    """The losses of this round so far."""
    unjudged: tuple[float, ...] = ()
    """The last of them, until there are enough for a level."""
    usual: Usual = Usual()
    kept: tuple[Snapshot, ...] = ()
    """Snapshots that are known to be sound, the oldest first."""
    unproven: Snapshot | None = None
    """The last one, until the next look has shown that it is."""
    slowed: Slowed = Slowed()
    strange: int = 0
    """Strange steps in a row, until now."""
    nonfinite: int = 0
    """Steps in a row whose losses or gradients were NaN or infinite."""
    hold: Hold | None = None
    held: int = 0
    """Batches that were left out while the guard has held still."""
    left_out: int = 0
    """The others that were left out: their gradients were strange."""
    since_kept: int = 0
    """Rollbacks since a snapshot was last kept."""

    @property
    def slots(self) -> set[int]:
        """The slots that are in use, and those whose memory is needed again soon."""
        replaced = self.hold.replaced if self.hold is not None else None
        return {one.slot for one in (*self.kept, replaced) if one is not None} | {RECENT, 1, 2}

    def is_strange(self, step: Step) -> bool:
        """Whether a step shows a fault. Losses that are above their best already say nothing: adversaries' rise so."""
        if self.looks.before and min(self.looks.before) - self.looks.lowest > LOOKS.noise * self.looks.noise:
            step = step._replace(loss=None) if step.is_finite else step
        return self.usual.is_exceeded_by(step, NEXT if self.strange else FAR)

    def remembering(self, slots: Container[int]) -> GuardState:
        """The state if only the snapshots in some slots can be restored."""
        hold = self.hold
        if hold is not None and hold.replaced is not None and hold.replaced.slot not in slots:
            hold = hold._replace(replaced=None)
        unproven = self.unproven if self.unproven is not None and self.unproven.slot in slots else None
        return self._replace(kept=tuple(one for one in self.kept if one.slot in slots), unproven=unproven, hold=hold)


class GuardDecision(NamedTuple):
    """What follows from a look."""

    state: GuardState
    action: Action = Action.NOTHING
    slot: int = 0
    step: int = 0
    """The step whose weights are restored."""
    cause: Cause = Cause.LOSSES
    proven: int | None = None
    """The slot that the last snapshot is copied to, since it has turned out to be sound."""
    ended: Hold | None = None
    """The guard has held still until now."""
    outcome: Outcome = Outcome.WEIGHTS


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
        """Batches that may be left out at ``t``, because the data may be bad or harder.

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
        is_sound: bool = True,
        *,
        spacing: int = SPACING,
        known: int | None = None,
    ) -> GuardDecision:
        """What follows from one look.

        Args:
            state: what is remembered.
            t: steps made.
            steps: those of the first ``known`` steps that were not seen yet.
            is_sound: whether the snapshot that is not proven yet, if there is one, is finite and in proportion.
            spacing: steps between snapshots.
            known: how many steps were read; None: all.
        """
        known = t if known is None else known
        proven = None
        if state.unproven is not None:
            if not is_sound:
                return self._diverged(state, t, t, Cause.WEIGHTS)
            state, proven = self._proven(state, state.unproven, spacing)
        decision = self._after_steps(state, t, steps, spacing, known)
        return decision._replace(proven=proven)

    def _after_steps(self, state: GuardState, t: int, steps: Sequence[Step], spacing: int, known: int) -> GuardDecision:
        if state.hold is not None:
            return self._holding(state, state.hold, t, steps)
        state, begun = _having_seen(state, steps), known - len(steps) - state.strange
        if state.nonfinite >= PATIENCE:
            return GuardDecision(state, Action.GIVE_UP, cause=Cause.STEP)
        if state.strange > 1:
            return self._diverged(state, t, begun - 1, Cause.STEP, steps)
        if state.strange:
            return GuardDecision(state)
        return self._judged(state, t, spacing, known)

    def _judged(self, state: GuardState, t: int, spacing: int, known: int) -> GuardDecision:
        """The levels of the losses, look by look and round by round; then another snapshot, if it is due."""
        blocks = [Block(loss, 1) for loss in state.unjudged]
        if 0 < len(blocks) < LOOK:
            return GuardDecision(state)
        before, began = state, state.begun
        looks, verdict = judge(state.looks, blocks, falling=False, limits=LOOKS)
        state = state._replace(looks=looks, unjudged=())
        latest, limits, judged = known - SPACING, LOOKS, before.looks
        if verdict is Verdict.FINE and known - began >= self.check_every:
            rounds, verdict = judge(state.rounds, blocks_of(state.losses), falling=False, limits=ROUNDS)
            state, latest = state._replace(rounds=rounds, begun=known, losses=()), min(latest, began)
            limits, judged = ROUNDS, before.rounds
        if verdict is Verdict.DIVERGED:
            level = (state.looks if limits is LOOKS else state.rounds).suspect_level
            usual = min(judged.before, default=math.nan)
            return self._diverged(state, t, latest, Cause.LOSSES, levels=(usual, level, limits.as_bad))
        is_well = not blocks or _is_well(looks, blocks[-1], LOOKS)
        if state.unproven is not None or not is_due(state.kept, t, spacing) or not is_well:
            return GuardDecision(state)  # if they are not well, the next look will show what became of these weights
        return GuardDecision(state._replace(unproven=Snapshot(t, RECENT)), Action.KEEP, RECENT)

    def _proven(self, state: GuardState, new: Snapshot, spacing: int) -> tuple[GuardState, int]:
        """The last snapshot is sound, and is copied to a slot of its own. One from before this round stays, too."""
        *others, last = state.kept or (new,)
        old = [one for one in others if one.step <= new.step - self.check_every][-1:] or others[:1]
        staying = [*(old if 2 * spacing < self.check_every else []), *([last] if state.kept else [])]
        slot = min({1, 2, 3} - {one.slot for one in staying})
        return state._replace(kept=(*staying, Snapshot(new.step, slot)), unproven=None, since_kept=0), slot

    def _holding(self, state: GuardState, hold: Hold, t: int, steps: Sequence[Step]) -> GuardDecision:
        """While the guard holds still, its weights are those of the snapshot: their losses tell data from weights."""
        nonfinite, is_strange = state.nonfinite, False
        for one in steps:
            nonfinite = 0 if one.is_finite else nonfinite + 1
            is_strange = not one.is_finite or (one.norm or 0.0) > state.usual.norm_limit
            loss = one.loss if one.loss is not None and math.isfinite(one.loss) else 0.0
            is_high = one.loss is not None and _is_high(state, hold, loss)
            calm = 0 if is_strange or is_high else hold.calm + 1
            hold = hold._replace(batches=hold.batches + 1, calm=calm, losses=hold.losses + loss)
        state = state._replace(nonfinite=nonfinite, held=state.held + len(steps), hold=hold)
        if nonfinite >= PATIENCE:
            return GuardDecision(state, Action.GIVE_UP, cause=Cause.STEP)
        if nonfinite or (hold.calm < CALM and hold.batches < hold.allowed):
            return GuardDecision(state)
        state = state._replace(hold=None, strange=0)
        if hold.calm < CALM and (is_strange or _is_high(state, hold, hold.losses / hold.batches)):
            return _resigned(state, hold)
        if hold.calm == hold.batches:
            return self._confirmed(state, t)._replace(ended=hold)
        slowed = state.slowed._replace(rollbacks=state.slowed.rollbacks + 1)  # the rate is not to blame
        return GuardDecision(state._replace(slowed=slowed), ended=hold, outcome=Outcome.BAD_DATA)

    def _diverged(
        self,
        state: GuardState,
        t: int,
        latest: int,
        cause: Cause,
        steps: Sequence[Step] = (),
        levels: tuple[float, float, float] | None = None,
    ) -> GuardDecision:
        """Back to a snapshot of step ``latest`` or before, if there is one: later ones may have diverged already.

        ``levels``: what the losses were like before, what they are like now, and which part of the way is as bad.
        """
        losses = [one.loss for one in steps if one.loss is not None and state.usual.is_exceeded_by(Step(one.loss))]
        strange = losses[-1] if losses else math.nan
        usual, level, as_bad = levels or (state.usual.middle, strange, LOOKS.as_bad)
        looks, rounds = (history.suspecting(math.nan) for history in (state.looks, state.rounds))
        is_worse = cause is not Cause.LOSSES and state.since_kept > 0  # once more, right after a rollback
        state = state._replace(looks=looks, rounds=rounds, begun=t, losses=(), unjudged=(), unproven=None)
        if not state.kept:  # these weights stay, and are the measure now
            state = state._replace(looks=looks.cleared(), rounds=rounds.cleared(), usual=Usual(), strange=0)
            return GuardDecision(self._confirmed(state, t).state, Action.GO_ON, cause=cause)
        kept = rolled_back(state.kept, latest, further=is_worse)
        state = state._replace(kept=kept, since_kept=state.since_kept + 1)
        if cause is Cause.WEIGHTS:  # there is nothing to find out
            found = self._confirmed(state._replace(strange=0), t)
            action = found.action if found.action is Action.GIVE_UP else Action.ROLL_BACK
            return GuardDecision(found.state, action, kept[-1].slot, kept[-1].step, cause)
        hold = Hold(t, kept[-1].step, cause, usual, level, as_bad, self.allowed(state, t), Snapshot(t, ASIDE))
        return GuardDecision(state._replace(hold=hold), Action.ROLL_BACK, kept[-1].slot, kept[-1].step, cause)

    def _confirmed(self, state: GuardState, t: int) -> GuardDecision:
        """The weights had diverged. The first rollback leaves the rate as it is; one that follows soon does not."""
        slowed, low = state.slowed, self.factor_at(state.slowed, t)
        is_soon = self.recover is None or t - slowed.since <= 2 * self.recover * self.check_every
        is_next = slowed.rollbacks > 0 and is_soon
        if is_next:
            low *= self.factor
        is_to_blame = is_next and (self.recover is None or (state.since_kept <= 1 and slowed.low < slowed.ceiling))
        slowed = Slowed(
            slowed.rollbacks + 1,
            slowed.in_a_row + 1 if is_next else 1,
            t,
            low,
            min(low, slowed.ceiling) if is_to_blame else slowed.ceiling,
        )
        state = state._replace(slowed=slowed)
        if slowed.in_a_row > self.max_rollbacks:
            return GuardDecision(state, Action.GIVE_UP, cause=Cause.WEIGHTS)
        return GuardDecision(state)


def _having_seen(state: GuardState, steps: Sequence[Step]) -> GuardState:
    """The state with the steps of a look; the second strange one in a row ends it."""
    losses = tuple(one.loss for one in steps if one.loss is not None)
    state = state._replace(
        left_out=state.left_out + sum(one.left_out for one in steps),
        losses=(*state.losses, *losses),
        unjudged=(*state.unjudged, *losses),
    )
    for one in steps:
        strange = state.is_strange(one)
        state = state._replace(
            strange=state.strange + 1 if strange else 0,
            nonfinite=0 if one.is_finite else state.nonfinite + 1,
            usual=state.usual if strange else state.usual.noting(one),
        )
        if state.strange > 1:
            break
    return state


def _is_high(state: GuardState, hold: Hold, loss: float) -> bool:
    """Whether a loss is above what was usual, or as bad as what the rollback was made for."""
    return loss > state.usual.loss_limit() or hold.is_as_bad(loss)


def _resigned(state: GuardState, hold: Hold) -> GuardDecision:
    """The data have become harder. What was usual before them no longer counts, and such leaps are tolerated."""
    leap = abs(hold.strange - hold.usual)
    looks, rounds = (history.tolerating(leap) for history in (state.looks, state.rounds))
    state = state._replace(looks=looks, rounds=rounds, usual=Usual(), losses=(), unjudged=(), since_kept=0)
    if hold.replaced is None:
        return GuardDecision(state, ended=hold, outcome=Outcome.HARDER_DATA)
    step = hold.replaced.step
    return GuardDecision(state, Action.TAKE_BACK, ASIDE, step, ended=hold, outcome=Outcome.HARDER_DATA)


def _is_well(history: LossHistory, block: Block, limits: Limits = LIMITS) -> bool:
    """Whether a few steps alone show no divergence, so that the weights next to them can be trusted.

    >>> history = LossHistory()
    >>> for loss in (5.0, 4.1, 3.0, 2.2, 1.9, 2.1):
    ...     history, _ = judge(history, [Block(loss, 1), Block(loss + 0.1, 1)], falling=False)
    >>> _is_well(history, Block(2.4, 1)), _is_well(history, Block(50.0, 1)), _is_well(history, Block(math.nan, 1))
    (True, False, False)
    """
    unbiased = history._replace(suspect_level=math.nan, nonfinite_streak=0)
    return judge(unbiased, [block] * FEWEST, falling=False, limits=limits)[1] is Verdict.FINE
