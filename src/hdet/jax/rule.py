"""The rule of a search on arrays: :mod:`hdet.search.rule`, decision by decision; that file says what it means."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp

from hdet.events import Event, Reason
from hdet.jax.judge import Judged
from hdet.jax.numbers import Apart, Array, choose, number, when
from hdet.jax.progress import Outlook
from hdet.rollback.judge import FEWEST, Verdict
from hdet.rollback.policy import Action
from hdet.search import lag
from hdet.search.constants import DEFAULT as C
from hdet.search.estimate import FP32_ROUNDING
from hdet.search.rule import AGAINST, HIGHEST, LOWEST, Phase


def code_of(member: Event | Reason) -> int:
    """Events and reasons are numbers in a state; 0: none."""
    return [*type(member)].index(member) + 1


class State(NamedTuple):
    """Everything that a search has learned."""

    phase: Array
    level: Array
    peak: Array
    ceiling: Array
    asked: Array
    most_asked: Array
    has_diverged: Array
    prior: Array
    reach: Array
    kept: Array
    """The step of the snapshot in each of the two slots; -1: there is none."""
    last: Array
    """The slot of the later one."""
    slowed_from: Array
    pace: Array
    rate: Array
    excused: Array

    @classmethod
    def new(cls, phase: Phase = Phase.FIRST) -> State:
        """Before the first step, or at the guess without a search."""
        return cls(
            phase=jnp.asarray(phase, jnp.int32),
            level=number(0.0 if phase is Phase.STOPPED else math.log(C.initial_factor)),
            peak=number(0.0),
            ceiling=number(math.inf),
            asked=number(math.inf),
            most_asked=number(math.inf),
            has_diverged=jnp.zeros((), bool),
            prior=number(math.nan),
            reach=number(math.nan),
            kept=jnp.full(2, -1, jnp.int32),
            last=jnp.ones((), jnp.int32),
            slowed_from=number(math.nan),
            pace=number(math.nan),
            rate=number(math.nan),
            excused=jnp.zeros((), bool),
        )

    @property
    def has_snapshot(self) -> Array:
        return jnp.any(self.kept >= 0)

    @property
    def older(self) -> Array:
        """The slot of the older snapshot, or of the only one."""
        return jnp.where(self.kept[1 - self.last] >= 0, 1 - self.last, self.last)

    @property
    def peak_factor(self) -> Array:
        """The factor on the guess that has been found."""
        return jnp.exp(jnp.minimum(self.level, self.ceiling))

    def rise(self, t: Array) -> Array:
        """r(t)."""
        rises = (self.phase == Phase.SEARCHING) & (t < self.peak)
        return jnp.where(rises, jnp.maximum(C.min_rise, (t + 1) / (self.peak + 1)), 1.0)

    def factor(self, t: Array) -> Array:
        """The factor on the guess and the schedule at step ``t``."""
        return jnp.minimum(jnp.exp(self.level) * self.rise(t), jnp.exp(jnp.minimum(self.ceiling, HIGHEST)))

    def at(self, level: Array) -> State:
        """The state at another level, within bounds; the ceiling falls with it."""
        level = jnp.clip(level, LOWEST, HIGHEST)
        return self._replace(level=level).lowered(jnp.minimum(level - self.level, 0.0))

    def lowered(self, by: Array) -> State:
        """The state with another ceiling; ``by``: what is added to its logarithm."""
        return self._replace(ceiling=self.ceiling + by, asked=self.asked + by)

    def climbing(self, t: Array) -> State:
        """Without a ceiling, at the rate that is in use at step ``t``."""
        level = jnp.minimum(self.level, self.ceiling - jnp.log(self.rise(t)))
        return self._replace(level=level, ceiling=number(math.inf), asked=number(math.inf), most_asked=number(math.inf))

    def bounded(self, highest: Array) -> State:
        """With a level that does not run away above the user's bound, whose logarithm is given."""
        return self._replace(level=jnp.minimum(self.level, jnp.maximum(highest, LOWEST)))


class Evidence(NamedTuple):
    """What is known when a round ends."""

    phase: Array
    end: Array
    steps: Array
    length: Array
    """Of the run."""
    is_told: Array
    """Whether the round had any loss."""
    peak: Array
    is_falling: Array
    moved: Array
    distance: Array
    log_guess: Array
    """log of the schedule at the last step: rates are in units of the guess."""
    estimated_level: Array
    straightness: Array
    balance: Array
    gradient: Array
    rates: Array
    stretch: Array
    has_losses: Array
    falls_steadily: Array
    looks: Array
    """Whether gradients were sampled."""
    rounding: float
    highest: Array

    @property
    def asks(self) -> Array:
        """Whether the estimated rate says anything."""
        return (self.gradient != 0) & (self.stretch != 1)


class Decision(NamedTuple):
    """What follows from a round."""

    state: State
    action: Array
    slot: Array
    event: Array
    """See :func:`code_of`."""
    is_new_path: Array
    """Whether a new path begins with the next step."""
    why: Array


class Cases(NamedTuple):
    """What has happened in a round."""

    is_first: Array
    """It was a first step."""
    is_judged: Array
    """It was a round of the search. All cases below are such rounds."""
    stops: Array
    lags: Array
    """The search stops because the steps do not follow the rate."""
    is_excused: Array
    is_dead: Array
    """The judge has seen nothing, but what was learned is lost ..."""
    is_astray: Array
    """... or nothing was learned, and gradients have turned against the path."""
    is_back: Array
    """Training has diverged, and there is a snapshot ..."""
    is_slowed: Array
    """... or there is none."""
    is_taken_back: Array

    @classmethod
    def of(cls, state: State, evidence: Evidence, judged: Judged, outlook: Outlook) -> Cases:
        """One round, of whose losses the judge and the progress so far have said this."""
        is_first, verdict, has = state.phase == Phase.FIRST, judged.verdict, state.has_snapshot
        lags, is_sound = (state.phase == Phase.SEARCHING) & _lags(state, evidence), jnp.isfinite(evidence.moved)
        is_judged = (state.phase == Phase.SEARCHING) & ~lags
        can = has & jnp.isnan(state.slowed_from) & ~state.excused & evidence.has_losses
        is_excused = is_judged & ~is_sound & can & (judged.on_finite == Verdict.FINE) & ~outlook.is_lost
        is_unseen = is_judged & (verdict == Verdict.FINE) & ~evidence.is_falling & has
        is_dead = is_unseen & outlook.is_lost
        is_astray = is_unseen & ~outlook.is_lost & ~outlook.has_gained
        is_astray &= evidence.asks & (evidence.stretch >= C.min_steps / 2) & (evidence.balance < AGAINST)
        is_astray &= jnp.minimum(state.level, state.ceiling) > state.prior - math.log(C.backoff)
        has_diverged = is_judged & ~is_excused & ((verdict == Verdict.DIVERGED) | is_dead | is_astray | ~is_sound)
        is_well = is_judged & ~is_excused & ~has_diverged
        return cls(
            is_first=is_first,
            is_judged=is_judged,
            stops=lags | (is_first & (evidence.end > jnp.maximum(evidence.peak, C.min_steps))),
            lags=lags,
            is_excused=is_excused,
            is_dead=is_dead,
            is_astray=is_astray,
            is_back=has_diverged & has,
            is_slowed=has_diverged & ~has,
            is_taken_back=is_well & (verdict == Verdict.FALSE_ALARM) & jnp.isfinite(state.slowed_from),
        )


def after_round(apart: Apart, state: State, evidence: Evidence, cases: Cases, is_below: Array) -> Decision:
    """One round; ``is_below``: whether the loss is clearly lower than it was."""
    zero = jnp.zeros((), jnp.int32)
    found = Decision(state, zero, zero, zero, jnp.zeros((), bool), zero)
    found = when(cases.is_first, lambda _: _after_first_step(state, evidence), found)
    is_fresh = ~is_below & jnp.isfinite(state.pace)  # nothing has been gained yet, and nothing lost
    restored = apart(lambda: _restored(state, cases))
    steered = apart(lambda: _steered(restored, evidence, is_fresh))
    rated = choose(evidence.is_falling, restored, steered)
    found = when(cases.is_judged, lambda _: _judged(state, evidence, cases, is_fresh, rated), found)
    return apart(lambda: choose(cases.stops, _stopped(evidence, cases.lags), _kept(found, evidence.end)))


def _stopped(evidence: Evidence, lags: Array) -> Decision:
    why = jnp.where(evidence.moved > 0, code_of(Reason.NO_GRADIENT), code_of(Reason.NEVER_MOVED))
    why = jnp.where(lags, code_of(Reason.RATE_IGNORED), why)
    return Decision(State.new(Phase.STOPPED), Action.NOTHING, 0, code_of(Event.STOPPED), False, why)


def _kept(found: Decision, end: Array) -> Decision:
    """The decision, with a snapshot if it asks for one that is due: as far apart as it takes to see an explosion."""
    state, slot, asks = found.state, 1 - found.state.last, found.action == Action.KEEP
    keeps = asks & (~state.has_snapshot | (end - state.kept[state.last] >= FEWEST))
    kept = jnp.where(keeps & (jnp.arange(2) == slot), end, state.kept)
    return found._replace(
        state=state._replace(kept=kept, last=jnp.where(keeps, slot, state.last)),
        action=jnp.where(asks & ~keeps, Action.NOTHING, found.action),
        slot=jnp.where(keeps, slot, found.slot),
    )


def _after_first_step(state: State, evidence: Evidence) -> Decision:
    moved, size, rates = evidence.moved, evidence.gradient, evidence.rates
    says_nothing = (size == 0) | ~((moved > 0) | jnp.isfinite(size))
    stays, explodes = ~(moved > 0), jnp.isinf(moved)
    longer = state.level + jnp.log(jnp.minimum(C.relative_step / moved, 1 / C.initial_factor))
    longer = jnp.clip(jnp.minimum(longer, evidence.highest), LOWEST, HIGHEST)
    least = min(max(evidence.rounding, FP32_ROUNDING) / C.relative_step, C.relative_step / C.max_growth)
    is_rounding = ~stays & (moved < least) & (longer > state.level)
    is_long = moved >= C.relative_step * C.max_growth
    is_measured = ~says_nothing & ~stays & ~explodes & ~is_rounding

    found = state._replace(phase=jnp.where(is_measured, Phase.SEARCHING, Phase.FIRST), peak=evidence.peak)
    level = state.level + math.log(C.relative_step) - jnp.log(moved) - jnp.log(found.rise(evidence.end))
    level = jnp.where(is_rounding, longer, level)
    level = jnp.where(explodes, state.level + math.log(C.initial_factor), level)
    level = jnp.where(stays, state.level - math.log(C.initial_factor), level)
    found = found._replace(
        level=jnp.where(says_nothing, state.level, jnp.clip(level, LOWEST, HIGHEST)),
        pace=jnp.where(is_measured & (rates > 0), moved / rates, state.pace),
        rate=jnp.where(is_measured & (rates > 0), rates / evidence.stretch, state.rate),
    )
    restarts = ~says_nothing & ~stays & (explodes | is_rounding | is_long)
    action = jnp.where(restarts, Action.RESTART, jnp.where(is_measured, Action.KEEP, Action.NOTHING))
    event = jnp.where(restarts & ~is_rounding, code_of(Event.RESTARTED), code_of(Event.FIRST_STEP))
    return Decision(found, action, 0, jnp.where(says_nothing, 0, event), True, 0)


def _lags(state: State, evidence: Evidence) -> Array:
    stretch, rates, moved = evidence.stretch, evidence.rates, evidence.moved
    raised, shorter = rates / stretch / state.rate, state.pace * rates / moved
    is_told = (stretch > 1) & (stretch <= lag.WINDOW) & (rates > 0) & (moved > 0)
    return is_told & (raised >= lag.MIN_RAISE) & (shorter >= jnp.maximum(raised**lag.EXPONENT, lag.WANDER * stretch))


def _restored(state: State, cases: Cases) -> State:
    """At the rate before a rollback, if that was wrong."""
    raised = state.lowered(state.slowed_from - state.level).at(state.slowed_from)
    return choose(cases.is_taken_back, raised._replace(has_diverged=False), state)


def _judged(state: State, evidence: Evidence, cases: Cases, is_fresh: Array, rated: State) -> Decision:
    """``rated``: the state with the rate that follows if all is well."""
    is_excused, is_back, is_taken_back = cases.is_excused, cases.is_back, cases.is_taken_back
    has_diverged, falling, has = is_back | cases.is_slowed, evidence.is_falling, state.has_snapshot
    is_well, some, older = ~is_excused & ~has_diverged, evidence.is_told, state.older
    slowed = state.at(state.level - math.log(C.backoff))._replace(has_diverged=True)
    after = choose(is_well, rated, choose(has_diverged, slowed, state))._replace(
        kept=jnp.where(is_back & (jnp.arange(2) != older), -1, state.kept),
        last=jnp.where(is_back, older, state.last),
        slowed_from=jnp.where(is_back, state.level, jnp.where(is_well & some, jnp.nan, state.slowed_from)),
        pace=jnp.where(is_well, state.pace, jnp.nan),
        excused=is_excused | (is_well & state.excused & ~(some & falling)),
    )
    keeps = ~(has & is_fresh & ~falling)
    action = jnp.where(has_diverged, Action.GO_ON, jnp.where(keeps, Action.KEEP, Action.NOTHING))
    event = jnp.where(has_diverged, code_of(Event.SLOWED_DOWN), jnp.where(is_taken_back, code_of(Event.FALSE_ALARM), 0))
    event = jnp.where(is_excused, code_of(Event.BAD_BATCH), jnp.where(is_back, code_of(Event.ROLLED_BACK), event))
    action = jnp.where(is_excused | is_back, Action.ROLL_BACK, action)
    return Decision(after, action, after.last, event, ~is_well, 0)


def _steered(state: State, evidence: Evidence, is_fresh: Array) -> State:
    q, most = evidence.length**-C.length_exponent, _largest_raise(evidence, is_fresh)
    straight, before = evidence.straightness >= 1 - q * C.straight_tolerance, state
    is_beginning = jnp.isfinite(state.pace) & (evidence.stretch <= C.min_steps)  # of the first path
    state = choose(straight & is_beginning, state.climbing(evidence.end), state)  # noise in the first steps
    has_turned, level = jnp.isfinite(state.ceiling), state.level
    reach = _reach(state, evidence, is_beginning)
    prior = math.log(C.prior_distance) + jnp.log(q) - reach
    asked = evidence.estimated_level + jnp.log(q * C.estimate_fraction)
    goes_on = evidence.falls_steadily & ~state.has_diverged
    goes_on &= jnp.where(has_turned, state.asked, level) < prior + math.log(C.backoff)
    wanted = jnp.where(straight | goes_on, most, asked - level)
    used = jnp.log(state.factor(evidence.end) * jnp.maximum(q * C.ceiling, 1.0))
    turned = jnp.minimum(level, used)
    lacking = C.balance - evidence.end / evidence.length - evidence.balance
    lacking = jnp.where(evidence.stretch > C.max_samples, lacking, 0.0)
    estimated = jnp.where(is_fresh & (prior > asked), prior, asked)
    revised = _revised(state, estimated, lacking, most, goes_on)
    found = choose(has_turned, revised, state._replace(asked=turned, most_asked=turned))
    found = _drawn(found, prior, state.ceiling + most)
    found = choose(has_turned | ~(wanted > 0), found, state.at(level + jnp.minimum(wanted, most)))
    is_settled = before.excused & jnp.isfinite(before.ceiling)
    return choose(evidence.asks & ~is_settled, found._replace(reach=reach), before)


def _reach(state: State, evidence: Evidence, is_beginning: Array) -> Array:
    """log of how far a step leads, as the first steps show it."""
    distance, rates = evidence.distance, evidence.rates
    is_told = is_beginning & (rates > 0) & (distance > 0) & (distance < jnp.inf)
    return jnp.where(is_told, jnp.log(distance / rates) + evidence.log_guess, state.reach)


def _revised(state: State, asked: Array, lacking: Array, most: Array, goes_on: Array) -> State:
    least = jnp.minimum(state.asked, state.most_asked - math.log(C.backoff))
    lower = jnp.maximum(state.asked - jnp.minimum(math.log(C.max_growth) * lacking, most), least)
    higher = state.asked + jnp.minimum(C.estimate_weight * jnp.maximum(asked - state.asked, 0.0), most)
    now = jnp.where(goes_on, state.asked + most, jnp.where(lacking > 0, lower, higher))
    return state._replace(asked=now, most_asked=jnp.maximum(state.most_asked, now))


def _drawn(state: State, prior: Array, highest: Array) -> State:
    furthest = math.log(C.backoff)
    drawn = jnp.where(jnp.isfinite(state.ceiling), jnp.clip(state.ceiling - state.asked, 0.0, furthest), 0.0)
    pull = jnp.where(jnp.isfinite(prior), C.prior_weight * (prior - state.asked), 0.0)
    pull = jnp.clip(pull, -furthest, jnp.where(state.has_diverged, drawn, furthest))
    target = jnp.clip(jnp.minimum(state.asked + pull, highest), LOWEST, HIGHEST)
    return state._replace(ceiling=target, level=jnp.maximum(state.level, target), prior=prior)


def _largest_raise(evidence: Evidence, is_fresh: Array) -> Array:
    fresh = jnp.minimum(math.log(C.max_growth) * evidence.steps / C.min_round, math.log(C.backoff))
    climbing = jnp.minimum(C.max_climb * evidence.steps / jnp.maximum(evidence.peak + 1, 1.0), math.log(C.max_growth))
    return jnp.where(is_fresh, fresh, climbing)
