"""The rule of a search on arrays: :mod:`hdet.auto.rule`, decision by decision; that file says what it means."""

from __future__ import annotations

import math
from enum import IntEnum
from typing import NamedTuple

import jax.numpy as jnp

from hdet.auto.constants import DEFAULT as C
from hdet.auto.rule import FINE, HIGHEST, LOWEST, Phase
from hdet.jax.numbers import Array, choose, number
from hdet.jax.ruin import Blocks, Course, judge
from hdet.rollback.retreat import Action
from hdet.rollback.ruin import FEWEST, Verdict


class Event(IntEnum):
    """What the end of a round has come to."""

    NOTHING = 0
    FIRST_STEP = 1
    TOO_LONG = 2
    """The first step was too long, and is made again from the first weights."""
    SPARED = 3
    """Weights were not finite: back to the last snapshot, at the same rate."""
    RUINED = 4
    """Back to the older snapshot, at a third of the rate."""
    SLOWED = 5
    """The same without a snapshot: the weights stay."""
    HARDER = 6
    """The data were harder: the rate is as before."""
    NEVER_MOVED = 7
    NO_GRADIENT = 8
    NOT_FOLLOWED = 9
    """The last three: why the guess is kept to."""
    TOO_SHORT = 10
    """No round was needed for that."""


class State(NamedTuple):
    """Everything that a search has learned."""

    phase: Array
    level: Array
    peak: Array
    ceiling: Array
    course: Course
    kept: Array
    """The step of the snapshot in each of the two slots; -1: there is none."""
    last: Array
    """The slot of the later one."""
    slowed_from: Array
    pace: Array
    rate: Array
    spared: Array

    @classmethod
    def new(cls, phase: Phase = Phase.FIRST) -> State:
        """Before the first step, or at the guess without a search."""
        return cls(
            phase=jnp.asarray(phase, jnp.int32),
            level=number(0.0 if phase is Phase.KEPT else math.log(C.begin)),
            peak=number(0.0),
            ceiling=number(math.inf),
            course=Course.new(),
            kept=jnp.full(2, -1, jnp.int32),
            last=jnp.ones((), jnp.int32),
            slowed_from=number(math.nan),
            pace=number(math.nan),
            rate=number(math.nan),
            spared=jnp.zeros((), bool),
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
        return jnp.where(rises, jnp.maximum(C.least_rise, (t + 1) / (self.peak + 1)), 1.0)

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

    end: Array
    steps: Array
    length: Array
    """Of the run."""
    blocks: Blocks
    peak: Array
    shape: Array
    moved: Array
    reach: Array
    straightness: Array
    gradient: Array
    rates: Array
    stretch: Array
    has_losses: Array
    has_fallen: Array
    is_lost: Array
    first: Array
    latest: Array
    rounding: float
    highest: Array

    @property
    def asks(self) -> Array:
        """Whether the reach says anything."""
        return (self.gradient != 0) & (self.stretch != 1)

    @property
    def is_falling(self) -> Array:
        return self.shape < C.falling


class Decision(NamedTuple):
    """What follows from a round."""

    state: State
    action: Array = Action.NOTHING
    slot: Array = 0
    event: Array = Event.NOTHING
    anew: Array = False
    is_harder: Array = False


def _either(condition: Array, yes: Decision, no: Decision) -> Decision:
    return choose(condition, yes, no)


def after_round(state: State, evidence: Evidence) -> Decision:
    """One round."""
    is_late = evidence.end > jnp.maximum(evidence.peak, C.shortest)
    why = jnp.where(evidence.moved > 0, Event.NO_GRADIENT, Event.NEVER_MOVED)
    first = _either(is_late, _alarmed(why), _after_first_step(state, evidence))
    later = _either(_lags(state, evidence), _alarmed(Event.NOT_FOLLOWED), _judged(state, evidence))
    found = _either(state.phase == Phase.FIRST, first, later)
    return _either(state.phase == Phase.KEPT, Decision(state), found)


def _after_first_step(state: State, evidence: Evidence) -> Decision:
    moved, size, end = evidence.moved, evidence.gradient, evidence.end
    says_nothing = (size == 0) | ~((moved > 0) | jnp.isfinite(size))
    shorter = Decision(state.at(state.level + math.log(C.begin)), Action.RESTART, event=Event.TOO_LONG, anew=True)
    higher = Decision(state.at(state.level - math.log(C.begin)), event=Event.FIRST_STEP, anew=True)

    raised = state.level + jnp.log(jnp.minimum(C.relative_step / moved, 1 / C.begin))
    longer = state.at(jnp.minimum(raised, evidence.highest))
    least = min(max(evidence.rounding, FINE) / C.relative_step, C.relative_step / C.fastest)
    is_short = (moved < least) & (longer.level > state.level)
    again = Decision(longer, Action.RESTART, event=Event.FIRST_STEP, anew=True)

    phase = jnp.full_like(state.phase, Phase.SEARCHING)
    found = state._replace(phase=phase, level=jnp.zeros_like(state.level), peak=evidence.peak)
    has_rate = evidence.rates > 0
    found = found._replace(
        pace=jnp.where(has_rate, moved / evidence.rates, state.pace),
        rate=jnp.where(has_rate, evidence.rates / evidence.stretch, state.rate),
    )
    found = found.at(state.level + math.log(C.relative_step) - jnp.log(moved) - jnp.log(found.rise(end)))
    too_long = Decision(found, Action.RESTART, event=Event.TOO_LONG, anew=True)
    measured = _keeping(Decision(found, event=Event.FIRST_STEP, anew=True), end)
    measured = _either(moved >= C.relative_step * C.fastest, too_long, measured)

    known = _either(is_short, again, measured)
    known = _either(jnp.isinf(moved), shorter, known)
    known = _either(moved > 0, known, higher)
    return _either(says_nothing, Decision(state, anew=True), known)


def _lags(state: State, evidence: Evidence) -> Array:
    stretch, rates, moved = evidence.stretch, evidence.rates, evidence.moved
    raised, shorter = rates / stretch / state.rate, state.pace * rates / moved
    is_told = (stretch > 1) & (stretch <= C.watched) & (rates > 0) & (moved > 0)
    return is_told & (raised >= C.raised) & (shorter >= jnp.maximum(raised**C.lags, C.wanders * stretch))


def _judged(state: State, evidence: Evidence) -> Decision:
    falling, sound = evidence.is_falling, jnp.isfinite(evidence.moved)
    doubted = evidence.has_losses & evidence.asks & (evidence.reach == -jnp.inf)
    course, verdict = judge(state.course, evidence.blocks, falling=falling, doubted=doubted)
    is_innocent = ~sound & _is_innocent(state, evidence)
    seen = state._replace(course=course)

    is_dead = (verdict == Verdict.FINE) & evidence.is_lost & ~falling & state.has_snapshot
    dead = course.accused_of(evidence.latest).expecting(evidence.first)
    accused = seen._replace(course=choose(is_dead, dead, course))
    is_ruined = (verdict == Verdict.RUINED) | is_dead | ~sound

    is_harder, had = verdict == Verdict.ACQUITTED, jnp.isfinite(state.slowed_from)
    freed = seen._replace(ceiling=seen.ceiling + seen.slowed_from - seen.level).at(seen.slowed_from)
    well = choose(is_harder & had, freed, seen)
    some = jnp.any(evidence.blocks.given)
    well = well._replace(
        slowed_from=jnp.where(some, jnp.nan, well.slowed_from),
        spared=well.spared & ~(some & falling),
    )
    well = choose(falling, well, _steered(well, evidence))
    event = jnp.where(is_harder & had, Event.HARDER, Event.NOTHING)
    fine = Decision(well, event=event, is_harder=is_harder)
    gained_nothing = well.has_snapshot & _is_fresh(well, evidence) & ~falling
    fine = _either(gained_nothing, fine, _keeping(fine, evidence.end))
    return _either(is_innocent, _spared(state), _either(is_ruined, _ruined(accused), fine))


def _is_innocent(state: State, evidence: Evidence) -> Array:
    verdict = judge(state.course, evidence.blocks.finite, falling=evidence.is_falling)[1]
    can = state.has_snapshot & jnp.isnan(state.slowed_from) & ~state.spared
    return can & evidence.has_losses & (verdict == Verdict.FINE) & ~evidence.is_lost


def _spared(state: State) -> Decision:
    after = state._replace(spared=jnp.ones_like(state.spared), pace=jnp.full_like(state.pace, jnp.nan))
    return Decision(after, Action.ROLL_BACK, state.last, Event.SPARED, anew=True)


def _ruined(state: State) -> Decision:
    none, no = jnp.full_like(state.pace, jnp.nan), jnp.zeros_like(state.spared)
    slowed = state.at(state.level - math.log(C.slower))._replace(pace=none, spared=no)
    stays = Decision(slowed._replace(course=state.course.acquitted()), Action.GO_ON, event=Event.SLOWED, anew=True)
    back = state.older
    kept = jnp.where(jnp.arange(2) == back, state.kept, -1)
    slowed = slowed._replace(kept=kept, last=back, slowed_from=state.level)
    return _either(state.has_snapshot, Decision(slowed, Action.ROLL_BACK, back, Event.RUINED, anew=True), stays)


def _steered(state: State, evidence: Evidence) -> State:
    is_settled, end = state.spared & jnp.isfinite(state.ceiling), evidence.end
    q, most = evidence.length**-C.shrink, _largest_raise(state, evidence)
    straight = evidence.straightness >= 1 - q * C.turn
    asked = jnp.where(straight, most, evidence.reach + jnp.log(q * C.heed) - state.level)
    capped = jnp.minimum(state.ceiling - jnp.log(state.rise(end)), state.level)
    raised = state._replace(ceiling=jnp.full_like(state.ceiling, jnp.inf)).at(capped + jnp.minimum(asked, most))
    # The state that is raised has another level than the one that was capped, and no ceiling: nothing goes down with it.
    limit = jnp.log(state.factor(end) * jnp.maximum(q * C.ceiling, 1.0))
    held = state._replace(ceiling=jnp.where(jnp.isfinite(state.ceiling), state.ceiling, limit))
    return choose(is_settled | ~evidence.asks, state, choose(asked > 0, raised, held))


def _is_fresh(state: State, evidence: Evidence) -> Array:
    return ~evidence.has_fallen & jnp.isfinite(state.pace)


def _largest_raise(state: State, evidence: Evidence) -> Array:
    fresh = jnp.minimum(math.log(C.fastest) * evidence.steps / C.short, math.log(C.slower))
    climbing = jnp.minimum(C.climb * evidence.steps / jnp.maximum(evidence.peak + 1, 1.0), math.log(C.fastest))
    return jnp.where(_is_fresh(state, evidence), fresh, climbing)


def _alarmed(why: Array) -> Decision:
    return Decision(State.new(Phase.KEPT), event=why)


def _keeping(decision: Decision, step: Array) -> Decision:
    """The decision, and remember the weights as they are, in a slot that the last snapshot does not need."""
    state, slot = decision.state, 1 - decision.state.last
    is_due = ~state.has_snapshot | (step - state.kept[state.last] >= FEWEST)
    kept = state._replace(kept=state.kept.at[slot].set(step), last=jnp.asarray(slot))
    return _either(is_due, decision._replace(state=kept, action=Action.KEEP, slot=slot), decision)
