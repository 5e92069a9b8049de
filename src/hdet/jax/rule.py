"""What follows from a round: :mod:`hdet.rule.decision` on arrays; that file says what it means.

The arithmetic is that of :mod:`hdet.rule.state`. What is written here once more is in which case which of it holds.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax.numpy as jnp

from hdet.jax import numbers as xp
from hdet.jax.judge import Judged
from hdet.jax.measure import Measured
from hdet.jax.numbers import Apart, Array, number, when, where
from hdet.jax.progress import Outlook
from hdet.rule.constants import DEFAULT as C
from hdet.rule.constants import FEWEST
from hdet.rule.enums import Action, Event, Phase, Reason, Verdict
from hdet.rule.state import State, after_first_step, is_without_gain, lags, leads_nowhere, steered


def code_of(member: Event | Reason) -> int:
    """Events and reasons are numbers in a state; 0: none."""
    return [*type(member)].index(member) + 1


def new_state(phase: Phase = Phase.FIRST) -> State:
    """Before the first step, or at the guess without a search. Losses and snapshots are remembered apart from it."""
    plain = State(phase, log_factor=0.0 if phase is Phase.STOPPED else math.log(C.initial_factor))
    apart: dict[str, Any] = {"history": None, "snapshots": ()}
    return State(**{name: _array(value) for name, value in plain._asdict().items() if name not in apart}, **apart)


def _array(value: Any) -> Array:
    return number(value) if isinstance(value, float) else jnp.asarray(value, bool if value is False else jnp.int32)


def peak_factor(state: State) -> Array:
    """The factor on the guess that has been found."""
    return jnp.exp(jnp.minimum(state.log_factor, state.ceiling))


class Snapshots(NamedTuple):
    """When snapshots were made, of which there are two at most."""

    steps: Array
    """The step of the snapshot in each of the two slots; -1: there is none."""
    last: Array
    """The slot of the later one."""

    @classmethod
    def none(cls) -> Snapshots:
        return cls(jnp.full(2, -1, jnp.int32), jnp.ones((), jnp.int32))

    @property
    def exist(self) -> Array:
        return jnp.any(self.steps >= 0)

    @property
    def older(self) -> Array:
        """The slot of the older one, or of the only one."""
        return jnp.where(self.steps[1 - self.last] >= 0, 1 - self.last, self.last)


class Evidence(NamedTuple):
    """What is known when a round ends, by the names of :class:`hdet.rule.decision.Evidence`."""

    end: Array
    steps: Array
    length: Array
    """Of the run."""
    has_blocks: Array
    """Whether the round had any loss."""
    peak: Array
    is_falling: Array
    measured: Measured
    log_guess: Array
    """log of the schedule at the last step: rates are in units of the guess."""
    estimated_log_factor: Array
    has_losses: Array
    falls_steadily: Array
    looks: Array
    """Whether gradients were sampled."""
    highest: Array
    is_below: Array = True
    has_gained: Array = True

    @property
    def steps_per_call(self) -> float:
        """Steps of the optimizer for each step of the schedule."""
        return 1.0


class Decision(NamedTuple):
    """What follows from a round."""

    state: State
    snapshots: Snapshots
    action: Array
    slot: Array
    event: Array
    """See :func:`code_of`."""
    resets_path: Array
    why: Array


class Cases(NamedTuple):
    """What has happened in a round."""

    is_judged: Array
    """It was a round of the search. All cases below are such rounds."""
    lags: Array
    """The search stops because the steps do not follow the rate."""
    is_excused: Array
    is_dead: Array
    """The judge has seen nothing, but what was learned is lost."""
    is_astray: Array
    """Nothing was learned, and gradients have turned against the path."""
    is_back: Array
    """Training has diverged, and there is a snapshot."""
    is_slowed: Array
    """Training has diverged, and there is no snapshot."""
    is_false_alarm: Array

    @classmethod
    def of(cls, state: State, snapshots: Snapshots, evidence: Evidence, judged: Judged, outlook: Outlook) -> Cases:
        """One round, of whose losses the judge and the progress so far have said this."""
        verdict, has = judged.verdict, snapshots.exist
        is_searching, is_sound = state.phase == Phase.SEARCHING, jnp.isfinite(evidence.measured.moved)
        is_ignored = is_searching & lags(state, evidence, xp)
        is_judged = is_searching & ~is_ignored
        can = has & jnp.isnan(state.slowed_from) & ~state.excused & evidence.has_losses
        is_excused = is_judged & ~is_sound & can & (judged.on_finite == Verdict.FINE) & ~outlook.is_undone
        is_unseen = is_judged & (verdict == Verdict.FINE) & ~evidence.is_falling & has
        is_dead = is_unseen & outlook.is_undone
        is_astray = is_unseen & ~outlook.is_undone & leads_nowhere(state, evidence, C, xp)
        has_diverged = is_judged & ~is_excused & ((verdict == Verdict.DIVERGED) | is_dead | is_astray | ~is_sound)
        is_well = is_judged & ~is_excused & ~has_diverged
        return cls(
            is_judged=is_judged,
            lags=is_ignored,
            is_excused=is_excused,
            is_dead=is_dead,
            is_astray=is_astray,
            is_back=has_diverged & has,
            is_slowed=has_diverged & ~has,
            is_false_alarm=is_well & (verdict == Verdict.FALSE_ALARM) & jnp.isfinite(state.slowed_from),
        )


def after_round(apart: Apart, state: State, snapshots: Snapshots, evidence: Evidence, cases: Cases) -> Decision:
    """One round."""
    zero = jnp.zeros((), jnp.int32)
    found = Decision(state, snapshots, zero, zero, zero, jnp.zeros((), bool), zero)
    found = when(state.phase == Phase.FIRST, lambda one: _after_first_step(one, evidence), found)
    restored = apart(lambda: _restored(state, cases))
    raised = apart(lambda: steered(restored, evidence, evidence.length, C, xp))
    rated = where(evidence.is_falling, restored, raised)
    found = when(cases.is_judged, lambda one: _judged(one, evidence, cases, rated), found)
    return apart(lambda: _stopped(_kept(found, evidence.end), state.phase, evidence, cases.lags))


def _stopped(found: Decision, phase: Array, evidence: Evidence, lags: Array) -> Decision:
    """The end of the search, if it stops; else what was decided."""
    is_late = (phase == Phase.FIRST) & (evidence.end > jnp.maximum(evidence.peak, C.min_steps))
    why = jnp.where(evidence.measured.moved > 0, code_of(Reason.NO_GRADIENT), code_of(Reason.NEVER_MOVED))
    why = jnp.where(lags, code_of(Reason.RATE_IGNORED), why)
    none, given = Snapshots.none(), new_state(Phase.STOPPED)
    stopped = Decision(given, none, Action.NOTHING, 0, code_of(Event.STOPPED), False, why)
    return where(lags | is_late, stopped, found)


def _kept(found: Decision, end: Array) -> Decision:
    """The decision, with a snapshot if it asks for one that is due: as far apart as it takes to see an explosion."""
    steps, last = found.snapshots
    slot, asks = 1 - last, found.action == Action.KEEP
    keeps = asks & (~found.snapshots.exist | (end - steps[last] >= FEWEST))
    kept = jnp.where(keeps & (jnp.arange(2) == slot), end, steps)
    return found._replace(
        snapshots=Snapshots(kept, jnp.where(keeps, slot, last)),
        action=jnp.where(asks & ~keeps, Action.NOTHING, found.action),
        slot=jnp.where(keeps, slot, found.slot),
    )


def _after_first_step(before: Decision, evidence: Evidence) -> Decision:
    state, action, says_nothing, was_too_long = after_first_step(before.state, evidence, C, xp)
    event = jnp.where(was_too_long, code_of(Event.RESTARTED), code_of(Event.FIRST_STEP))
    return Decision(state, before.snapshots, action, 0, jnp.where(says_nothing, 0, event), True, 0)


def _restored(state: State, cases: Cases) -> State:
    """At the rate before a rollback, if that was wrong."""
    raised = state.with_ceiling_moved(state.slowed_from - state.log_factor).with_log_factor(state.slowed_from, xp)
    return where(cases.is_false_alarm, raised._replace(has_diverged=False), state)


def _judged(before: Decision, evidence: Evidence, cases: Cases, rated: State) -> Decision:
    """``rated``: the state with the rate that follows if all is well."""
    state, snapshots, is_excused, is_back = before.state, before.snapshots, cases.is_excused, cases.is_back
    has_diverged, falling = is_back | cases.is_slowed, evidence.is_falling
    is_well, some, older = ~is_excused & ~has_diverged, evidence.has_blocks, snapshots.older
    slowed = state.with_log_factor(state.log_factor - math.log(C.backoff), xp)._replace(has_diverged=True)
    after = where(is_well, rated, where(has_diverged, slowed, state))._replace(
        slowed_from=jnp.where(is_back, state.log_factor, jnp.where(is_well & some, jnp.nan, state.slowed_from)),
        pace=jnp.where(is_well, state.pace, jnp.nan),
        excused=is_excused | (is_well & state.excused & ~(some & falling)),
    )
    kept = jnp.where(is_back & (jnp.arange(2) != older), -1, snapshots.steps)
    keeps = ~(snapshots.exist & is_without_gain(state, evidence, xp) & ~falling)
    snapshots = Snapshots(kept, jnp.where(is_back, older, snapshots.last))
    action = jnp.where(has_diverged, Action.CANNOT_ROLL_BACK, jnp.where(keeps, Action.KEEP, Action.NOTHING))
    action = jnp.where(is_excused | is_back, Action.ROLL_BACK, action)
    event = jnp.where(cases.is_false_alarm, code_of(Event.FALSE_ALARM), 0)
    event = jnp.where(has_diverged, code_of(Event.SLOWED_DOWN), event)
    event = jnp.where(is_excused, code_of(Event.BAD_BATCH), jnp.where(is_back, code_of(Event.ROLLED_BACK), event))
    return Decision(after, snapshots, action, snapshots.last, event, ~is_well, 0)
