r"""The rule behind ``max_lr="auto"`` of :class:`hdet.OneCycleLR`: what follows from a round for rate and weights. Pure.

A *round* is some steps in a row; the rule is asked at its end. The *path* is the way of the weights from step to step
since the first step, or since the last rollback.

**How the rate is found.** The *guess* is the ``lr`` that the optimizer was given; the schedule that the rule gets
contains it. The *target* of a step is m x schedule, and the search looks for the factor :math:`m`, whose logarithm is
``log_factor``. It begins at 1/1000, and the first step shows how far a step moves the weights: from that follows an
:math:`m` at which a step moves them by 0.5 % of their norm, whatever the guess was (:meth:`Rule._after_first_step`).

*The climb.* Each round raises the target towards 2 q times the estimated rate (:mod:`hdet.search.estimate`), where
:math:`q = S^{-1/3}` for a run of S steps: past gradients still point along the path taken, so that longer steps would
have helped. While the path is straight, which means that hardly any gradient has turned, the target is raised whatever
the estimate is. What one round may add is limited (:meth:`Rule._largest_raise`).

*The estimate.* Where 2 q times the estimate first is below the target, gradients have turned: the rate in use, times
max(1, 15 q), is what the evidence asks for (:attr:`State.asked`). From then on it moves both ways: a round moves it by
a part of the way to a higher estimate, or lowers it if the balance of the path shows that more gradients have turned
than at the best rates of other runs, in all by no more than a rollback does (:meth:`Rule._revised`). The target is
drawn from there to a *prior*: at the best rates of other problems, with any optimizer, a step is about :math:`5\,q`
long (:meth:`Rule._prior`, :meth:`Rule._drawn`). Until the loss has fallen, the prior counts as an estimate, too, since
noise alone may have turned gradients. Where the loss falls steadily, without noise, the target is raised whatever
gradients say, but not far above the prior: on full batches gradients turn long before the rate is high enough.

While the schedule rises, the rate is only a part of the target, :math:`r(t)` (:meth:`State.rise`); once the schedule
falls, the target stays.

**When training is rolled back.** Training has diverged if the train loss has risen far beyond its noise
(:mod:`hdet.rollback.judge`), if it is back where it began (``Evidence.undone``), if a path has gained nothing and
gradients have turned against it (:meth:`Rule._leads_nowhere`), or if weights are NaN or infinite. It is rolled back to
the older of two snapshots, at a third of the rate (:meth:`Rule._rolled_back`). If weights become NaN or infinite after
losses that were fine, a batch is at fault: training is rolled back to the last snapshot, at the same rate. The next
time the rate is lowered, and then a batch is excused again (:attr:`State.excused`). If the losses after a rollback are
as high as before it, the data have become harder, and the rate is raised back. Once the search has stopped
(:attr:`Phase.STOPPED`), nothing is rolled back. Which snapshots are kept and restored is decided in
:mod:`hdet.rollback.policy`, which serves ``hdet.Guard`` too: the class that only rolls back, under any schedule.

The numbers are in :mod:`hdet.search.constants`, except those of three judges: :mod:`hdet.rollback.judge` (has training
diverged?), whose ``FEWEST`` also says how many steps snapshots are apart, :mod:`hdet.search.progress` (has the loss
fallen at all?) and :mod:`hdet.search.lag` (do steps follow the rate?). ``AGAINST`` and the bounds of log m are below;
``_QUIET`` in :mod:`hdet.search.search` says when a run of unknown length has settled.
:class:`hdet.search.search.Search` carries the decisions out.
"""

from __future__ import annotations

import math
from collections.abc import Container
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from hdet.events import Event, Reason
from hdet.rollback.judge import BLOCKS, FEWEST, LIMITS, Block, Limits, LossHistory, Verdict, judge
from hdet.rollback.policy import Action, Snapshot, is_due, rolled_back, with_another
from hdet.search.constants import DEFAULT, Constants
from hdet.search.estimate import FP32_ROUNDING, Measured
from hdet.search.lag import lags
from hdet.search.progress import Progress

LOWEST, HIGHEST = math.log(1e-15), math.log(1e15)
"""Bounds of log m."""
AGAINST = -0.8
"""A balance of the path below which nearly all gradients have turned against it: nine tenths of all products are (LOG,
nothing gained yet)."""


class Phase(IntEnum):
    """Where the search stands."""

    FIRST = 0
    """Before a first step whose length is known."""
    SEARCHING = 1
    """The rate is searched, or has been found."""
    STOPPED = 2
    """Nothing is searched: the given rate is used, on the schedule as it is. Nothing is rolled back, either."""


class State(NamedTuple):
    """Everything that a search has learned; plain numbers."""

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

    def factor(self, t: float, constants: Constants = DEFAULT) -> float:
        """The factor on the schedule, which contains the guess, at step ``t``: m r(t), at most what was found.

        r(t) = max(0.3, (t + 1) / (peak + 1)) until the peak, then 1.

        >>> state = State(Phase.SEARCHING, log_factor=0.0, peak=99.0)
        >>> state.factor(9), state.factor(49), state.factor(99), state._replace(ceiling=math.log(0.7)).factor(99)
        (0.3, 0.5, 1.0, 0.7)
        """
        return min(math.exp(self.log_factor) * self.rise(t, constants), math.exp(min(self.ceiling, HIGHEST)))

    def rise(self, t: float, constants: Constants = DEFAULT) -> float:
        """r(t)."""
        rises = self.phase is Phase.SEARCHING and t < self.peak
        return max(constants.min_rise, (t + 1) / (self.peak + 1)) if rises else 1.0

    def peaking(self, peak: float, share: float = 1.0) -> State:
        """The state on a schedule with another peak; ``share``: what the factor is multiplied by.

        >>> State(Phase.SEARCHING, log_factor=0.0, peak=99.0).peaking(49, share=0.5).factor(50)
        0.5
        """
        left = math.log(share) if share > 0 else -math.inf
        return self._replace(
            peak=peak, log_factor=max(self.log_factor + left, LOWEST), slowed_from=self.slowed_from + left
        )

    def at(self, log_factor: float) -> State:
        """The state at another factor, within bounds; the ceiling falls with it."""
        log_factor = min(max(log_factor, LOWEST), HIGHEST)
        return self._replace(log_factor=log_factor).lowered(min(log_factor - self.log_factor, 0.0))

    def climbing(self, t: float, constants: Constants = DEFAULT) -> State:
        """The state without a ceiling, at the rate that is in use at step ``t``."""
        log_factor = min(self.log_factor, self.ceiling - math.log(self.rise(t, constants)))
        return self._replace(log_factor=log_factor, ceiling=math.inf, asked=math.inf, most_asked=math.inf)

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
    def falls_steadily(self) -> bool:
        """Whether the loss has fallen in every eighth of the round: then hardly any of it is noise."""
        means = [block.mean for block in self.blocks]
        return self.has_losses and len(means) == BLOCKS and all(a > b for a, b in pairwise(means))

    @property
    def steps_per_call(self) -> float:
        """Steps of the optimizer for each step of the schedule: Accelerate steps the schedule once for each process.

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
        return Progress().after(evidence.blocks, evidence.span[1]) if self.is_harder else after


@dataclass(frozen=True)
class Rule:
    """The rule of one run.

    Args:
        total_steps: S, the run's length in steps of the schedule; None: unknown, and taken to be 30 times the steps so
            far.
        searches: whether the rate is searched at all.
        constants, limits: the numbers of the rule and of the judge; experiments give others.
    """

    total_steps: int | None
    searches: bool = True
    constants: Constants = DEFAULT
    limits: Limits = LIMITS

    @property
    def long_enough(self) -> bool:
        return self.total_steps is None or self.total_steps >= self.constants.min_steps

    def begin(self) -> State:
        """The state before the first step."""
        if self.searches and self.long_enough:
            return State(log_factor=math.log(self.constants.initial_factor))
        return self.stopped()

    def stopped(self) -> State:
        """The state at the given rate, without a search."""
        return State(Phase.STOPPED, log_factor=0.0)

    def remembering(self, state: State, slots: Container[int]) -> State:
        """The state if only the snapshots in some slots exist: a checkpoint may have none."""
        return state._replace(snapshots=tuple([one for one in state.snapshots if one.slot in slots]))

    def after_round(self, state: State, evidence: Evidence) -> Decision:
        """What follows from one round."""
        moved, end = evidence.measured.moved, evidence.span[1]
        if state.phase is Phase.FIRST and end > max(evidence.peak, self.constants.min_steps):
            return self._stop(Reason.NO_GRADIENT if moved > 0 else Reason.NEVER_MOVED)
        if state.phase is Phase.STOPPED or evidence.steps == 0:
            return Decision(state)  # no step: skipped, or gradients are still being accumulated
        if state.phase is Phase.FIRST:
            return self._after_first_step(state, evidence)
        rates, steps = evidence.measured.rates, evidence.measured.stretch
        if lags(state.pace, state.rate, moved=moved, rates=rates, steps=steps):
            return self._stop(Reason.RATE_IGNORED)
        falling = evidence.shape < self.constants.fall_start
        if not math.isfinite(moved) and self._is_bad_batch(state, evidence, falling):
            return self._rolled_back(state, Event.BAD_BATCH)
        state, verdict = self._judged(state, evidence, falling)
        if verdict is Verdict.DIVERGED or not math.isfinite(moved):
            return self._rolled_back(state, Event.ROLLED_BACK)
        event, is_harder = None, verdict is Verdict.FALSE_ALARM
        if is_harder and math.isfinite(state.slowed_from):
            state = state.lowered(state.slowed_from - state.log_factor).at(state.slowed_from)
            state = state._replace(has_diverged=False)
            event = Event.FALSE_ALARM
        if evidence.blocks:  # a round without losses says nothing about the one before it
            state = state._replace(slowed_from=math.nan, excused=state.excused and not falling)
        if not falling:
            state = self._steered(state, evidence)
        decision = Decision(state, event=event, is_harder=is_harder)
        if state.snapshots and self._is_fresh(state, evidence) and not falling:
            return decision  # these weights have gained nothing that those in the snapshot lack
        return self._keeping(decision, end)

    def _after_first_step(self, state: State, evidence: Evidence) -> Decision:
        """The first step tells how far a step moves the weights: from then on the guess does not matter."""
        c, measured, moved = self.constants, evidence.measured, evidence.measured.moved
        decision = Decision(state, resets_path=True)
        if measured.gradient == 0 or not (moved > 0 or math.isfinite(measured.gradient)):
            return decision  # without gradients, or skipped because of them: it says nothing
        decision = decision._replace(event=Event.FIRST_STEP)
        if not moved > 0:  # all of it is lost in rounding
            return decision._replace(state=state.at(state.log_factor - math.log(c.initial_factor)))
        restart = decision._replace(action=Action.RESTART)
        if math.isinf(moved):
            lower = state.at(state.log_factor + math.log(c.initial_factor))
            return restart._replace(state=lower, event=Event.RESTARTED)
        raised = math.log(min(c.relative_step / moved, 1 / c.initial_factor))
        longer = state.at(min(state.log_factor + raised, evidence.highest))
        least = min(max(measured.rounding, FP32_ROUNDING) / c.relative_step, c.relative_step / c.max_growth)
        if moved < least and longer.log_factor > state.log_factor:  # much of it is lost in rounding
            return restart._replace(state=longer)
        state = state._replace(phase=Phase.SEARCHING, peak=evidence.peak)
        if measured.rates > 0:
            state = state._replace(pace=moved / measured.rates, rate=measured.rates / measured.stretch)
        rise = state.rise(evidence.span[1], c)
        state = state.at(state.log_factor + math.log(c.relative_step) - math.log(moved) - math.log(rise))
        if moved >= c.relative_step * c.max_growth:
            return restart._replace(state=state, event=Event.RESTARTED)
        return self._keeping(decision._replace(state=state), evidence.span[1])

    # -- when training is rolled back ---------------------------------------------------------------------------------

    def _judged(self, state: State, evidence: Evidence, falling: bool) -> tuple[State, Verdict]:
        """The judge's verdict on the round. If the loss is back where it began, training has diverged too.

        Also if the path leads nowhere: then none of its losses is a measure of those to come.
        Limits with an infinite noise switch all of it off, in experiments.
        """
        # doubted: gradients were sampled, and the estimated rate is 0, because they have turned against the path
        doubted = evidence.has_losses and evidence.measured.has_estimate and evidence.estimated_log_factor == -math.inf
        history, verdict = judge(state.history, evidence.blocks, falling=falling, doubted=doubted, limits=self.limits)
        can = verdict is Verdict.FINE and not falling and state.snapshots and self.limits.noise < math.inf
        if can and evidence.undone is not None:
            began, now = evidence.undone
            history, verdict = history.suspecting(now, good=began), Verdict.DIVERGED
        elif can and self._leads_nowhere(state, evidence):
            history, verdict = history.tolerating(0.0), Verdict.DIVERGED
        return state._replace(history=history), verdict

    def _leads_nowhere(self, state: State, evidence: Evidence) -> bool:
        """Whether a path has gained nothing, and nearly all gradients have turned against it.

        Then steps are far too long, or have killed the network. Not at rates far below the prior: losses that say
        nothing about the weights must not lower the rate again and again.
        """
        c, measured = self.constants, evidence.measured
        is_told = measured.has_estimate and measured.stretch >= c.min_steps / 2
        is_high = min(state.log_factor, state.ceiling) > state.prior - math.log(c.backoff)
        return is_told and is_high and not evidence.has_gained and measured.balance < AGAINST

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
            snapshots=rolled_back(state.snapshots, latest=math.inf if is_excused else -math.inf),
            pace=math.nan,
            excused=is_excused,
        )
        if not is_excused:
            after = after.at(state.log_factor - math.log(self.constants.backoff))._replace(has_diverged=True)
        if not after.snapshots:  # these weights stay
            after = after._replace(history=state.history.cleared())
            return Decision(after, Action.GO_ON, event=Event.SLOWED_DOWN, resets_path=True)
        if not is_excused:
            after = after._replace(slowed_from=state.log_factor)
        back = after.snapshots[-1]
        return Decision(after, Action.ROLL_BACK, back.slot, event, rolled_back_to=back.step, resets_path=True)

    @staticmethod
    def _keeping(decision: Decision, step: int) -> Decision:
        """The decision, and a snapshot of the weights as they are, if one is due.

        Rounds are short at first, and an explosion takes some steps to be seen: snapshots are as far apart.
        """
        if not is_due(decision.state.snapshots, step, FEWEST):
            return decision
        kept = with_another(decision.state.snapshots, step)
        return decision._replace(state=decision.state._replace(snapshots=kept), action=Action.KEEP, slot=kept[-1].slot)

    def _stop(self, why: Reason) -> Decision:
        return Decision(self.stopped(), event=Event.STOPPED, why=why)

    # -- how the rate is raised ----------------------------------------------------------------------------------------

    def _steered(self, state: State, evidence: Evidence) -> State:
        """Raise the target as long as gradients agree; once they have turned, follow the estimate, both ways."""
        is_settled = state.excused and math.isfinite(state.ceiling)  # a path that has just begun is always straight
        if is_settled or not evidence.measured.has_estimate:
            return state
        c, most = self.constants, self._largest_raise(state, evidence)
        state = self._with_reach(state, evidence)
        q, prior = self._length(evidence) ** -c.length_exponent, self._prior(state, evidence)
        asked = evidence.estimated_log_factor + math.log(q * c.estimate_fraction)
        # Losses that fall steadily do so at rates that are too high, too, if there is no noise.
        steady = evidence.falls_steadily and not state.has_diverged
        straight = evidence.measured.straightness >= 1 - q * c.straight_tolerance
        if straight and self._is_beginning(state, evidence):  # noise in the first steps was no turn
            state = state.climbing(evidence.span[1], c)
        if math.isfinite(state.ceiling):
            goes_on = steady and state.asked < prior + math.log(c.backoff)
            if self._is_fresh(state, evidence) and prior > asked:  # without a gain the prior is the better estimate
                asked = prior
            revised = self._revised(state, evidence, asked, most, goes_on=goes_on)
            return self._drawn(revised, prior, state.ceiling + most)
        goes_on = steady and state.log_factor < prior + math.log(c.backoff)
        wanted = most if straight or goes_on else asked - state.log_factor
        if wanted > 0:
            return state.at(state.log_factor + min(wanted, most))
        used = math.log(state.factor(evidence.span[1], c) * max(q * c.ceiling, 1.0))
        turned = min(state.log_factor, used)
        return self._drawn(state._replace(asked=turned, most_asked=turned), prior, math.inf)

    def _revised(self, state: State, evidence: Evidence, asked: float, most: float, *, goes_on: bool) -> State:
        """What the evidence asks for with one more round, whose estimate asks for ``asked``.

        An estimate that is lower says nothing: a path shows a high rate only after many steps. What lowers is the
        balance: if fewer gradients point on along the path than at the best rates of other runs, less is asked for, but
        a path lowers no further than a rollback does.
        """
        c, now = self.constants, state.asked
        lacking = self._lacking_balance(evidence)
        if goes_on:
            now += most
        elif lacking > 0:
            least = min(now, state.most_asked - math.log(c.backoff))
            now = max(now - min(math.log(c.max_growth) * lacking, most), least)
        else:
            now += min(c.estimate_weight * max(asked - now, 0.0), most)
        return state._replace(asked=now, most_asked=max(state.most_asked, now))

    def _lacking_balance(self, evidence: Evidence) -> float:
        """By how much the balance of the path is below the usual one at the best rates of other runs, at this time.

        0 for a path of too few steps to tell.
        """
        c, end = self.constants, evidence.span[1]
        if evidence.measured.stretch <= c.max_samples:
            return 0.0
        return c.balance - end / (self.total_steps or c.assumed_length * end) - evidence.measured.balance

    def _drawn(self, state: State, prior: float, highest: float) -> State:
        """The state whose ceiling is what the evidence asks for, drawn to the prior, and not above ``highest``."""
        up = down = math.log(self.constants.backoff)
        if state.has_diverged:  # no higher than it has been drawn already
            up = min(max(state.ceiling - state.asked, 0.0), up) if math.isfinite(state.ceiling) else 0.0
        pull = self.constants.prior_weight * (prior - state.asked) if math.isfinite(prior) else 0.0
        target = min(max(min(state.asked + min(max(pull, -down), up), highest), LOWEST), HIGHEST)
        return state._replace(ceiling=target, log_factor=max(state.log_factor, target), prior=prior)

    def _prior(self, state: State, evidence: Evidence) -> float:
        """log m of the rate at which a step is as long as steps of other runs of this length are at their best rates.

        NaN: it is not known how long steps are.
        """
        if math.isnan(state.reach):
            return math.nan
        c = self.constants
        return math.log(c.prior_distance) - c.length_exponent * math.log(self._length(evidence)) - state.reach

    def _with_reach(self, state: State, evidence: Evidence) -> State:
        """The state with the length of a step, as the first steps show it: later, they go to and fro."""
        measured = evidence.measured
        is_told = measured.rates > 0 and 0 < measured.distance < math.inf
        if not (is_told and self._is_beginning(state, evidence)):
            return state
        return state._replace(reach=math.log(measured.distance / measured.rates) + evidence.log_guess)

    def _length(self, evidence: Evidence) -> float:
        """The run's length in steps of the optimizer, as far as it is known."""
        return (self.total_steps or self.constants.assumed_length * evidence.span[1]) * evidence.steps_per_call

    def _largest_raise(self, state: State, evidence: Evidence) -> float:
        """log of the most by which a round raises the target."""
        c = self.constants
        if self._is_fresh(state, evidence):
            return min(math.log(c.max_growth) * evidence.steps / c.min_round, math.log(c.backoff))
        rise = (evidence.peak + 1) * evidence.steps_per_call
        return min(c.max_climb * evidence.steps / max(rise, 1.0), math.log(c.max_growth))

    def _is_beginning(self, state: State, evidence: Evidence) -> bool:
        """Whether the path is the run's first one, and still short."""
        return math.isfinite(state.pace) and evidence.measured.stretch <= self.constants.min_steps

    @staticmethod
    def _is_fresh(state: State, evidence: Evidence) -> bool:
        """Whether nothing has been gained yet, and nothing lost."""
        return not evidence.has_fallen and math.isfinite(state.pace)


# -- rounds: they grow with the run ------------------------------------------------------------------------------------


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
