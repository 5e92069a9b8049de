"""What a guard knows of single steps, what it remembers from look to look, and what it decides. Plain numbers.

:class:`Step` is one step as all ranks see it, :class:`RecentSteps` says which steps are out of all proportion,
:class:`GuardState` is everything that is remembered, and :class:`GuardDecision` is what follows from a look.
:mod:`hdet.rollback.guard_policy` has the rules by which one becomes the other.
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from enum import IntEnum
from statistics import fmean, median
from typing import NamedTuple

from hdet.rule.constants import LOOKS, ROUNDS, Limits
from hdet.rule.enums import Action
from hdet.rule.judge import LossHistory, Snapshot

RECENT, ASIDE = 0, 4
"""Slots: of the last snapshot, and of the weights that a rollback has replaced. Slots 1 to 3 hold snapshots that were
in the first one and have turned out to be sound."""
REMEMBERED, KNOWN = 48, 16
"""A single step is compared with the last 48 at most, and with 16 at least."""
NORM, FAR, NEXT = 10.0, 3.0, 1.5
"""A gradient is out of all proportion if its norm is 10 times the largest of these steps, a loss if it is 3 times as
far above their median as any of them is from it; 1.5 times, right after a strange one (LOG, a guard that holds
still)."""
LARGEST = 3.4028234663852886e38
"""The largest number in single precision: a norm above it is infinite."""


class Step(NamedTuple):
    """What is known of one step. None: unknown."""

    loss: float | None = None
    """Lower is better. NaN: no rank has a finite one."""
    norm: float | None = None
    """The norm of its gradient."""
    left_out: bool = False
    """Whether the optimizer was kept from using this gradient."""

    @property
    def is_finite(self) -> bool:
        return all(math.isfinite(value) for value in (self.norm, self.loss) if value is not None)


def merged_step(ranks: Sequence[Step], sign: float) -> Step:
    """One step as all ranks have seen it: the mean of their finite losses, the largest norm.

    ``sign``: -1 if the loss is maximised; 0 if it is not known which way is better, so that no loss is judged.

    >>> merged_step([Step(1.0, 2.0), Step(math.nan, 3.0), Step(2.0)], 1.0)
    Step(loss=1.5, norm=3.0, left_out=False)
    """
    losses = [one.loss for one in ranks if one.loss is not None]
    norms = [one.norm for one in ranks if one.norm is not None]
    finite = [loss for loss in losses if math.isfinite(loss)]
    loss = sign * (fmean(finite) if finite else math.nan) if losses and sign else None
    worst = max(norms, key=lambda norm: norm if math.isfinite(norm) else math.inf, default=None)
    return Step(loss, worst, any(one.left_out for one in ranks))


class RecentSteps(NamedTuple):
    """What single steps were like lately, strange ones left out."""

    norms: tuple[float, ...] = ()
    losses: tuple[float, ...] = ()

    @property
    def norm_limit(self) -> float:
        """The largest norm that is in proportion.

        >>> RecentSteps(norms=(1.0, 2.0) * 8).norm_limit, RecentSteps(norms=(1.0, 2.0)).norm_limit == LARGEST
        (20.0, True)
        """
        highest = max(self.norms, default=0.0)
        return min(NORM * highest, LARGEST) if len(self.norms) >= KNOWN and highest > 0 else LARGEST

    @property
    def median_loss(self) -> float:
        """The median of the losses. NaN: too few are known."""
        return median(self.losses) if len(self.losses) >= KNOWN else math.nan

    def loss_limit(self, times: float = 1.0) -> float:
        """A loss that is ``times`` as far above the median as any of them is from it. Infinite: too few are known.

        >>> RecentSteps(losses=(1.0, 2.0, 3.0) * 8).loss_limit(3.0)
        5.0
        """
        middle = self.median_loss
        farthest = max((abs(loss - middle) for loss in self.losses), default=0.0)
        return middle + times * farthest if farthest > 0 else math.inf

    def is_exceeded_by(self, step: Step, times: float = FAR) -> bool:
        """Whether a step is NaN, infinite or out of all proportion.

        >>> recent = RecentSteps(norms=(1.0, 2.0) * 8, losses=(0.5, 0.6) * 8)
        >>> [recent.is_exceeded_by(Step(norm=norm)) for norm in (19.0, 21.0, math.nan)]
        [False, True, True]
        >>> recent.is_exceeded_by(Step(loss=0.8))
        True
        """
        if not step.is_finite or (step.norm is not None and step.norm > self.norm_limit):
            return True
        return step.loss is not None and step.loss > self.loss_limit(times)

    def followed_by(self, step: Step) -> RecentSteps:
        """The same with one step more."""
        norms = self.norms if step.norm is None else (*self.norms, step.norm)[-REMEMBERED:]
        return RecentSteps(norms, self.losses if step.loss is None else (*self.losses, step.loss)[-REMEMBERED:])


class Slowed(NamedTuple):
    """How often, when and how far training was slowed down."""

    rollbacks: int = 0
    """Rollbacks so far that were not undone."""
    in_a_row: int = 0
    """How many of the last ones followed soon after another, and were not due to data."""
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
    """Losses or gradients of single steps are out of all proportion, NaN or infinite."""
    WEIGHTS = 2
    """The weights are NaN, infinite, or one of them is out of all proportion."""


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
    """The step at which it was rolled back."""
    back: int
    """The step whose weights were restored."""
    cause: Cause
    usual: float
    """The level of the losses before they were strange. NaN: unknown."""
    strange: float
    """The level that the rollback was made for. NaN: the gradients were strange, not the losses."""
    as_bad: float
    """A loss is as bad as before the rollback if it is above by this part of the way from ``usual`` to ``strange``."""
    allowed: int
    """How many batches may be left out."""
    replaced: Snapshot | None
    """The weights that were rolled back."""
    batches: int = 0
    """How many batches were left out so far."""
    calm: int = 0
    """How many of the last ones had losses as usual, in a row."""
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
    """What a guard remembers."""

    looks: LossHistory = LossHistory()
    """What the judge remembers of the losses, look by look."""
    rounds: LossHistory = LossHistory()
    """The same, round by round."""
    begun: int = 0
    """The step at which this round began."""
    losses: tuple[float, ...] = ()
    """The losses of this round so far."""
    unjudged: tuple[float, ...] = ()
    """The last of them, until there are enough for a level."""
    usual: RecentSteps = RecentSteps()
    kept: tuple[Snapshot, ...] = ()
    """Snapshots that are known to be sound, the oldest first."""
    unproven: Snapshot | None = None
    """The last one, until the next look has shown that it is sound."""
    slowed: Slowed = Slowed()
    strange: int = 0
    """How many of the last steps were strange, in a row."""
    nonfinite: int = 0
    """How many of the last steps had losses or gradients that were NaN or infinite, in a row."""
    hold: Hold | None = None
    held: int = 0
    """How many batches were left out while the guard has held still."""
    left_out: int = 0
    """How many other batches were left out, because their gradients were strange."""
    since_kept: int = 0
    """Rollbacks since a snapshot was last kept."""
    look_limits: Limits = LOOKS
    """What a look may lose: a guard that is resumed judges as it did before, also in another version of hdet."""
    round_limits: Limits = ROUNDS

    @property
    def slots(self) -> set[int]:
        """The slots that are in use, and those whose memory is needed again soon."""
        replaced = self.hold.replaced if self.hold is not None else None
        return {one.slot for one in (*self.kept, replaced) if one is not None} | {RECENT, 1, 2}

    def is_strange(self, step: Step) -> bool:
        """Whether a step shows a fault.

        While the level of the losses is above its lowest anyway, a single loss says nothing: those of adversaries rise
        by themselves.
        """
        if self.looks.before and min(self.looks.before) - self.looks.lowest > self.look_limits.noise * self.looks.noise:
            step = step._replace(loss=None) if step.is_finite else step
        return self.usual.is_exceeded_by(step, NEXT if self.strange else FAR)

    def is_high(self, hold: Hold, loss: float) -> bool:
        """Whether a loss is above what was usual, or as bad as what a rollback was made for."""
        return loss > self.usual.loss_limit() or hold.is_as_bad(loss)

    def remembering(self, slots: Container[int]) -> GuardState:
        """The state if only the snapshots in some slots can be restored."""
        hold, unproven = self.hold, self.unproven
        if hold is not None and hold.replaced is not None and hold.replaced.slot not in slots:
            hold = hold._replace(replaced=None)
        if unproven is not None and unproven.slot not in slots:
            unproven = None
        return self._replace(kept=tuple(one for one in self.kept if one.slot in slots), unproven=unproven, hold=hold)


class GuardDecision(NamedTuple):
    """What follows from a look."""

    state: GuardState
    action: Action = Action.NOTHING
    slot: int = 0
    """The slot that the action is about."""
    step: int = 0
    """The step whose weights are restored."""
    cause: Cause = Cause.LOSSES
    proven: int | None = None
    """The slot that the last snapshot is copied to, because it has turned out to be sound."""
    ended: Hold | None = None
    """The guard has held still until now."""
    outcome: Outcome = Outcome.WEIGHTS
