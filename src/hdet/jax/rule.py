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
from hdet.search.constants import DEFAULT as C
from hdet.search.estimate import FP32_ROUNDING
from hdet.search.rule import HIGHEST, LOWEST, Phase


def code_of(member: Event | Reason) -> int:
    """Events and reasons are numbers in a state; 0: none."""
    return [*type(member)].index(member) + 1


class State(NamedTuple):
    """Everything that a search has learned."""

    phase: Array
    level: Array
    peak: Array
    ceiling: Array
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
        """The state at another level, within bounds; a ceiling goes down with it."""
        level = jnp.clip(level, LOWEST, HIGHEST)
        return self._replace(level=level, ceiling=self.ceiling + jnp.minimum(level - self.level, 0.0))

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
    estimated_level: Array
    straightness: Array
    gradient: Array
    rates: Array
    stretch: Array
    has_losses: Array
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
    """The judge has seen nothing, but what was learned is lost."""
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
        is_dead = is_judged & (verdict == Verdict.FINE) & outlook.is_lost & ~evidence.is_falling & has
        has_diverged = is_judged & ~is_excused & ((verdict == Verdict.DIVERGED) | is_dead | ~is_sound)
        is_well = is_judged & ~is_excused & ~has_diverged
        return cls(
            is_first=is_first,
            is_judged=is_judged,
            stops=lags | (is_first & (evidence.end > jnp.maximum(evidence.peak, C.min_steps))),
            lags=lags,
            is_excused=is_excused,
            is_dead=is_dead,
            is_back=has_diverged & has,
            is_slowed=has_diverged & ~has,
            is_taken_back=is_well & (verdict == Verdict.FALSE_ALARM) & jnp.isfinite(state.slowed_from),
        )


def after_round(apart: Apart, state: State, evidence: Evidence, cases: Cases, is_below: Array) -> Decision:
    """One round; ``is_below``: whether the loss is clearly lower than it was."""
    zero = jnp.zeros((), jnp.int32)
    found = Decision(state, zero, zero, zero, jnp.zeros((), bool), zero)
    found = when(cases.is_first, lambda _: _after_first_step(state, evidence), found)
    found = when(cases.is_judged, lambda _: _judged(state, evidence, cases, is_below), found)
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
    is_told = (stretch > 1) & (stretch <= C.lag_window) & (rates > 0) & (moved > 0)
    return (
        is_told & (raised >= C.lag_min_raise) & (shorter >= jnp.maximum(raised**C.lag_exponent, C.lag_wander * stretch))
    )


def _judged(state: State, evidence: Evidence, cases: Cases, is_below: Array) -> Decision:
    is_excused, is_back, is_taken_back = cases.is_excused, cases.is_back, cases.is_taken_back
    has_diverged, falling, has = is_back | cases.is_slowed, evidence.is_falling, state.has_snapshot
    is_well, raised = ~is_excused & ~has_diverged, state.slowed_from - state.level
    before = state._replace(
        level=jnp.where(is_taken_back, state.slowed_from, state.level),
        ceiling=jnp.where(is_taken_back, state.ceiling + raised, state.ceiling),
    )
    is_fresh = ~is_below & jnp.isfinite(state.pace)  # nothing has been gained yet, and nothing lost
    slowed, (level, ceiling) = state.at(state.level - math.log(C.backoff)), _steered(before, evidence, is_fresh)
    steers, some, older = is_well & ~falling, evidence.is_told, state.older
    after = before._replace(
        level=jnp.where(has_diverged, slowed.level, jnp.where(steers, level, before.level)),
        ceiling=jnp.where(has_diverged, slowed.ceiling, jnp.where(steers, ceiling, before.ceiling)),
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


def _steered(state: State, evidence: Evidence, is_fresh: Array) -> tuple[Array, Array]:
    """Level and ceiling: the level rises to the estimated rate; if that is not above it, a ceiling is set."""
    is_settled, end = state.excused & jnp.isfinite(state.ceiling), evidence.end
    q, most = evidence.length**-C.length_exponent, _largest_raise(evidence, is_fresh)
    straight = evidence.straightness >= 1 - q * C.straight_tolerance
    asked = jnp.where(straight, most, evidence.estimated_level + jnp.log(q * C.estimate_fraction) - state.level)
    is_raised, is_asked = asked > 0, evidence.asks & ~is_settled
    capped = jnp.minimum(state.ceiling - jnp.log(state.rise(end)), state.level)  # on from the rate as it is
    level = jnp.clip(capped + jnp.minimum(asked, most), LOWEST, HIGHEST)
    limit = jnp.log(state.factor(end) * jnp.maximum(q * C.ceiling, 1.0))
    ceiling = jnp.where(
        is_raised, jnp.inf, jnp.minimum(state.ceiling, jnp.where(jnp.isinf(state.ceiling), limit, jnp.inf))
    )
    return jnp.where(is_asked & is_raised, level, state.level), jnp.where(is_asked, ceiling, state.ceiling)


def _largest_raise(evidence: Evidence, is_fresh: Array) -> Array:
    fresh = jnp.minimum(math.log(C.max_growth) * evidence.steps / C.min_round, math.log(C.backoff))
    climbing = jnp.minimum(C.max_climb * evidence.steps / jnp.maximum(evidence.peak + 1, 1.0), math.log(C.max_growth))
    return jnp.where(is_fresh, fresh, climbing)
