"""``hdet.jax.auto``: an optax optimizer whose learning rate is found in the run. The file to read first.

Every step scales the base's update, counts, and notes its loss (:mod:`hdet.jax.round`). Some steps are sampled
(:mod:`hdet.jax.measure`), and if a round ends the rule decides (:mod:`hdet.jax.rule`). Both are inside one
:func:`hdet.jax.numbers.when`, so that all other steps neither compute nor copy anything for them.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from hdet.checks import is_int, is_real, must_be
from hdet.errors import ArgumentError
from hdet.events import Reason
from hdet.jax.bases import check_base, check_updates, rates_in, with_rates
from hdet.jax.judge import Blocks, LossHistory, judge
from hdet.jax.measure import Tree, as_exact, copied, dot, largest, less, moved_by
from hdet.jax.numbers import Array, choose, number, typed_as, when
from hdet.jax.progress import LONGEST, Progress
from hdet.jax.round import Round, Steps
from hdet.jax.rule import Decision, Evidence, after_round, code_of
from hdet.jax.schedule import Plan, Shape
from hdet.jax.state import AutoState, Memory, Notes
from hdet.rollback.judge import Verdict
from hdet.rollback.policy import Action
from hdet.search.constants import DEFAULT as C
from hdet.search.rule import Phase

_ORIGIN, _AS_IT_IS = 2, 3
"""Where updates may lead beside snapshots 0 and 1: to the path's origin, or on as they do, with a new base state."""
_RESIDUE = 2.0**-17
"""What a rollback may leave of the displacement, over the weights' norm. In float32 this much is left if the weights
had grown by a factor of a hundred."""


def auto(
    base: optax.GradientTransformation,
    total_steps: int | None = None,
    *,
    schedule: optax.Schedule | None = None,
    pct_start: float = 0.3,
    rollback: bool = True,
    highest: float | None = None,
) -> optax.GradientTransformationExtraArgs:
    """An optimizer that finds its learning rate while it trains, by the rule of ``max_lr="auto"`` in torch.

    Call ``update(grads, state, params, value=loss)`` once a step, last in an ``optax.chain``. Without ``value`` an
    explosion is only seen in the gradients, or if weights would become NaN.

    Args:
        base: made with the rate 1, as in ``optax.adam(1.0)``: its updates are multiplied; or by
            ``optax.inject_hyperparams``: its ``learning_rate`` is the guess, and is written.
        total_steps: the length of the run, at most 2**30; None: until :func:`hdet.jax.finish` is called.
        schedule: an optax schedule. Only its shape counts: it is divided by its peak. None: the trapezoid of
            :func:`hdet.auto`.
        pct_start: the part of the run in which a trapezoid rises.
        rollback: whether two snapshots of weights and base state are kept for rollbacks.
        highest: a rate that is never exceeded; None: no bound.

    Raises:
        ArgumentError: for arguments out of range, and for a base whose updates a rate does not scale.
    """
    fits = total_steps is None or (is_int(total_steps) and 1 <= total_steps < LONGEST)
    rule, cure = f"an integer from 1 to {LONGEST - 1}, or None", "leave it out if the length is unknown"
    must_be(rule, fits, cure, total_steps=total_steps)
    must_be("a number from 0 to 1", is_real(pct_start) and 0 <= pct_start <= 1, "for instance 0.3", pct_start=pct_start)
    must_be("True or False", isinstance(rollback, bool), "leave it out for True", rollback=rollback)
    fits = highest is None or (is_real(highest) and float(highest) > 0)
    must_be("a number above 0, or None", fits, "leave it out for no bound", highest=highest)
    check_base(base)
    if schedule is not None and total_steps is None:
        raise ArgumentError("schedule must come with the length of the run, but total_steps is None; give total_steps")
    shape = None if schedule is None else Shape.of(schedule, int(total_steps or 0))
    most = math.inf if highest is None else float(highest)
    search = _Search(optax.with_extra_args_support(base), total_steps, shape, float(pct_start), rollback, most)
    return optax.GradientTransformationExtraArgs(search.init, search.update)


class _Search(NamedTuple):
    """What does not change in a run, and the two functions of a gradient transformation."""

    base: optax.GradientTransformationExtraArgs
    total_steps: int | None
    shape: Shape | None
    pct_start: float
    rollback: bool
    highest: float

    def init(self, params: Tree) -> AutoState:
        """Before the first step."""
        kinds = {str(jnp.asarray(leaf).dtype) for leaf in jax.tree.leaves(params)}
        if not kinds or not all(jnp.issubdtype(kind, jnp.inexact) for kind in kinds):
            raise ArgumentError(
                f"params must be floating-point arrays, at least one, but got {sorted(kinds)}; leave others out, for "
                "instance by equinox.filter(model, equinox.is_inexact_array)"
            )
        params = jax.tree.map(jnp.asarray, params)
        inner = self.base.init(params)
        check_updates(self.base, inner, params)
        too_short = self.total_steps is not None and self.total_steps < C.min_steps
        plan = Plan.of(self.total_steps, self.pct_start, None if self.shape is None else self.shape.step)
        why = code_of(Reason.TOO_SHORT) if too_short else 0
        memory = Memory.new(Phase.STOPPED if too_short else Phase.FIRST, plan, why)
        origin, none, steps = as_exact(params), jnp.zeros(0), Steps.new()
        total, slots = jax.tree.map(jnp.zeros_like, origin), ((params, inner), (params, inner)) if self.rollback else ()
        state = AutoState(inner, rates_in(inner), origin, total, slots, steps, none, none).remembering(memory)
        return copied(state, params)

    # -- a step -------------------------------------------------------------------------------------------------------

    def update(
        self, updates: Tree, state: AutoState, params: Tree | None = None, *, value: Any = None, **more: Any
    ) -> tuple[Tree, AutoState]:
        """The updates of a step. ``value``: its loss."""
        loss, steps, memory = _checked(updates, state, params, value), state.steps, state.memory
        round, returns, rate = memory.round, memory.notes.returns >= 0, self._rate(state, memory)
        made, inner = self._made(updates, state, params, rate, more if value is None else {**more, "value": value})
        made, is_sound = _only_finite(params, made, is_off=steps.withheld | returns)
        inner = typed_as(choose(returns, state.inner, inner), state.inner)
        samples = memory.looks & ((steps.made - round.begun) % round.stride == 0) & ~returns
        ends = (steps.made < memory.plan.total) & (steps.made + 1 >= round.end) & ~returns

        def sampled(after: AutoState) -> AutoState:
            gradients = jax.tree.map(lambda g: jnp.where(steps.withheld, jnp.nan, g), updates)
            return _with_sample(after, steps, gradients, params)

        def busy(both: tuple[Tree, AutoState]) -> tuple[Tree, AutoState]:
            """The step is sampled, or its round ends, or both; or it completes a rollback."""
            made, after = both
            both = when(ends, lambda both: self._ended(params, *both), (made, when(samples, sampled, after)))
            return when(returns, lambda both: self._returned(params, *both), both)

        after = state._replace(inner=inner, steps=steps.next(round, rate, loss, is_sound))
        return when(samples | ends | returns, busy, (made, after))

    def _made(self, gradients: Tree, state: AutoState, params: Tree, rate: Array, more: dict[str, Any]) -> Any:
        """The base's updates at this rate, at least in float32, and its new state."""
        inner = with_rates(state.inner, tuple(guess * rate for guess in state.guesses))
        made, inner = self.base.update(gradients, inner, params, **more)
        made = jax.tree.map(lambda u, p: u.astype(jnp.result_type(u.dtype, p.dtype, jnp.float32)), made, params)
        return (made if state.guesses else jax.tree.map(lambda u: u * rate.astype(u.real.dtype), made)), inner

    def _rate(self, state: AutoState, memory: Memory) -> Array:
        """In units of the guess."""
        shape, t = self._shape(memory), state.steps.made
        value = jnp.where(memory.found.phase == Phase.STOPPED, shape.plain(t), shape.held(t))
        return jnp.minimum(memory.found.factor(t), self._most(state)) * value

    def _shape(self, memory: Memory) -> Any:
        return self.shape or memory.plan

    def _most(self, state: AutoState) -> Array:
        """The largest factor that the user's bound allows."""
        return self.highest / jnp.max(jnp.stack(state.guesses or (number(1.0),)))

    # -- the end of a round -------------------------------------------------------------------------------------------

    def _ended(self, params: Tree, made: Tree, state: AutoState) -> tuple[Tree, AutoState]:
        """Measure, decide, act. ``state`` is that after the step, whose updates are ``made``."""
        weights, steps, was = moved_by(params, made), state.steps, state.memory
        t, found, is_first = steps.made, was.found, was.found.phase == Phase.FIRST
        looks, highest = was.looks & (t < was.plan.total), jnp.log(self._most(state))
        measured = was.path.measured(state.origin, state.total, steps.rates.total, weights, is_first)
        lost = looks & ~is_first & (measured.lost | steps.withheld)
        has_losses = was.notes.has_losses | jnp.any(steps.losses[2] > 0)
        blocks = steps.blocks(was.round, has_losses, looks & ~is_first)
        shape, says = self._shape(was), looks & ~lost
        before = shape.held(t - 1)
        evidence = Evidence(
            end=t,
            steps=t - was.round.begun,
            length=jnp.where(was.plan.is_endless, C.assumed_length * t, was.plan.total),
            is_told=jnp.any(blocks.given),
            peak=was.plan.peak,
            is_falling=(t > was.plan.peak) & (shape.held(t) < C.fall_start),
            moved=jnp.where(steps.withheld, jnp.inf, jnp.where(looks, measured.moved, 0.0)),
            distance=measured.distance,
            log_guess=jnp.log(jnp.where(before > 0, before, 1.0)),
            estimated_level=jnp.log(jnp.where(says & (before > 0), measured.estimated_rate / before, 0.0)),
            straightness=jnp.where(says, measured.straightness, 0.0),
            gradient=jnp.where(says, jnp.max(jnp.where(was.round.sizes == -1, 0.0, was.round.sizes)), 0.0),
            rates=jnp.where(looks, steps.rates.total, 0.0),
            stretch=jnp.where(looks, t - was.path.begun, 0),
            has_losses=has_losses,
            falls_steadily=has_losses & jnp.all(blocks.given) & jnp.all(jnp.diff(blocks.mean) < 0),
            rounding=max(float(jnp.finfo(x.dtype).eps) / 2 for x in jax.tree.leaves(weights)),
            highest=highest,
        )
        decision, progress = _decided(was, evidence, blocks)
        after = decision.state.bounded(highest)
        if not self.rollback:
            after = after._replace(kept=jnp.full_like(found.kept, -1))
        typical = jnp.where(looks, measured.typical, was.path.typical)
        now = was._replace(
            found=after,
            progress=progress,
            notes=_noted(was, decision, evidence),
            round=Round.beginning(t, after.phase, was.plan),
            path=was.path._replace(typical=typical),
        )
        both = made, state.with_new_round(now, decision.is_new_path | lost | ~now.looks | (t >= was.plan.total))
        return self._acted(decision, steps.withheld, params, weights, *both)

    def _acted(
        self, decision: Decision, withheld: Array, params: Tree, weights: Tree, made: Tree, state: AutoState
    ) -> tuple[Tree, AutoState]:
        """Keep a snapshot, or lead to another place, as was decided."""
        keeps = decision.action == Action.KEEP
        slots = tuple(
            when(keeps & (decision.slot == i), lambda _: (weights, state.inner), slot)
            for i, slot in enumerate(state.slots)
        )
        target = jnp.where(withheld, _AS_IT_IS, -1)
        target = jnp.where(decision.action == Action.RESTART, _ORIGIN, target)
        if slots:
            target = jnp.where(decision.action == Action.ROLL_BACK, decision.slot, target)
        both = made, state._replace(slots=slots)
        return when(target >= 0, lambda both: self._led_to(target, params, *both), both)

    def _led_to(self, target: Array, params: Tree, made: Tree, state: AutoState) -> tuple[Tree, AutoState]:
        """Updates that lead to a target, the base's state there, and whether the next call has to complete it."""

        def led_to(weights: Tree, inner: Tree | None = None) -> tuple[Tree, Tree, Array]:
            out = jax.tree.map(lambda x, u: x.astype(u.dtype), less(weights, params), made)
            rest, own = less(weights, moved_by(params, out)), as_exact(weights)
            is_done = dot(rest, rest) <= _RESIDUE**2 * dot(own, own)
            if inner is None:  # that of the base may be NaN
                inner = self.base.init(jax.tree.map(lambda x, p: x.astype(p.dtype), weights, params))
            return typed_as((out, inner, jnp.where(is_done, -1, target)), (made, state.inner, target))

        places = [*state.slots, (state.origin,), (moved_by(params, made),)]
        branches = [lambda place=place: led_to(*place) for place in places]
        made, inner, returns = jax.lax.switch(target - (_ORIGIN - len(state.slots)), branches)
        memory = state.memory
        notes = memory.notes._replace(returns=returns)
        return made, state.remembering(memory._replace(notes=notes), inner=inner)

    def _returned(self, params: Tree, made: Tree, state: AutoState) -> tuple[Tree, AutoState]:
        """No step of training: its update removes what rounding has left of a rollback."""
        now = state.memory
        made, _ = self._led_to(now.notes.returns, params, made, state)
        round = Round.beginning(state.steps.made, now.found.phase, now.plan)
        notes = now.notes._replace(returns=-1)
        return made, state.with_new_round(now._replace(round=round, notes=notes), True)


def _with_sample(state: AutoState, before: Steps, gradients: Tree, params: Tree) -> AutoState:
    """The state with the gradients of a step that was just made."""
    memory, trees = state.memory, (state.origin, state.total)
    round, rate = memory.round, state.steps.rate
    (origin, total), path = memory.path.sampled(trees, gradients, params, rate, before.rates.total, before.made)
    sizes = round.sizes.at[(before.made - round.begun) // round.stride].set(largest(gradients))
    memory = memory._replace(path=path, round=round._replace(sizes=sizes))
    return state.remembering(memory, origin=origin, total=total)


def _decided(was: Memory, evidence: Evidence, blocks: Blocks) -> tuple[Decision, Progress]:
    """What follows from a round, and the losses so far as they are remembered after it."""
    found, has_losses = was.found, evidence.has_losses
    begins = has_losses & ~was.notes.has_losses  # gradients were judged until now
    doubted = has_losses & evidence.asks & (evidence.estimated_level == -jnp.inf)
    judged = judge(choose(begins, LossHistory.new(), found.history), blocks, evidence.is_falling, doubted)
    is_harder = (found.phase == Phase.SEARCHING) & (judged.verdict == Verdict.FALSE_ALARM)
    fresh = choose(is_harder, Progress.new(), was.progress)  # earlier losses are no measure any more
    told = blocks._replace(given=blocks.given & has_losses)
    progress, outlook = fresh.after(told, evidence.end, found.phase == Phase.FIRST)
    decision = after_round(found.bounded(evidence.highest), evidence, judged, outlook)
    goes_back = decision.action == Action.ROLL_BACK
    return decision, choose(goes_back, was.progress.rolled_back(found.kept[decision.slot]), progress)


def _noted(was: Memory, decision: Decision, evidence: Evidence) -> Notes:
    notes, before, after, highest = was.notes, was.found, decision.state, evidence.highest
    is_raised = (after.peak_factor > before.peak_factor) | (after.phase != before.phase)
    return notes._replace(
        rounds=notes.rounds + 1,
        has_losses=evidence.has_losses,
        is_falling=evidence.is_falling,
        has_peaked=notes.has_peaked | (evidence.end >= was.plan.peak),
        is_bound=(highest < jnp.inf) & (jnp.minimum(after.level, after.ceiling) >= highest - 1e-6),
        quiet=jnp.where(is_raised, 0, notes.quiet + 1),
        rolled_back=notes.rolled_back + (decision.action == Action.ROLL_BACK),
        event=decision.event,
        why=jnp.where(decision.why > 0, decision.why, notes.why),
    )


def _only_finite(params: Tree, made: Tree, is_off: Array) -> tuple[Tree, Array]:
    """The updates without those that would make a weight NaN or infinite, or none at all; whether all were fine."""
    fits = jax.tree.map(lambda p, u: jnp.isfinite((p + u).astype(p.dtype)), params, made)
    kept = jax.tree.map(lambda u, fit: jnp.where(fit & ~is_off, u, jnp.zeros_like(u)), made, fits)
    all_fit = jnp.all(jnp.stack([jnp.all(fit) for fit in jax.tree.leaves(fits)]))
    return kept, all_fit | is_off


def _checked(gradients: Tree, state: Any, params: Tree | None, value: Any) -> Array | None:
    """The loss. Raises for what cannot be a step of this state."""
    if params is None:
        raise ArgumentError(
            "params must be given to update(), since the search measures how far they move, but got None; call "
            "update(grads, state, params, value=loss)"
        )
    if not isinstance(state, AutoState):
        raise ArgumentError(
            f"state must be that of hdet.jax.auto, but got {type(state).__name__}; make it by init(params)"
        )
    made_for = _outline(state.origin)
    for name, tree in (("params", params), ("grads", gradients)):
        if _outline(tree) != made_for:
            raise ArgumentError(
                f"{name} must have the arrays of the params that the state was made for, but got another tree or other "
                "shapes; make the state by init(params), with all arrays that are trained"
            )
    if value is None:
        return None
    if jnp.ndim(value) != 0 or jnp.iscomplexobj(value):
        raise ArgumentError(
            f"value must be one real number, the loss, but got an array of shape {jnp.shape(value)}, "
            f"{jnp.asarray(value).dtype}; reduce it first, for instance loss.mean()"
        )
    return jnp.asarray(value, jnp.result_type(float))


def _outline(tree: Tree) -> Any:
    return jax.tree.structure(tree), [jnp.shape(leaf) for leaf in jax.tree.leaves(tree)]
