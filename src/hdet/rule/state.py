"""What the search has learned of a run, and how the rate is raised and lowered. Pure.

The arithmetic is one text for torch and jax: ``xp`` is the array module, :class:`Plain` for plain numbers or
:mod:`hdet.jax.numbers` for arrays. ``evidence`` is an :class:`~hdet.rule.decision.Evidence` or that of
:mod:`hdet.jax.rule`, which has the same names. :mod:`hdet.rule.decision` says in words what is done here, and when.
"""

from __future__ import annotations

import math
from operator import not_
from typing import Any, NamedTuple, TypeVar

from hdet.rule.constants import (
    AGAINST,
    CLOSE,
    DEFAULT,
    FP32_ROUNDING,
    HIGHEST,
    LAG_EXPONENT,
    LAG_RAISE,
    LAG_WANDER,
    LAG_WINDOW,
    LOWEST,
    Constants,
)
from hdet.rule.enums import Action, Phase
from hdet.rule.judge import LossHistory, Snapshot

_Value = TypeVar("_Value")


class Plain:
    """The functions of an array module, for plain numbers: what ``xp`` is if no other is given.

    Both branches of :meth:`where` are computed, so that none may raise for what is not chosen.
    """

    exp, isfinite, isinf = math.exp, math.isfinite, math.isinf
    minimum, maximum, logical_not = min, max, not_

    @staticmethod
    def where(condition: bool, yes: _Value, no: _Value) -> _Value:
        """One of two."""
        return yes if condition else no

    @staticmethod
    def clip(number: float, low: float, high: float) -> float:
        """The number, within bounds."""
        return min(max(number, low), high)

    @staticmethod
    def log(number: float) -> float:
        """The logarithm, -infinite for 0.

        >>> Plain.log(1.0), Plain.log(0.0)
        (0.0, -inf)
        """
        return math.log(number) if number > 0 or math.isnan(number) else -math.inf


def quotient(number: Any, by: Any, xp: Any = Plain) -> Any:
    """``number / by``; 0 if ``by`` is not above 0, so that nothing can be said.

    >>> quotient(1.0, 2.0), quotient(1.0, 0.0)
    (0.5, 0.0)
    """
    divides = by > 0
    return xp.where(divides, number / xp.where(divides, by, 1.0), 0.0)


class State(NamedTuple):
    """Everything that a search has learned; plain numbers, or arrays for ``hdet.jax``, whose module is ``xp``."""

    phase: Phase = Phase.FIRST
    log_factor: float = math.log(DEFAULT.initial_factor)
    """log of m, the factor on the user's guess: the target is m times the schedule, which contains the guess."""
    peak: float = 0.0
    """The step at which the climb ends, that of the schedule's peak and a tenth of the run at least: until there the
    rate is below the target."""
    ceiling: float = math.inf
    """log of the rate over the guess that has been found, which the rate does not exceed; infinite until gradients have
    turned for the first time."""
    asked: float = math.inf
    """log of what the evidence alone asks for, from then on: the ceiling is this, drawn to the prior."""
    most_asked: float = math.inf
    """The highest that ``asked`` was; a rollback does not lower it."""
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
    """How far the first step that was measured moved the weights, over its rate; NaN after a rollback."""
    rate: float = math.nan
    """The rate of that step."""
    excused: bool = False
    """Whether training was rolled back at the same rate, because of a bad batch. The next time the rate is lowered.
    Such a rollback, and a round with losses while the schedule falls, set this back, so that one more batch is excused.
    While it is true, a rate that has a ceiling is not raised, since a path that has just begun is always straight."""

    @property
    def peak_factor(self) -> float:
        """The factor on the guess that has been found: that of the schedule's peak."""
        return math.exp(min(self.log_factor, self.ceiling))

    def factor(self, t: float, constants: Constants = DEFAULT, xp: Any = Plain) -> Any:
        """The factor on the schedule, which contains the guess, at step ``t``: m r(t), at most what was found.

        r(t) = max(0.3, (t + 1) / (peak + 1)) until the peak, then 1.

        >>> state = State(Phase.SEARCHING, log_factor=0.0, peak=99.0)
        >>> state.factor(9), state.factor(49), state.factor(99), state._replace(ceiling=math.log(0.7)).factor(99)
        (0.3, 0.5, 1.0, 0.7)
        """
        climbing = xp.exp(self.log_factor) * self.rise(t, constants, xp)
        return xp.minimum(climbing, xp.exp(xp.minimum(self.ceiling, HIGHEST)))

    def rise(self, t: float, constants: Constants = DEFAULT, xp: Any = Plain) -> Any:
        """r(t)."""
        rises = (self.phase == Phase.SEARCHING) & (t < self.peak)
        return xp.where(rises, xp.maximum(constants.min_rise, (t + 1) / xp.maximum(self.peak + 1, 1.0)), 1.0)

    def peaking(self, peak: float, share: float = 1.0, xp: Any = Plain) -> State:
        """The state on a schedule with another peak; ``share``: what the factor is multiplied by.

        >>> State(Phase.SEARCHING, log_factor=0.0, peak=99.0).peaking(49, share=0.5).factor(50)
        0.5
        """
        left = xp.log(share)
        log_factor = xp.maximum(self.log_factor + left, LOWEST)
        return self._replace(peak=peak, log_factor=log_factor, slowed_from=self.slowed_from + left)

    def with_log_factor(self, log_factor: float, xp: Any = Plain) -> State:
        """The state at another factor, within bounds; the ceiling falls with it."""
        log_factor = xp.clip(log_factor, LOWEST, HIGHEST)
        return self._replace(log_factor=log_factor).with_ceiling_moved(xp.minimum(log_factor - self.log_factor, 0.0))

    def climbing(self, t: float, constants: Constants = DEFAULT, xp: Any = Plain) -> State:
        """The state without a ceiling, at the rate that is in use at step ``t``."""
        log_factor = xp.minimum(self.log_factor, self.ceiling - xp.log(self.rise(t, constants, xp)))
        return self._replace(log_factor=log_factor, ceiling=math.inf, asked=math.inf, most_asked=math.inf)

    def bounded(self, highest: float, xp: Any = Plain) -> State:
        """The state with ``log_factor`` at most ``highest``, the logarithm of the user's bound."""
        return self._replace(log_factor=xp.minimum(self.log_factor, xp.maximum(highest, LOWEST)))

    def is_bound(self, highest: float, xp: Any = Plain) -> Any:
        """Whether the rate is at that bound, and not at a ceiling below it."""
        return (highest < math.inf) & (xp.minimum(self.log_factor, self.ceiling) >= highest - CLOSE)

    def with_ceiling_moved(self, by: float) -> State:
        """The state with a ceiling that is higher or lower; ``by``: what is added to its logarithm."""
        return self._replace(ceiling=self.ceiling + by, asked=self.asked + by)


def after_first_step(
    state: State, evidence: Any, constants: Constants = DEFAULT, xp: Any = Plain
) -> tuple[State, Action, bool, bool]:
    """The first step tells how far a step moves the weights: from then on the guess does not matter.

    With the length ``moved``, m becomes m ``relative_step / moved``. If nothing has moved, all of the step is lost in
    rounding, and m is raised; if little has, much of it may be rounding, and the step is made again at a higher m.

    Returns:
        the state; what is to be done with the weights; whether there were no gradients, or the optimizer has skipped
        the step because of them; and whether training begins again from the first weights because it was too long.
    """
    c, measured, rates = constants, evidence.measured, evidence.measured.rates
    moved, size, before = measured.moved, measured.gradient, state.log_factor
    stays, explodes = xp.logical_not(moved > 0), xp.isinf(moved)
    says_nothing = (size == 0) | (stays & xp.logical_not(xp.isfinite(size)))
    known = xp.where(stays, 1.0, moved)

    raised = xp.log(xp.minimum(c.relative_step / known, 1 / c.initial_factor))
    longer = state.with_log_factor(xp.minimum(before + raised, evidence.highest), xp)
    least = min(max(measured.rounding, FP32_ROUNDING) / c.relative_step, c.relative_step / c.max_growth)
    is_rounding = xp.logical_not(stays) & (moved < least) & (longer.log_factor > before)
    is_measured = xp.logical_not(says_nothing | stays | explodes | is_rounding)

    found = state._replace(
        phase=xp.where(is_measured, Phase.SEARCHING, state.phase), peak=xp.where(is_measured, evidence.peak, state.peak)
    )
    right = before + math.log(c.relative_step) - xp.log(known) - xp.log(found.rise(evidence.end, c, xp))
    chosen = xp.where(is_rounding, longer.log_factor, right)
    chosen = xp.where(explodes, before + math.log(c.initial_factor), chosen)
    chosen = xp.where(stays, before - math.log(c.initial_factor), chosen)
    learns = is_measured & (rates > 0)
    found = found.with_log_factor(xp.where(says_nothing, before, chosen), xp)._replace(
        pace=xp.where(learns, quotient(moved, rates, xp), state.pace),
        rate=xp.where(learns, rates / xp.maximum(measured.path_steps, 1), state.rate),
    )
    is_long = explodes | (is_measured & (moved >= c.relative_step * c.max_growth))
    was_too_long = xp.logical_not(says_nothing) & is_long
    restarts = was_too_long | (xp.logical_not(says_nothing) & is_rounding)
    action = xp.where(restarts, Action.RESTART, xp.where(is_measured, Action.KEEP, Action.NOTHING))
    return found, action, says_nothing, was_too_long


def steered(state: State, evidence: Any, length: float, constants: Constants = DEFAULT, xp: Any = Plain) -> State:
    """Raise the target as long as gradients agree; once they have turned, follow the estimate, both ways.

    ``length``: of the run in steps of the schedule, as far as it is known.
    """
    c, measured, before, end = constants, evidence.measured, state, evidence.end
    is_fresh, steps_per_call = is_without_gain(state, evidence, xp), evidence.steps_per_call
    most = largest_raise(evidence.steps, is_fresh, (evidence.peak + 1) * steps_per_call, c, xp)
    is_beginning = xp.isfinite(state.pace) & (measured.path_steps <= c.min_steps)  # the path is the run's first one
    reach = _reach(state, evidence, is_beginning, xp)
    steps = length * steps_per_call
    q = steps**-c.length_exponent
    prior = math.log(c.prior_distance) - c.length_exponent * xp.log(steps) - reach
    estimated_ask = evidence.estimated_log_factor + xp.log(q * c.estimate_fraction)

    straight = measured.straightness >= 1 - q * c.straight_tolerance
    state = xp.where(straight & is_beginning, state.climbing(end, c, xp), state)  # noise in the first steps was no turn
    has_turned = xp.isfinite(state.ceiling)
    # Losses that fall steadily do so at rates that are too high, too, if there is no noise.
    goes_on = xp.logical_not(state.has_diverged) & evidence.falls_steadily
    goes_on &= xp.where(has_turned, state.asked, state.log_factor) < prior + math.log(c.backoff)

    wanted = xp.where(straight | goes_on, most, estimated_ask - state.log_factor)
    climbed = state.with_log_factor(state.log_factor + xp.minimum(wanted, most), xp)
    used = xp.log(state.factor(end, c, xp) * xp.maximum(q * c.first_ask, 1.0))
    turned = xp.minimum(state.log_factor, used)
    # Without a gain the prior is the better estimate.
    estimated = xp.where(is_fresh & (prior > estimated_ask), prior, estimated_ask)
    lacking = xp.where(measured.path_steps > c.max_samples, c.balance - end / length - measured.balance, 0.0)
    found = xp.where(
        has_turned,
        _revised(state, estimated, lacking, most, goes_on, c, xp),
        state._replace(asked=turned, most_asked=turned),
    )
    found = _drawn(found, prior, state.ceiling + most, c, xp)
    found = xp.where(has_turned | xp.logical_not(wanted > 0), found, climbed)
    is_settled = before.excused & xp.isfinite(before.ceiling)  # a path that has just begun is always straight
    is_told = measured.has_estimate & xp.logical_not(is_settled)
    return xp.where(is_told, found._replace(reach=reach), before)  # type: ignore[no-any-return]


def _reach(state: State, evidence: Any, is_beginning: bool, xp: Any) -> Any:
    """log of how far a step leads at m = 1, as the first steps show it: later, they go to and fro."""
    distance, rates = evidence.measured.distance, evidence.measured.rates
    is_told = is_beginning & (rates > 0) & (distance > 0) & (distance < math.inf)
    return xp.where(is_told, xp.log(quotient(distance, rates, xp)) + evidence.log_guess, state.reach)


def _revised(
    state: State, estimated: float, lacking: float, most: float, goes_on: bool, constants: Constants, xp: Any
) -> State:
    """What the evidence asks for with one more round.

    An estimate that is lower says nothing: a path shows a high rate only after many steps. What lowers is the balance:
    if fewer gradients point on along the path than at the best rates of other runs, less is asked for, but a path
    lowers no further than a rollback does.

    Args:
        state: whose ``asked`` is revised.
        estimated: what the estimate of the round asks for.
        lacking: how far the balance of the path is below the usual one at the best rates of other runs, at this time.
        most: the most by which a round moves it.
        goes_on: whether losses fall steadily.
        constants, xp: as above.
    """
    c, asked = constants, state.asked
    least = xp.minimum(asked, state.most_asked - math.log(c.backoff))
    lower = xp.maximum(asked - xp.minimum(math.log(c.max_growth) * lacking, most), least)
    higher = asked + xp.minimum(c.estimate_weight * xp.maximum(estimated - asked, 0.0), most)
    now = xp.where(goes_on, asked + most, xp.where(lacking > 0, lower, higher))
    return state._replace(asked=now, most_asked=xp.maximum(state.most_asked, now))


def _drawn(state: State, prior: float, highest: float, constants: Constants, xp: Any) -> State:
    """The state whose ceiling is what the evidence asks for, drawn to the prior, and not above ``highest``."""
    furthest = math.log(constants.backoff)
    # Once training has diverged, it is drawn no higher than it has been drawn already.
    drawn = xp.where(xp.isfinite(state.ceiling), xp.clip(state.ceiling - state.asked, 0.0, furthest), 0.0)
    pull = xp.where(xp.isfinite(prior), constants.prior_weight * (prior - state.asked), 0.0)
    pull = xp.clip(pull, -furthest, xp.where(state.has_diverged, drawn, furthest))
    ceiling = xp.clip(xp.minimum(state.asked + pull, highest), LOWEST, HIGHEST)
    # The factor follows a higher ceiling at once: until the peak, r(t) holds the rate below it.
    return state._replace(ceiling=ceiling, log_factor=xp.maximum(state.log_factor, ceiling), prior=prior)


def largest_raise(steps: Any, is_fresh: Any, rise: Any, constants: Constants, xp: Any) -> Any:
    """log of the most by which a round of ``steps`` steps raises the target, if the schedule rises for ``rise`` steps.

    ``is_fresh``: whether nothing has been gained yet.
    """
    c = constants
    fresh = xp.minimum(math.log(c.max_growth) * steps / c.min_round, math.log(c.backoff))
    climbing = xp.minimum(c.max_climb * steps / xp.maximum(rise, 1.0), math.log(c.max_growth))
    return xp.where(is_fresh, fresh, climbing)


def is_without_gain(state: State, evidence: Any, xp: Any = Plain) -> Any:
    """Whether nothing has been gained yet, and nothing lost."""
    return xp.logical_not(evidence.is_below) & xp.isfinite(state.pace)


# -- what speaks against the path --------------------------------------------------------------------------------------


def lags(state: State, evidence: Any, xp: Any = Plain) -> Any:
    """Whether the rate was raised, and steps have not become longer: part of them has a rate of its own, and none can
    be found.

    With the mean rate since the first step raised by a factor R, and n steps made, the weights have then moved less far
    than the sum of rates says, by max(R^``LAG_EXPONENT``, ``LAG_WANDER`` n) or more (LOG, follow).
    """
    steps, rates, moved = evidence.measured.path_steps, evidence.measured.rates, evidence.measured.moved
    # Steps may have the rate of the one before, as ASGD's have: one alone says nothing.
    is_told = (steps > 1) & (steps <= LAG_WINDOW) & (rates > 0) & (moved > 0)
    raised = rates / xp.maximum(steps, 1) / state.rate
    shorter = quotient(state.pace * rates, moved, xp)
    least = xp.maximum(raised**LAG_EXPONENT, LAG_WANDER * steps)
    return is_told & (raised >= LAG_RAISE) & (shorter >= least)


def leads_nowhere(state: State, evidence: Any, constants: Constants = DEFAULT, xp: Any = Plain) -> Any:
    """Whether a path has gained nothing, and nearly all gradients have turned against it.

    Then steps are far too long, or have killed the network. Not at rates far below the prior: losses that say nothing
    about the weights must not lower the rate again and again.
    """
    c, measured = constants, evidence.measured
    is_told = measured.has_estimate & (measured.path_steps >= c.min_steps / 2)
    is_high = xp.minimum(state.log_factor, state.ceiling) > state.prior - math.log(c.backoff)
    return is_told & is_high & xp.logical_not(evidence.has_gained) & (measured.balance < AGAINST)
