"""What was found, and the end of a run of unknown length."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from hdet.checks import is_int, must_be
from hdet.errors import ArgumentError
from hdet.events import Reason
from hdet.jax.bases import parts_of
from hdet.jax.numbers import Array, number
from hdet.jax.progress import LONGEST
from hdet.jax.round import Round
from hdet.jax.state import AutoState, Memory
from hdet.search.memory import doubt_of, within
from hdet.search.progress import CLEAR, SURE
from hdet.search.reporting import Found, Status
from hdet.search.rule import Phase, State

_QUIET = 3
"""As in torch: a run of unknown length has settled after this many rounds in which the rate was not raised."""


def state_in(state: Any) -> AutoState:
    """The state of :func:`hdet.jax.auto` in that of a whole optimizer, such as an ``optax.chain``."""
    found: list[AutoState] = parts_of(state, lambda node: isinstance(node, AutoState))
    if len(found) != 1:
        raise ArgumentError(
            f"state must have the state of one hdet.jax.auto in it, but got {len(found)}; give what init() or update() "
            "has returned"
        )
    return found[0]


def found(state: Any) -> Found:
    """What was found so far, as in torch: rate, status, rollbacks. Waits for the device.

    The rate is in units of the base's own unless that was made by ``optax.inject_hyperparams``: so make it with 1.

    Args:
        state: of :func:`hdet.jax.auto`, or of an optimizer that it is a part of.
    """
    own = state_in(state)
    memory = own.memory
    notes, factor = memory.notes, float(memory.found.peak_factor)
    guesses = [float(guess) for guess in own.guesses] or [1.0]
    rates = tuple(guess * factor for guess in guesses) if notes.rounds > 0 else ()
    status, why = _status(memory, own.steps.made >= memory.plan.total)
    rate = rates[0] if rates else float("nan")
    return Found(rate, status, int(notes.rolled_back), rates, why, within(_plain(memory)))


def _plain(memory: Memory) -> State:
    """What :mod:`hdet.search.memory` needs of a state to say how sure it is."""
    found = memory.found
    return State(ceiling=float(found.ceiling), asked=float(found.asked), prior=float(found.prior))


def _status(memory: Memory, is_last: Array) -> tuple[Status, str]:
    notes, phase = memory.notes, int(memory.found.phase)
    if phase == Phase.STOPPED:
        why = [*Reason][int(notes.why) - 1]
        return ("too short" if why is Reason.TOO_SHORT else "stopped"), why.text
    is_quiet = bool(memory.plan.is_endless & notes.has_peaked & (notes.quiet >= _QUIET))
    falling, rests = bool(notes.is_falling), bool(is_last) or is_quiet or bool(notes.is_bound)
    if phase == Phase.FIRST or not (falling or rests):
        return "searching", ""
    if not memory.progress.has_fallen(SURE if falling else CLEAR):
        return ("stopped", Reason.NOT_FALLEN.text) if falling else ("searching", "")
    if notes.is_bound:
        return "settled", Reason.AT_BOUND.text
    doubt = doubt_of(_plain(memory))
    return ("settled", "") if doubt is None else ("unsure", doubt.text)


def finish(state: Any, steps: int) -> Any:
    """The state of a run that ends after ``steps`` more steps: from here on the rate falls by 1 - sqrt.

    Call it between two steps, outside ``jit``; nothing is traced again. A rate that falls already goes on from there.

    Args:
        state: of :func:`hdet.jax.auto`, or of an optimizer that it is a part of; the result is of the same kind.
        steps: steps that training still makes.
    """
    own = state_in(state)
    memory = own.memory
    t, plan, searched = own.steps.made, memory.plan, memory.found
    if isinstance(t, jax.core.Tracer):
        raise ArgumentError(
            "finish() must be called outside jit, but the state is being traced; call it between two steps"
        )
    now, total = int(t), int(plan.total)
    if plan.is_given:
        raise ArgumentError(
            f"finish() must be called without schedule=, but this run follows a schedule of {total} steps; leave it "
            "out, hdet.jax.auto(base, total_steps), or begin a new run with the params and a schedule of the steps "
            "that are left"
        )
    rule, fits = f"an integer from 1 to {LONGEST - 1 - now}", is_int(steps) and 1 <= steps < LONGEST - now
    must_be(rule, fits, "give the steps that training is still to make", steps=steps)
    if now >= total:
        raise ArgumentError(
            f"finish() must be called before the run ends, but it ends at step {total}, and this is step {now}; go on "
            "from a checkpoint of an earlier step"
        )
    has_fallen = (t > plan.falls_from) & ~plan.is_endless
    share = jnp.where((searched.phase == Phase.STOPPED) & ~has_fallen, plan.plain(t), 1.0) * searched.rise(t)
    left, plan = jnp.log(share), plan.finished(t, int(steps))
    after = searched._replace(
        peak=number(now - 1.0), level=searched.level + left, slowed_from=searched.slowed_from + left
    )
    end = jnp.maximum(Round.end_of(memory.round.begun, after.phase, plan), t + 1)
    new = own.remembering(plan=plan, found=after, round=memory.round._replace(end=end))
    return jax.tree.map(lambda node: new if node is own else node, state, is_leaf=lambda node: node is own)
