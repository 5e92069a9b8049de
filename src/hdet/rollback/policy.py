r"""Which snapshots are kept, when training is rolled back, and to which of them. Pure.

The first part serves the search and ``hdet.Guard`` alike; the rest is what a guard decides. Both keep snapshots of the
last good weights, both learn from the judge of losses (:mod:`hdet.rollback.judge`) that training has diverged, and both
undo a rollback that has turned out to be a false alarm, because the data have become harder. A *round* is some steps in
a row that are judged together; a guard also has *looks*, of four steps:

================= =============================================== =====================================================
question          search (:class:`hdet.search.rule.Rule`)         guard (:class:`GuardPolicy`)
================= =============================================== =====================================================
snapshot is due   at a round's end, after 4 steps (`is_due`)      at a look, after 8 steps (`is_due`), if it is fine
rolled back to    the older of two; if a batch is to blame, the   the last one from before the losses leapt; after NaN
                  last (`rolled_back`)                            or infinite numbers once more, one further back
no snapshot       the weights stay, the rate is lowered; an error the weights stay; an error if they are NaN or
                  if they are NaN or infinite                     infinite
rate              divided by 3, then raised again by the search   as it was the first time, then times ``factor``
false alarm       the rate is raised back, the weights stay       rate and weights are as before the rollback
================= =============================================== =====================================================

A guard decides every :data:`LOOK` steps, which is called a look. A rollback is *on trial* while the weights that it has
replaced are kept, in case it was a false alarm: then every second step is a look. One process looks at once if a step
is bad, on a GPU two steps later. Training has diverged in three cases:

1. A single loss, gradient or weight is NaN, infinite or far larger than usual (:class:`Usual`). A single gradient that
   was *withheld*, which means that the optimizer was kept from using it, does not count. Two in a row do, unless
   training was rolled back since the last snapshot, and :data:`PATIENCE` in a row end the run.
2. Losses leap and stay there for most of a look (:data:`hdet.rollback.judge.LOOKS`).
3. Losses of a whole round of ``check_every`` steps have lost too much of what was gained
   (:data:`hdet.rollback.judge.ROUNDS`).

In cases 2 and 3 the level of the losses is compared with its last 12 changes from look to look, or from round to round.
Until as many are known, only four steps in a row without a finite loss have diverged by these cases.

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

LOOK = FEWEST
"""Steps from one look to the next: a level is made of as many losses."""
SPACING = 2 * LOOK
"""Steps between snapshots. A leap is seen at the end of the look after the one in which it began, at the latest."""
OLD = 2
"""The slot of an older snapshot, in case divergence is seen late; 0 and 1 hold the last two."""
REMEMBERED, KNOWN = 48, 16
"""Steps that a single one is compared with: at most, and at least."""
NORM, LOSS = 10.0, 20.0
"""A gradient is out of all proportion if its norm is 10 times the largest of these steps. If no norm is known, the loss
must be 20 times farther above their median than any of them was from it (LOG, a guard that looks more often)."""
PATIENCE = 64
"""The run ends if the gradients of this many steps in a row were withheld."""
GROWN = 1e3
"""Weights have diverged if the largest is above 1000 times that in the last snapshot, and above 1000: a bit was
flipped."""


# -- what a search and a guard have in common --------------------------------------------------------------------------


class Snapshot(NamedTuple):
    """Weights, buffers and optimizer state as they were after ``step``, stored in ``slot``."""

    step: int
    slot: int


def is_due(kept: Sequence[Snapshot], t: int, spacing: int) -> bool:
    """Whether it is time for another snapshot; ``kept``: the snapshots there are, the oldest first."""
    return not kept or t - kept[-1].step >= spacing


def with_another(kept: Sequence[Snapshot], t: int) -> tuple[Snapshot, ...]:
    """The last snapshot and a new one of step ``t``, in the slot (0 or 1) that the last one does not use.

    >>> with_another(with_another((), 4), 8)
    (Snapshot(step=4, slot=0), Snapshot(step=8, slot=1))
    """
    last = tuple(kept[-1:])
    return (*last, Snapshot(t, 1 - last[0].slot if last else 0))


def rolled_back(kept: Sequence[Snapshot], latest: float, *, further: bool = False) -> tuple[Snapshot, ...]:
    """The snapshots that a rollback leaves, the oldest first; the last of them is the one to restore.

    Args:
        kept: the snapshots there are; none: the weights stay.
        latest: later snapshots may have been made after training began to diverge. If all were, the oldest must do.
        further: whether to go back by one more, if there is one.

    >>> kept = (Snapshot(4, 0), Snapshot(8, 1))
    >>> [rolled_back(kept, latest)[-1].step for latest in (9, 7, 3)], rolled_back(kept, 9, further=True)[-1].step
    ([8, 4, 4], 4)
    """
    fitting = tuple(one for one in kept if one.step <= latest) or tuple(kept[:1])
    return fitting[:-1] if further and len(fitting) > 1 else fitting


class Action(IntEnum):
    """What is to be done with the weights."""

    NOTHING = 0
    KEEP = 1
    """Copy them, with buffers and optimizer state, into the decision's slot."""
    ROLL_BACK = 2
    """Restore what is in the decision's slot. A guard copies the weights aside before that, unless they are broken."""
    TAKE_BACK = 3
    """A guard's last rollback was a false alarm: restore what it has replaced, from the decision's slot."""
    GO_ON = 4
    """Diverged, and there is no snapshot: training goes on if the weights are finite."""
    GIVE_UP = 5
    """Diverged once too often."""
    RESTART = 6
    """A search begins again from the weights as they were before the first step."""


# -- what a guard remembers --------------------------------------------------------------------------------------------


class Usual(NamedTuple):
    """What single steps were like lately."""

    norms: tuple[float, ...] = ()
    losses: tuple[float, ...] = ()

    def is_exceeded_by(self, norm: float | None, loss: float | None = None) -> bool:
        """Whether a step is NaN, infinite or out of all proportion; None: unknown.

        >>> usual = Usual(norms=(1.0, 2.0) * 8, losses=(0.5, 0.6) * 8)
        >>> [usual.is_exceeded_by(norm) for norm in (19.0, 21.0, math.nan)], usual.is_exceeded_by(None, loss=2.0)
        ([False, True, True], True)
        """
        if not all(math.isfinite(value) for value in (norm, loss) if value is not None):
            return True
        if norm is not None and len(self.norms) >= KNOWN:  # a loss alone does no harm
            return norm > NORM * max(self.norms) > 0
        if loss is None or len(self.losses) < KNOWN:
            return False
        middle = median(self.losses)
        return loss - middle > LOSS * max(abs(value - middle) for value in self.losses) > 0

    def noting(self, norm: float | None, loss: float | None) -> Usual:
        """With one step more."""
        norms = self.norms if norm is None else (*self.norms, norm)[-REMEMBERED:]
        return Usual(norms, self.losses if loss is None else (*self.losses, loss)[-REMEMBERED:])


class Step(NamedTuple):
    """What is known of one step; the same on all ranks. None: unknown."""

    loss: float | None = None
    """Lower is better; NaN if no rank has a finite one."""
    norm: float | None = None
    """Of the gradient."""
    withheld: bool = False
    """Whether the optimizer was kept from using this gradient."""


class Slowed(NamedTuple):
    """How often, when and how far training was slowed down."""

    rollbacks: int = 0
    """Rollbacks so far."""
    since: int = 0
    """The step of the last one."""
    low: float = 1.0
    """The factor on the rate then ..."""
    ceiling: float = 1.0
    """... and what it grows back to."""


class GuardState(NamedTuple):
    """What a guard remembers; plain numbers."""

    looks: LossHistory = LossHistory()
    """What the judge remembers of the losses, look by look ..."""
    rounds: LossHistory = LossHistory()
    """... and round by round."""
    begun: int = 0
    """When this round began ..."""
    losses: tuple[float, ...] = ()
    """... and its losses so far."""
    usual: Usual = Usual()
    kept: tuple[Snapshot, ...] = ()
    """Snapshots, the oldest first."""
    slowed: Slowed = Slowed()
    before: Slowed | None = None
    """How it was before the last rollback, until the next losses have shown whether that was right ..."""
    replaced: Snapshot | None = None
    """... and the weights that it has replaced."""
    since_well: int = 0
    """Rollbacks since a snapshot was last kept."""
    withheld: int = 0
    """Steps in a row whose gradients were withheld."""

    @property
    def slots(self) -> set[int]:
        """The slots that are in use."""
        return {one.slot for one in (*self.kept, *([self.replaced] if self.replaced is not None else []))}

    @property
    def recent(self) -> tuple[Snapshot, ...]:
        """The last snapshot, if there is one."""
        return tuple(one for one in self.kept if one.slot != OLD)[-1:]

    def is_bad(self, step: Step) -> bool:
        """Whether a single step shows that training has diverged. Right after a rollback only NaN and infinite numbers
        do: large ones may be due to the data."""
        usual = Usual() if self.since_well else self.usual
        return usual.is_exceeded_by(step.norm, step.loss)

    def is_out_of_proportion(self, step: Step) -> bool:
        """Whether a step is finite, and far from what steps were like before the last rollback."""
        return not Usual().is_exceeded_by(*step[:2]) and self.usual.is_exceeded_by(step.norm, step.loss)

    def having_seen(self, steps: Sequence[Step]) -> GuardState:
        """The state with the steps of a look."""
        usual, withheld = self.usual, self.withheld
        for one in steps:
            usual = usual if one.withheld else usual.noting(one.norm, one.loss)
            withheld = withheld + 1 if one.withheld else 0
        return self._replace(usual=usual, withheld=withheld)

    def remembering(self, slots: Container[int]) -> GuardState:
        """The state if only the snapshots in some slots can be restored."""
        is_there = self.replaced is not None and self.replaced.slot in slots
        return self._replace(
            kept=tuple(one for one in self.kept if one.slot in slots), replaced=self.replaced if is_there else None
        )


class Cause(IntEnum):
    """Why weights are rolled back."""

    LOSSES = 0
    """They have leapt, or have lost what was gained."""
    STEP = 1
    """A single loss or gradient is out of all proportion, NaN or infinite."""
    WEIGHTS = 2
    """They are NaN, infinite, or one of them is out of all proportion."""


class GuardDecision(NamedTuple):
    """What follows from a look."""

    state: GuardState
    action: Action = Action.NOTHING
    slot: int = 0
    step: int = 0
    """The step whose weights are restored."""
    cause: Cause = Cause.LOSSES
    aside: int | None = None
    """A slot for the weights that are replaced; None: they are given up."""
    retired: int | None = None
    """A slot whose snapshot is copied to :data:`OLD`."""


@dataclass(frozen=True)
class GuardPolicy:
    """What a guard decides, by the arguments that the user gave.

    Args:
        check_every: steps of a round.
        factor: what the rate is multiplied by at a rollback that follows another one.
        recover: rounds in which the rate grows back; None: it stays low.
        max_rollbacks: rollbacks of a run, at most.
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
        """Steps from one look to the next. After a rollback two are enough to tell whether the data are harder."""
        return LOOK if state.replaced is None else LOOK // 2

    def after_look(
        self,
        state: GuardState,
        t: int,
        steps: Sequence[Step],
        is_sound: bool | None = True,
        *,
        spacing: int = SPACING,
        known: int | None = None,
    ) -> GuardDecision:
        """What follows from one look.

        Args:
            state: what is remembered.
            t: steps made.
            steps: those of the first ``known`` steps that were not seen yet.
            is_sound: whether weights, buffers and optimizer state are finite and in proportion. None: unknown, and no
                snapshot is kept.
            spacing: steps between snapshots.
            known: how many steps were read; None: all.
        """
        known = t if known is None else known
        first = known - len(steps)
        if is_sound is False:
            return self._diverged(state, t, first, Cause.WEIGHTS)
        if state.replaced is not None and steps and state.is_out_of_proportion(steps[0]):
            return _taken_back(state)  # gradients are as large for the earlier weights
        bad = next((i for i, one in enumerate(steps) if not one.withheld and state.is_bad(one)), None)
        if bad is not None:
            return self._diverged(state, t, first + bad - 1, Cause.STEP)
        state = state.having_seen(steps)
        if state.withheld >= PATIENCE:
            return GuardDecision(state, Action.GIVE_UP, cause=Cause.STEP)
        if state.withheld > 1 and state.since_well == 0:  # once may be the data's fault
            return self._diverged(state, t, t - state.withheld - 1, Cause.STEP)
        blocks = [Block(one.loss, 1) for one in steps if one.loss is not None]
        looks, verdict = judge(state.looks, blocks, falling=False, limits=LOOKS)
        if verdict is Verdict.DIVERGED and state.withheld:
            return GuardDecision(state)  # training was rolled back already: gradients that are not finite are withheld
        state, began = state._replace(looks=looks, losses=(*state.losses, *(x.mean for x in blocks))), state.begun
        latest = known - SPACING
        if verdict is Verdict.FINE and known - began >= self.check_every:
            rounds, verdict = judge(state.rounds, blocks_of(state.losses), falling=False, limits=ROUNDS)
            state, latest = state._replace(rounds=rounds, begun=known, losses=()), min(latest, began)
        if verdict is Verdict.DIVERGED:
            cause = Cause.STEP if math.isinf(looks.suspect_level) else Cause.LOSSES
            return self._diverged(state, t, latest, cause)
        if verdict is Verdict.FALSE_ALARM:
            return _taken_back(state)
        if blocks and math.isnan(state.looks.suspect_level) and math.isnan(state.rounds.suspect_level):
            state = state._replace(before=None, replaced=None)
        if is_sound is None or not is_due(state.recent, t, spacing):
            return GuardDecision(state)
        if state.withheld or (blocks and not is_well(looks, blocks[-1], LOOKS)):
            return GuardDecision(state)  # the next look will show what became of these weights
        return self._keeping(state, t, spacing)

    def _diverged(self, state: GuardState, t: int, latest: int, cause: Cause) -> GuardDecision:
        """Back to a snapshot of step ``latest`` or before, if there is one: later ones may have diverged already."""
        if state.slowed.rollbacks >= self.max_rollbacks:
            return GuardDecision(state, Action.GIVE_UP, cause=cause)
        looks, rounds = (history.suspecting(history.suspect_level) for history in (state.looks, state.rounds))
        is_worse = cause is not Cause.LOSSES and state.since_well > 0  # not finite once more, right after a rollback
        state = state._replace(
            looks=looks,
            rounds=rounds,
            begun=t,
            losses=(),
            slowed=self._slowed(state, t),
            before=state.slowed,
            since_well=state.since_well + 1,
        )
        if not state.kept:  # these weights stay, and are the measure now
            state = state._replace(looks=looks.cleared(), rounds=rounds.cleared(), before=None)
            return GuardDecision(state, Action.GO_ON, cause=cause)
        *older, back = rolled_back(state.kept, latest, further=is_worse)
        kept = (*(one for one in older if one.slot == OLD and one.step < back.step), back)
        aside = None if cause is Cause.WEIGHTS else 1 - back.slot if back.slot != OLD else 0
        replaced = None if aside is None else Snapshot(t, aside)  # broken weights will never be restored
        state = state._replace(kept=kept, replaced=replaced)
        return GuardDecision(state, Action.ROLL_BACK, back.slot, back.step, cause, aside)

    def _slowed(self, state: GuardState, t: int) -> Slowed:
        """The first rollback leaves the rate as it is; one that follows soon does not."""
        slowed, low = state.slowed, self.factor_at(state.slowed, t)
        soon = self.recover is None or t - slowed.since <= 2 * self.recover * self.check_every
        if slowed.rollbacks == 0 or not soon:
            return Slowed(slowed.rollbacks + 1, t, low, slowed.ceiling)
        is_to_blame = self.recover is None or (state.since_well == 0 and slowed.low < slowed.ceiling)
        low *= self.factor
        return Slowed(slowed.rollbacks + 1, t, low, min(low, slowed.ceiling) if is_to_blame else slowed.ceiling)

    def _keeping(self, state: GuardState, t: int, spacing: int) -> GuardDecision:
        """Keep these weights, in the slot that has been in use for longer."""
        recent, retired = state.recent, None
        old = tuple(one for one in state.kept if one.slot == OLD)
        is_stale = not old or state.begun - old[0].step > self.check_every  # once a round: it is older than the next
        if recent and recent[0].step < state.begun and is_stale and spacing < self.check_every:
            old, retired = (Snapshot(recent[0].step, OLD),), recent[0].slot
        kept = with_another(recent, t)
        slot = kept[-1].slot
        replaced = None if state.replaced is not None and state.replaced.slot == slot else state.replaced
        state = state._replace(kept=(*old, *kept), since_well=0, replaced=replaced)
        return GuardDecision(state, Action.KEEP, slot, retired=retired)


def _taken_back(state: GuardState) -> GuardDecision:
    """The last rollback was a false alarm: the data are harder. What was usual before them no longer counts."""
    replaced = state.replaced
    state = state._replace(looks=state.looks.cleared(), rounds=state.rounds.cleared(), usual=Usual(), losses=())
    state = state._replace(slowed=state.before or state.slowed, before=None, replaced=None, since_well=0)
    if replaced is None:
        return GuardDecision(state)
    return GuardDecision(state, Action.TAKE_BACK, replaced.slot, replaced.step)


def is_well(history: LossHistory, block: Block, limits: Limits = LIMITS) -> bool:
    """Whether a few steps alone show no divergence, so that the weights next to them can be trusted.

    >>> history = LossHistory()
    >>> for loss in (5.0, 4.1, 3.0, 2.2, 1.9, 2.1):
    ...     history, _ = judge(history, [Block(loss, 1), Block(loss + 0.1, 1)], falling=False)
    >>> is_well(history, Block(2.4, 1)), is_well(history, Block(50.0, 1)), is_well(history, Block(math.nan, 1))
    (True, False, False)
    """
    unbiased = history._replace(suspect_level=math.nan, nonfinite_streak=0)
    return judge(unbiased, [block] * FEWEST, falling=False, limits=limits)[1] is Verdict.FINE
