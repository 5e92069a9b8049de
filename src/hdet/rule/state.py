"""What the rule remembers of a run, what it is given at the end of a round, and what it answers."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, NamedTuple

from hdet.rule import plain
from hdet.rule.constants import BLOCKS, CLOSE, DEFAULT, HIGHEST, LOWEST, Constants
from hdet.rule.enums import Action, Event, Phase, Reason
from hdet.rule.estimate import Measured
from hdet.rule.judge import LossHistory
from hdet.rule.policy import Snapshot
from hdet.rule.progress import Progress
from hdet.rule.rounds import Block


class State(NamedTuple):
    """Everything that a search has learned; plain numbers, or arrays for ``hdet.jax``, whose module is ``xp``."""

    phase: Phase = Phase.FIRST
    log_factor: float = math.log(DEFAULT.initial_factor)
    """log of m, the factor on the user's guess: the target is m times the schedule, which contains the guess."""
    peak: float = 0.0
    """The step at which the schedule's rising phase ends: until there the rate is below the target."""
    ceiling: float = math.inf
    """log of the rate over the guess that has been found, which the rate does not exceed; infinite until gradients have
    turned for the first time."""
    asked: float = math.inf
    """log of what the evidence alone asks for, from then on: the ceiling is this, drawn to the prior ..."""
    most_asked: float = math.inf
    """... and the highest that it was; a rollback does not lower it."""
    has_diverged: bool = False
    """Whether training has diverged, and not because data became harder: then neither the prior nor losses raise what
    was found, since both have led there."""
    prior: float = math.nan
    """log of the rate over the guess that the ceiling is drawn to; NaN: there is none."""
    reach: float = math.nan
    """log of how far a step leads at m = 1; NaN: it is not known."""
    history: LossHistory = LossHistory()
    """What is remembered of the losses."""
    snapshots: tuple[Snapshot, ...] = ()
    """The ends of good rounds, the last two at most."""
    slowed_from: float = math.nan
    """``log_factor`` before training was rolled back, in case that was wrong; NaN once losses have followed."""
    pace: float = math.nan
    """How far the first step that was measured moved the weights, over its rate; NaN after a rollback ..."""
    rate: float = math.nan
    """... and that rate."""
    excused: bool = False
    """Whether training was rolled back at the same rate, because of a bad batch. The next time the rate is lowered.
    Such a rollback, and a round with losses while the schedule falls, set this back, so that one more batch is excused.
    While it is true, a rate that has a ceiling is not raised, since a path that has just begun is always straight."""

    @property
    def peak_factor(self) -> float:
        """The factor on the guess that has been found: that of the schedule's peak."""
        return math.exp(min(self.log_factor, self.ceiling))

    def factor(self, t: float, constants: Constants = DEFAULT, xp: Any = plain) -> Any:
        """The factor on the schedule, which contains the guess, at step ``t``: m r(t), at most what was found.

        r(t) = max(0.3, (t + 1) / (peak + 1)) until the peak, then 1.

        >>> state = State(Phase.SEARCHING, log_factor=0.0, peak=99.0)
        >>> state.factor(9), state.factor(49), state.factor(99), state._replace(ceiling=math.log(0.7)).factor(99)
        (0.3, 0.5, 1.0, 0.7)
        """
        target = xp.exp(self.log_factor) * self.rise(t, constants, xp)
        return xp.minimum(target, xp.exp(xp.minimum(self.ceiling, HIGHEST)))

    def rise(self, t: float, constants: Constants = DEFAULT, xp: Any = plain) -> Any:
        """r(t)."""
        rises = (self.phase == Phase.SEARCHING) & (t < self.peak)
        return xp.where(rises, xp.maximum(constants.min_rise, (t + 1) / xp.maximum(self.peak + 1, 1.0)), 1.0)

    def peaking(self, peak: float, share: float = 1.0, xp: Any = plain) -> State:
        """The state on a schedule with another peak; ``share``: what the factor is multiplied by.

        >>> State(Phase.SEARCHING, log_factor=0.0, peak=99.0).peaking(49, share=0.5).factor(50)
        0.5
        """
        left = xp.log(share)
        log_factor = xp.maximum(self.log_factor + left, LOWEST)
        return self._replace(peak=peak, log_factor=log_factor, slowed_from=self.slowed_from + left)

    def at(self, log_factor: float, xp: Any = plain) -> State:
        """The state at another factor, within bounds; the ceiling falls with it."""
        log_factor = xp.clip(log_factor, LOWEST, HIGHEST)
        return self._replace(log_factor=log_factor).lowered(xp.minimum(log_factor - self.log_factor, 0.0))

    def climbing(self, t: float, constants: Constants = DEFAULT, xp: Any = plain) -> State:
        """The state without a ceiling, at the rate that is in use at step ``t``."""
        log_factor = xp.minimum(self.log_factor, self.ceiling - xp.log(self.rise(t, constants, xp)))
        return self._replace(log_factor=log_factor, ceiling=math.inf, asked=math.inf, most_asked=math.inf)

    def bounded(self, highest: float, xp: Any = plain) -> State:
        """The state with a factor that does not run away above the user's bound, whose logarithm is given."""
        return self._replace(log_factor=xp.minimum(self.log_factor, xp.maximum(highest, LOWEST)))

    def is_bound(self, highest: float, xp: Any = plain) -> Any:
        """Whether the rate is at that bound, and not at a ceiling below it."""
        return (highest < math.inf) & (xp.minimum(self.log_factor, self.ceiling) >= highest - CLOSE)

    def lowered(self, by: float) -> State:
        """The state with another ceiling; ``by``: what is added to its logarithm."""
        return self._replace(ceiling=self.ceiling + by, asked=self.asked + by)


class Evidence(NamedTuple):
    """What is known when a round ends; equal on all ranks."""

    span: tuple[int, int]
    """The last step of the schedule in the round, and the one after it."""
    steps: int
    """How many steps the optimizer made."""
    blocks: tuple[Block, ...] = ()
    """The losses of the round; empty: none were given."""
    peak: float = 0.0
    """The step at which the schedule's rising phase ends."""
    shape: float = 1.0
    """The schedule at the round's end, over its highest value."""
    measured: Measured = Measured()
    """What the steps since the beginning of the path have shown."""
    log_guess: float = 0.0
    """log of the rate that m = 1 stands for."""
    estimated_log_factor: float = -math.inf
    """log m of the estimated rate; -inf if that is 0: there were no gradients, or they have turned against the path."""
    made: int = 0
    """Steps that the optimizer has made in all; 0: as many as the schedule."""
    has_losses: bool = True
    """Whether ``blocks`` are losses; if not, they are sizes of gradients."""
    has_fallen: bool = True
    """:attr:`Progress.is_below`: whether the loss is clearly below where it began, by however little; also true if
    nothing is known of it. "Until the loss has fallen" means this in the rule and its constants."""
    has_gained: bool = True
    """:attr:`Progress.has_gained`: whether the loss is below where it began, if only by chance."""
    undone: tuple[float, float] | None = None
    """Where the loss began and where it is, if it is above that, or had fallen and is back there."""
    is_finite: bool = True
    """Whether all weights are finite, and no buffer is NaN."""
    losses: tuple[float, ...] = ()
    """The mean loss of each rank, for the journal; empty: none were given."""
    highest: float = math.inf
    """log of the largest m that the user allows."""

    @property
    def end(self) -> int:
        """The steps of the schedule that have been made."""
        return self.span[1]

    @property
    def falls_steadily(self) -> bool:
        """Whether the loss has fallen in every eighth of the round: then hardly any of it is noise."""
        means = [block.mean for block in self.blocks]
        return self.has_losses and len(means) == BLOCKS and all(a > b for a, b in pairwise(means))

    @property
    def steps_per_call(self) -> float:
        """Steps of the optimizer for each step of the schedule: a framework may step it once for each process.

        >>> Evidence(span=(40, 41), steps=4, made=21).steps_per_call
        0.5
        """
        calls = self.span[1] - 1  # the call that is being made may be the first one after a step
        return (self.made - 1) / calls if self.made > 1 and calls > 0 else 1.0


class Decision(NamedTuple):
    """What follows from a round."""

    state: State
    action: Action = Action.NOTHING
    slot: int | None = None
    event: Event | None = None
    """What happened; None: nothing special."""
    rolled_back_to: int | None = None
    """The step whose weights are restored."""
    why: Reason | None = None
    """Why the search stops, if it does."""
    resets_path: bool = False
    """Whether a new path begins."""
    is_harder: bool = False
    """Whether the data have become harder, so that earlier losses no longer count."""

    def progress(self, before: Progress, after: Progress, evidence: Evidence) -> Progress:
        """What is remembered of the losses: those that were rolled back are not.

        ``before``, ``after``: without the losses of the round, and with them.
        """
        if self.rolled_back_to is not None:
            return before.rolled_back(self.rolled_back_to)
        return Progress().after(evidence.blocks, evidence.end) if self.is_harder else after
