"""What was found, and the end of a run of unknown length."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from hdet.checks import is_int, must_be
from hdet.errors import ArgumentError
from hdet.jax import numbers as xp
from hdet.jax.bases import parts_of
from hdet.jax.numbers import Array, number
from hdet.jax.progress import LONGEST
from hdet.jax.round import Round
from hdet.jax.rule import peak_factor
from hdet.jax.state import AutoState, Memory
from hdet.rule.constants import DEFAULT as C
from hdet.rule.constants import QUIET
from hdet.rule.enums import Phase, Reason
from hdet.rule.found import Found, Status, status_of, within


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
    notes, factor = memory.notes, float(peak_factor(memory.found))
    guesses = [float(guess) for guess in own.guesses] or [1.0]
    rates = tuple(guess * factor for guess in guesses) if notes.rounds > 0 else ()
    status, why = _status(memory, own.steps.made >= memory.plan.total)
    rate = rates[0] if rates else float("nan")
    return Found(rate, status, int(notes.rolled_back), rates, why.text if why else "", within(memory.found))


def _status(memory: Memory, is_last: Array) -> tuple[Status, Reason | None]:
    notes, falling = memory.notes, bool(memory.notes.is_falling)
    is_quiet = bool(memory.plan.is_endless & notes.has_peaked & (notes.quiet >= QUIET))
    return status_of(
        memory.found,
        [None, *Reason][int(notes.why)],
        is_falling=falling,
        rests=bool(is_last) or is_quiet or bool(notes.is_bound),
        is_bound=bool(notes.is_bound),
        has_fallen=lambda sure: bool(memory.progress.has_fallen(sure)),
    )


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
    share = jnp.where((searched.phase == Phase.STOPPED) & ~has_fallen, plan.plain(t), 1.0) * searched.rise(t, C, xp)
    plan, after = plan.finished(t, int(steps)), searched.peaking(number(now - 1.0), share, xp)
    end = jnp.maximum(Round.end_of(memory.round.begun, after.phase, plan), t + 1)
    new = own.remembering(plan=plan, found=after, round=memory.round._replace(end=end))
    return jax.tree.map(lambda node: new if node is own else node, state, is_leaf=lambda node: node is own)
