r"""Where to go back to after a ruined round, and how far to slow down: the rule behind ``hdet.Guard``. Pure.

The factor on the rate is 1. A roll back multiplies it by :math:`f`, and it grows back by :math:`1/f` in ``recover``
rounds, to its ceiling. Ruin within twice that time is the rate's fault: the factor then stays where it is lowered to.
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from hdet.rollback.ruin import FEWEST, Block, Course, Verdict, judge


class Slowed(NamedTuple):
    """How often, when and how far training was slowed down."""

    times: int = 0
    """Roll backs so far."""
    since: int = 0
    """The step of the last one."""
    low: float = 1.0
    """The factor on the rate then ..."""
    ceiling: float = 1.0
    """... and what it grows back to."""


class Retreat(NamedTuple):
    """What a guard remembers; plain numbers."""

    course: Course = Course()
    """What the judge remembers of the losses."""
    kept: tuple[tuple[int, int], ...] = ()
    """Step and slot of the snapshots, the last two at most."""
    slowed: Slowed = Slowed()
    before: Slowed | None = None
    """That of before the last roll back, until the next losses have shown whether it was right."""

    def remembering(self, slots: Container[int]) -> Retreat:
        """The state where only the snapshots in some slots can be put back."""
        return self._replace(kept=tuple(one for one in self.kept if one[1] in slots))


class Action(IntEnum):
    """What is to be done with the weights."""

    NOTHING = 0
    KEEP = 1
    """Copy them into the decision's slot."""
    ROLL_BACK = 2
    """Put back what lies in the decision's slot."""
    GO_ON = 3
    """Ruined, and there is nothing to go back to."""
    GIVE_UP = 4
    """Ruined once too often."""


class Decision(NamedTuple):
    """What follows from a round."""

    state: Retreat
    action: Action = Action.NOTHING
    slot: int = 0
    back_to: int = 0
    """The step whose weights are put back."""


@dataclass(frozen=True)
class Policy:
    """What a user has asked for.

    Args:
        every: steps of a round.
        factor: on the rate, at each roll back.
        recover: rounds in which that is made up for; None: it never is.
        most: roll backs of a run.
    """

    every: int
    factor: float
    recover: int | None
    most: int

    def factor_at(self, slowed: Slowed, t: int) -> float:
        """The factor on the rate of step ``t``.

        >>> policy = Policy(every=10, factor=0.25, recover=2, most=3)
        >>> [policy.factor_at(Slowed(1, since=100, low=0.25), t) for t in (100, 110, 120, 130)]
        [0.25, 0.5, 1.0, 1.0]
        """
        if self.recover is None or slowed.low >= slowed.ceiling:
            return slowed.low
        part = (t - slowed.since) / (self.recover * self.every)
        return min(slowed.low / math.pow(self.factor, part), slowed.ceiling)

    def after_round(self, state: Retreat, t: int, blocks: Sequence[Block], *, is_sound: bool) -> Decision:
        """One round.

        Args:
            state: what is remembered.
            t: steps made.
            blocks: the round's losses, lower is better; none where no loss was given.
            is_sound: whether weights, buffers and optimizer state are finite.
        """
        course, verdict = judge(state.course, blocks, falling=False)
        if verdict is Verdict.RUINED or not is_sound:
            return self._ruined(state, course, t, blocks)
        state = state._replace(course=course)
        if verdict is Verdict.ACQUITTED and state.before is not None:  # it was the data
            state = state._replace(slowed=state.before)
        if blocks:
            state = state._replace(before=None)
        if blocks and not is_well(course, blocks[-1]):  # the next round will show what became of these weights
            return Decision(state)
        slot = 1 - state.kept[-1][1] if state.kept else 0
        return Decision(state._replace(kept=(*state.kept[-1:], (t, slot))), Action.KEEP, slot)

    def _ruined(self, state: Retreat, course: Course, t: int, blocks: Sequence[Block]) -> Decision:
        slowed = state.slowed
        if slowed.times >= self.most:
            return Decision(state, Action.GIVE_UP)
        low = self.factor_at(slowed, t) * self.factor
        stays = self.recover is None or (slowed.times and t - slowed.since <= 2 * self.recover * self.every)
        now = Slowed(slowed.times + 1, t, low, low if stays else slowed.ceiling)
        if not state.kept:
            course = course._replace(accused=math.nan, before=())  # these weights stay, and are the measure now
            return Decision(Retreat(course, slowed=now), Action.GO_ON)
        was_tried = slowed.times > 0 and slowed.since >= state.kept[-1][0]
        is_clean = bool(blocks) and is_well(state.course, blocks[0]) and not was_tried
        kept = state.kept if is_clean else state.kept[:1]
        step, slot = kept[-1]
        return Decision(Retreat(course, kept, now, slowed), Action.ROLL_BACK, slot, step)


def is_well(course: Course, block: Block) -> bool:
    """Whether a few steps alone show no ruin: the weights next to them can be trusted.

    >>> course = Course()
    >>> for loss in (5.0, 4.1, 3.0, 2.2, 1.9, 2.1):
    ...     course, _ = judge(course, [Block(loss, 1), Block(loss + 0.1, 1)], falling=False)
    >>> is_well(course, Block(2.4, 1)), is_well(course, Block(50.0, 1)), is_well(course, Block(math.nan, 1))
    (True, False, False)
    """
    unbiased = course._replace(accused=math.nan, dark=0)
    return judge(unbiased, [block] * FEWEST, falling=False)[1] is Verdict.FINE
