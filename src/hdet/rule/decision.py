r"""The rule behind :func:`hdet.auto`: what follows from a round for rate and weights. Pure.

A *round* is some steps in a row; the rule is asked at its end. The *path* is the way of the weights from step to step
since the first step, or since the last rollback.

**How the rate is found.** The *guess* is the ``lr`` that the optimizer was given; the schedule that the rule gets
contains it. The *target* of a step is m x schedule, and the search looks for the factor :math:`m`, whose logarithm is
``log_factor``. It begins at 1/1000, and the first step shows how far a step moves the weights: from that follows an
:math:`m` at which a step moves them by 0.5 % of their norm, whatever the guess was (``after_first_step``).

*The climb.* Each round raises the target towards 2 q times the estimated rate (:mod:`hdet.rule.estimate`), where
:math:`q = S^{-1/3}` for a run of S steps: past gradients still point along the path taken, so that longer steps would
have helped. While the path is straight, which means that hardly any gradient has turned, the target is raised whatever
the estimate is. What one round may add is limited (``largest_raise``).

*The estimate.* Where 2 q times the estimate first is not above the target, gradients have *turned*, and the rate gets
a *ceiling*, which lies between two rates. One is *asked*, what the evidence asks for (:attr:`State.asked`): the rate in
use at that moment, times max(1, 15 q). From then on it moves both ways: a round moves it by a part of the way to a
higher estimate, or lowers it if the balance of the path shows that more gradients have turned than at the best rates of
other runs, in all by no more than a rollback does (``_revised``). The other is the *prior*: at the best rates of other
problems, with any optimizer, a step is about :math:`5\,q` long. The ceiling is *drawn* from asked to the prior, by a
part of the way (``_drawn``). Until the loss has fallen, the prior counts as an estimate, too, since noise alone may
have turned gradients. Where the loss falls steadily, without noise, the target is raised whatever gradients say, but
not far above the prior: on full batches gradients turn long before the rate is high enough.

While the schedule rises, the rate is only a part of the target, :math:`r(t)` (:meth:`State.rise`); once the schedule
falls, target and ceiling stay.

**When training is rolled back.** Training has diverged if the train loss has risen far beyond its noise
(:mod:`hdet.rule.judge`), if it is back where it began (``Evidence.undone``), if a path has gained nothing and
gradients have turned against it (``leads_nowhere``), or if weights are NaN or infinite. It is rolled back to
the older of two snapshots, at a third of the rate (:meth:`Rule._rolled_back`). If weights become NaN or infinite after
losses that were fine, a batch is at fault: training is rolled back to the last snapshot, at the same rate. The next
time the rate is lowered, and then a batch is excused again (:attr:`State.excused`). If the losses after a rollback are
as high as before it, the data have become harder, and the rate is raised back. Once the search has stopped
(:attr:`Phase.STOPPED`), nothing is rolled back. Which snapshots are kept is decided in :mod:`hdet.rule.judge`,
which serves ``hdet.Guard`` too: the class that only rolls back, under any schedule.

The arithmetic is in :mod:`hdet.rule.state`, which has the functions named above, the numbers are in
:mod:`hdet.rule.constants`. :class:`hdet.search.search.Search` carries the decisions out.
"""

from __future__ import annotations

import math
from collections.abc import Container
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from hdet.rule.constants import BLOCKS, DEFAULT, LIMITS, Constants, Limits
from hdet.rule.enums import Action, Event, Phase, Reason, Verdict
from hdet.rule.estimate import Measured
from hdet.rule.judge import Block, judge, with_another
from hdet.rule.progress import Progress
from hdet.rule.state import State, after_first_step, is_without_gain, lags, leads_nowhere, steered


@lru_cache(maxsize=64)  # every step asks for the end of its round
def next_end(t: int, constants: Constants = DEFAULT) -> int:
    """The first end of a round after ``t`` steps. The first round is one step; one that begins at t has max(2, 0.2 t).

    >>> ends = [1]
    >>> while ends[-1] < 100:
    ...     ends.append(next_end(ends[-1]))
    >>> ends
    [1, 3, 5, 7, 9, 11, 13, 15, 18, 21, 25, 30, 36, 43, 51, 61, 73, 87, 104]
    """
    end = 1
    while end <= t:
        end += max(constants.min_round, int(constants.round_growth * end))
    return end


def is_sampled(step: int, length: int, constants: Constants = DEFAULT) -> bool:
    """Whether the gradient of step ``step`` of a round, counted from 0, is sampled: 8 of ``length`` at most.

    >>> [step for step in range(40) if is_sampled(step, 40)]
    [0, 5, 10, 15, 20, 25, 30, 35]
    """
    return step % max(1, math.ceil(length / constants.max_samples)) == 0


class Evidence(NamedTuple):
    """What is known when a round ends; equal on all ranks."""

    end: int
    """The steps of the schedule that have been made."""
    steps: int
    """How many steps the optimizer made."""
    blocks: tuple[Block, ...] = ()
    """The losses of the round; empty: none were given."""
    peak: float = 0.0
    """The step at which the climb ends: that of the schedule's peak, and a tenth of the run at least."""
    schedule_share: float = 1.0
    """The schedule at the round's end, over its highest value."""
    measured: Measured = Measured()
    """What the steps since the beginning of the path have shown."""
    log_guess: float = 0.0
    """log of the schedule's rate with its rising phase held: the rate at m = 1."""
    estimated_log_factor: float = -math.inf
    """log m of the estimated rate; -inf if that is 0: there were no gradients, or they have turned against the path."""
    made: int = 0
    """Steps that the optimizer has made in all; 0: as many as the schedule."""
    has_losses: bool = True
    """Whether ``blocks`` are losses; if not, they are logarithms of the sizes of gradients."""
    is_below: bool = True
    """:attr:`Progress.is_below`: whether the loss is clearly below where it began, by however little; also true if
    nothing is known of it. "Until the loss has fallen" means this in the rule and its constants."""
    has_gained: bool = True
    """:attr:`Progress.has_gained`: whether the loss is below where it began, if only by chance."""
    undone: tuple[float, float] | None = None
    """Where the loss began and where it is, if it is above that, or had fallen and is back there."""
    is_finite: bool = True
    """Whether all weights are finite, and no buffer is NaN."""
    progress: Progress = Progress()
    """The losses so far, with those of the round."""
    losses: tuple[float, ...] = ()
    """The mean loss of each rank, for the journal; empty: none were given."""
    highest: float = math.inf
    """log of the largest m that the user allows."""

    @property
    def falls_steadily(self) -> bool:
        """Whether the loss has fallen in every eighth of the round: then hardly any of it is noise."""
        means = [block.mean for block in self.blocks]
        return self.has_losses and len(means) == BLOCKS and all(a > b for a, b in pairwise(means))

    @property
    def steps_per_call(self) -> float:
        """Steps of the optimizer for each step of the schedule: a framework may step it once for each process.

        >>> Evidence(end=41, steps=4, made=21).steps_per_call
        0.5
        """
        calls = self.end - 1  # the call that is being made may be the first one after a step
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

    def progress(self, before: Progress, evidence: Evidence) -> Progress:
        """What is remembered of the losses: those that were rolled back are not. ``before``: without the round's."""
        if self.rolled_back_to is not None:
            return before.rolled_back(self.rolled_back_to)
        return Progress().after(evidence.blocks, evidence.end) if self.is_harder else evidence.progress


STOPPED = State(Phase.STOPPED, log_factor=0.0)
"""The state at the given rate, without a search."""


@dataclass(frozen=True)
class Rule:
    """The rule of one run.

    Args:
        total_steps: S, the run's length in steps of the schedule; None: unknown, and taken to be 30 times the steps so
            far.
        constants, limits: the numbers of the rule and of the judge; experiments give others.
    """

    total_steps: int | None
    constants: Constants = DEFAULT
    limits: Limits = LIMITS

    @property
    def long_enough(self) -> bool:
        return self.total_steps is None or self.total_steps >= self.constants.min_steps

    def begin(self) -> State:
        """The state before the first step."""
        return State(log_factor=math.log(self.constants.initial_factor)) if self.long_enough else STOPPED

    def remembering(self, state: State, slots: Container[int]) -> State:
        """The state if only the snapshots in some slots exist: a checkpoint may have none."""
        return state._replace(snapshots=tuple([one for one in state.snapshots if one.slot in slots]))

    def after_round(self, state: State, evidence: Evidence) -> Decision:
        """What follows from one round."""
        moved, end = evidence.measured.moved, evidence.end
        if state.phase is Phase.FIRST and end > max(evidence.peak, self.constants.min_steps):
            return self._stop(Reason.NO_GRADIENT if moved > 0 else Reason.NEVER_MOVED)
        if state.phase is Phase.STOPPED or evidence.steps == 0:
            return Decision(state)  # no step: skipped, or gradients are still being accumulated
        if state.phase is Phase.FIRST:
            return self._after_first_step(state, evidence)
        if lags(state, evidence):
            return self._stop(Reason.RATE_IGNORED)
        falling = evidence.schedule_share < self.constants.fall_start
        if not math.isfinite(moved) and self._is_bad_batch(state, evidence, falling):
            return self._rolled_back(state, Event.BAD_BATCH)
        state, verdict = self._judged(state, evidence, falling)
        if verdict is Verdict.DIVERGED or not math.isfinite(moved):
            return self._rolled_back(state, Event.ROLLED_BACK)
        event, is_harder = None, verdict is Verdict.FALSE_ALARM
        if is_harder and math.isfinite(state.slowed_from):
            state = state.with_ceiling_moved(state.slowed_from - state.log_factor).with_log_factor(state.slowed_from)
            state = state._replace(has_diverged=False)
            event = Event.FALSE_ALARM
        if evidence.blocks:  # a round without losses says nothing about the one before it
            state = state._replace(slowed_from=math.nan, excused=state.excused and not falling)
        if not falling:
            length = self.total_steps or self.constants.assumed_length * end
            state = steered(state, evidence, length, self.constants)
        decision = Decision(state, event=event, is_harder=is_harder)
        if state.snapshots and is_without_gain(state, evidence) and not falling:
            return decision  # these weights have gained nothing that those in the snapshot lack
        return self._keeping(decision, end)

    def _after_first_step(self, state: State, evidence: Evidence) -> Decision:
        """See :func:`hdet.rule.state.after_first_step`."""
        state, action, says_nothing, was_too_long = after_first_step(state, evidence, self.constants)
        event = None if says_nothing else Event.RESTARTED if was_too_long else Event.FIRST_STEP
        decision = Decision(state, event=event, resets_path=True)
        return self._keeping(decision, evidence.end) if action is Action.KEEP else decision._replace(action=action)

    # -- when training is rolled back ---------------------------------------------------------------------------------

    def _judged(self, state: State, evidence: Evidence, falling: bool) -> tuple[State, Verdict]:
        """The judge's verdict on the round. If the loss is back where it began, training has diverged too.

        It has also diverged if the path leads nowhere; its losses are then not used as a reference.
        """
        # doubted: gradients were sampled, and the estimated rate is 0, because they have turned against the path
        doubted = evidence.has_losses and evidence.measured.has_estimate and evidence.estimated_log_factor == -math.inf
        history, verdict = judge(state.history, evidence.blocks, falling=falling, doubted=doubted, limits=self.limits)
        can = verdict is Verdict.FINE and not falling and state.snapshots
        if can and evidence.undone is not None:
            began, now = evidence.undone
            history, verdict = history.suspecting(now, good=began), Verdict.DIVERGED
        elif can and leads_nowhere(state, evidence, self.constants):
            history, verdict = history.tolerating(0.0), Verdict.DIVERGED
        return state._replace(history=history), verdict

    def _is_bad_batch(self, state: State, evidence: Evidence, falling: bool) -> bool:
        """Whether NaN or infinite weights are a batch's fault: they follow losses that were fine, and no batch has been
        excused lately. Right after a rollback that has lowered the rate, no batch is."""
        known = [block for block in evidence.blocks if math.isfinite(block.mean)]
        verdict = judge(state.history, known, falling=falling, limits=self.limits)[1]
        can = state.snapshots and math.isnan(state.slowed_from) and not state.excused
        return bool(can) and evidence.has_losses and verdict is Verdict.FINE and evidence.undone is None

    def _rolled_back(self, state: State, event: Event) -> Decision:
        """To the older snapshot at a third of the rate; if a batch is to blame, to the last one at the same rate.

        After a bad batch the older snapshot stays: the last one may be about to explode.
        """
        is_excused = event is Event.BAD_BATCH
        after = state._replace(
            snapshots=state.snapshots if is_excused else state.snapshots[:1],
            pace=math.nan,
            excused=is_excused,
        )
        if not is_excused:
            lowered = state.log_factor - math.log(self.constants.backoff)
            after = after.with_log_factor(lowered)._replace(has_diverged=True)
        if not after.snapshots:  # these weights stay
            after = after._replace(history=state.history.cleared())
            return Decision(after, Action.CANNOT_ROLL_BACK, event=Event.SLOWED_DOWN, resets_path=True)
        if not is_excused:
            after = after._replace(slowed_from=state.log_factor)
        back = after.snapshots[-1]
        return Decision(after, Action.ROLL_BACK, back.slot, event, rolled_back_to=back.step, resets_path=True)

    @staticmethod
    def _keeping(decision: Decision, step: int) -> Decision:
        """The decision, and a snapshot of the weights as they are, if one is due."""
        kept = with_another(decision.state.snapshots, step)
        if kept == decision.state.snapshots:
            return decision
        return decision._replace(state=decision.state._replace(snapshots=kept), action=Action.KEEP, slot=kept[-1].slot)

    def _stop(self, why: Reason) -> Decision:
        return Decision(STOPPED, event=Event.STOPPED, why=why)
