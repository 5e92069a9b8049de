"""``hdet.jax.auto``: an optax optimizer whose learning rate is found in the run. The file to read first.

Every step scales the base's update, counts, and notes its loss (:class:`hdet.jax.state.Steps`). Some steps are sampled
(:mod:`hdet.jax.measure`), and if a round ends the rule decides (:mod:`hdet.jax.rule`). Both are inside one
:func:`hdet.jax.numbers.when`, so that all other steps neither compute nor copy anything for them.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from hdet.checks import is_real, must_be, must_count
from hdet.errors import ArgumentError
from hdet.jax import numbers as xp
from hdet.jax.bases import check_base, check_updates, rates_in, with_rates
from hdet.jax.judge import Blocks, Judged, LossHistory, judge, noise_in
from hdet.jax.measure import Measured, Path, Tree, as_exact, copied, difference, dot, largest, norms, sizes_of
from hdet.jax.numbers import Apart, Array, count_of, number, quotient, typed_as, when, where
from hdet.jax.progress import LONGEST, Progress
from hdet.jax.rule import Cases, Decision, Evidence, Snapshots, after_round, peak_factor
from hdet.jax.schedule import Plan, Shape
from hdet.jax.state import AutoState, Memory, Notes, Round, Steps, refuse_other_rule
from hdet.rule.constants import DEFAULT as C
from hdet.rule.enums import Action, Phase, Verdict
from hdet.rule.state import State

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
    rollback: bool = True,
    highest: float | None = None,
) -> optax.GradientTransformationExtraArgs:
    """An optimizer that finds its learning rate while it trains, by the rule of ``hdet.auto`` in torch.

    Call ``update(grads, state, params, value=loss)`` once a step, last in an ``optax.chain``. Without ``value`` an
    explosion is only seen in the gradients, or if weights would become NaN.

    Args:
        base: made with the rate 1, as in ``optax.adam(1.0)``: its updates are multiplied; or by
            ``optax.inject_hyperparams``: its ``learning_rate`` is the guess, and is written.
        total_steps: the length of the run, at most 2**30; None: until :func:`hdet.jax.finish` is called.
        schedule: an optax schedule. Only its shape counts: it is divided by its peak. None: the trapezoid of
            :func:`hdet.auto`.
        rollback: whether two snapshots of weights and base state are kept for rollbacks.
        highest: a rate that is never exceeded; None: no bound.

    Raises:
        ArgumentError: for arguments out of range, and for a base whose updates a rate does not scale.
    """
    if total_steps is not None:
        must_count(1, "leave it out if the length is unknown", high=LONGEST - 1, total_steps=total_steps)
    must_be("True or False", isinstance(rollback, bool), "leave it out for True", rollback=rollback)
    fits = highest is None or (is_real(highest) and float(highest) > 0)
    must_be("a number above 0, or None", fits, "leave it out for no bound", highest=highest)
    check_base(base)
    if schedule is not None and total_steps is None:
        raise ArgumentError("schedule must come with the length of the run, but total_steps is None; give total_steps")
    shape = None if schedule is None else Shape.of(schedule, int(total_steps or 0))
    most = math.inf if highest is None else float(highest)
    search = _Search(optax.with_extra_args_support(base), total_steps, shape, rollback, most)
    return optax.GradientTransformationExtraArgs(search.init, search.update)


class _Search(NamedTuple):
    """What does not change in a run, and the two functions of a gradient transformation."""

    base: optax.GradientTransformationExtraArgs
    total_steps: int | None
    shape: Shape | None
    rollback: bool
    highest: float

    def init(self, params: Tree) -> AutoState:
        """Before the first step."""
        kinds = {str(jnp.asarray(leaf).dtype) for leaf in jax.tree.leaves(params)}
        fits = kinds and all(jnp.issubdtype(kind, jnp.inexact) for kind in kinds)
        cure = "leave others out, for instance by equinox.filter(model, equinox.is_inexact_array)"
        must_be("floating-point arrays, at least one", fits, cure, params=sorted(kinds))
        params = jax.tree.map(jnp.asarray, params)
        inner = self.base.init(params)
        check_updates(self.base, inner, params)
        too_short = self.total_steps is not None and self.total_steps < C.min_steps
        memory = Memory.new(Plan.of(self.total_steps, self.shape), too_short)
        origin, slots = as_exact(params), ((params, inner), (params, inner)) if self.rollback else ()
        total = jax.tree.map(jnp.zeros_like, origin)
        state = AutoState(inner, rates_in(inner), origin, total, slots, Steps.new(), {})
        return copied(state.remembering(**memory._asdict()), params)

    # -- a step -------------------------------------------------------------------------------------------------------

    def update(
        self, updates: Tree, state: AutoState, params: Tree | None = None, *, value: Any = None, **more: Any
    ) -> tuple[Tree, AutoState]:
        """The updates of a step. ``value``: its loss."""
        loss, steps, round = _checked(updates, state, params, value), state.steps, state.part("round")
        returns, rate = round.returns >= 0, self._rate(state)
        made, inner = self._made(updates, state, params, rate, more if value is None else {**more, "value": value})
        made, is_sound = _only_finite(params, made, is_off=steps.withheld | returns)
        inner = typed_as(where(returns, state.inner, inner), state.inner)
        looks, t = state.part("notes").looks(state.part("learned").phase), steps.made
        samples = looks & (jax.lax.rem(t - round.begun, round.stride) == 0) & ~returns
        ends = (t < state.part("plan").total) & (t + 1 >= round.end) & ~returns

        def busy(both: tuple[Tree, AutoState]) -> tuple[Tree, AutoState]:
            """The step is sampled, or its round ends, or both; or it completes a rollback."""
            made, after = both
            after = when(samples, lambda one: _with_sample(one, steps, updates, params), after)
            made, after = when(ends, lambda both: self._ended(Apart(ends), params, *both), (made, after))
            leads = after.part("round").returns >= 0
            return when(leads, lambda both: self._led(params, *both, completes=returns), (made, after))

        after = state._replace(inner=inner, steps=steps.next(round, rate, loss, is_sound))
        return when(samples | ends | returns, busy, (made, after))

    def _made(self, gradients: Tree, state: AutoState, params: Tree, rate: Array, more: dict[str, Any]) -> Any:
        """The base's updates at this rate, at least in float32, and its new state."""
        inner = with_rates(state.inner, tuple(guess * rate for guess in state.guesses))
        made, inner = self.base.update(gradients, inner, params, **more)
        made = jax.tree.map(lambda u, p: u.astype(jnp.result_type(u.dtype, p.dtype, jnp.float32)), made, params)
        return (made if state.guesses else jax.tree.map(lambda u: u * rate.astype(u.real.dtype), made)), inner

    def _rate(self, state: AutoState) -> Array:
        """In units of the guess."""
        found, shape, t = state.part("learned"), self._shape(state), state.steps.made
        value = jnp.where(found.phase == Phase.STOPPED, shape.plain(t), shape.held(t))
        return jnp.minimum(found.factor(t, C, xp), self._most(state)) * value

    def _shape(self, state: AutoState) -> Any:
        return self.shape or state.part("plan")

    def _most(self, state: AutoState) -> Array:
        """The largest factor that the user's bound allows."""
        return self.highest / jnp.max(jnp.stack(state.guesses or (number(1.0),)))

    # -- the end of a round -------------------------------------------------------------------------------------------

    def _ended(self, apart: Apart, params: Tree, made: Tree, state: AutoState) -> tuple[Tree, AutoState]:
        """Measure, decide, act. ``state`` is that after the step, whose updates are ``made``."""
        weights = optax.apply_updates(params, made)
        lengths, way = norms(state.origin), difference(state.origin, weights)
        moves, product = norms(way), dot(state.total, way)
        measured, path = apart(lambda: _measured(state, lengths, moves, product))
        evidence, given = apart(lambda: self._evidence(state, measured))
        rounding = max(float(jnp.finfo(x.dtype).eps) / 2 for x in jax.tree.leaves(weights))
        evidence = evidence._replace(measured=evidence.measured._replace(rounding=rounding))
        decision, history, progress = _decided(apart, state, evidence, apart(lambda: Blocks.of(*given)))
        found, snapshots, notes, keeps, target = apart(lambda: self._found(state, evidence, decision))
        path, steps = apart(lambda: _begun(state, path, evidence, decision, notes.looks(found.phase)))
        slots = tuple(
            when(keep, lambda _: (weights, state.inner), slot) for keep, slot in zip(keeps, state.slots, strict=False)
        )
        round = Round.beginning(steps.made, found.phase, state.part("plan"), returns=target)
        after = state._replace(slots=slots, steps=steps)
        return made, after.remembering(
            learned=found, snapshots=snapshots, history=history, progress=progress, round=round, path=path, notes=notes
        )

    def _evidence(self, state: AutoState, measured: Measured) -> tuple[Evidence, tuple[Array, Array, Array]]:
        """What is known, and what is judged."""
        steps, plan, round, notes, t = state.steps, *map(state.part, ("plan", "round", "notes")), state.steps.made
        phase = state.part("learned").phase
        looks, is_first = notes.looks(phase) & (t < plan.total), phase == Phase.FIRST
        has_losses = notes.has_losses | jnp.any(steps.losses[2] > 0)
        given = steps.judged(round, has_losses, looks & ~is_first)
        says = looks & ~measured.is_broken & (is_first | ~steps.withheld)
        before, now = jax.vmap(self._shape(state).held)(jnp.stack([t - 1, t]))
        evidence = Evidence(
            end=t,
            steps=t - round.begun,
            length=jnp.where(plan.is_endless, C.assumed_length * t, plan.total),
            has_blocks=jnp.any(given[2]),
            peak=plan.peak,
            is_falling=(t > plan.peak) & (now < C.fall_start),
            measured=measured._replace(
                moved=jnp.where(steps.withheld, jnp.inf, jnp.where(looks, measured.moved, 0.0)),
                straightness=jnp.where(says, measured.straightness, 0.0),
                balance=jnp.where(says, measured.balance, 0.0),
                gradients=jnp.where(says, round.sizes, 0.0),
                rates=jnp.where(looks, steps.rates.total, 0.0),
                path_steps=jnp.where(looks, t - state.part("path").begun, 0),
            ),
            log_guess=jnp.log(jnp.where(before > 0, before, 1.0)),
            estimated_log_factor=jnp.log(jnp.where(says & (before > 0), measured.estimated_rate / before, 0.0)),
            has_losses=has_losses,
            falls_steadily=has_losses & jnp.all(given[2]) & jnp.all(jnp.diff(given[0]) < 0),
            looks=looks,
            highest=jnp.log(self._most(state)),
        )
        return evidence, given

    def _found(
        self, state: AutoState, evidence: Evidence, decision: Decision
    ) -> tuple[State, Snapshots, Notes, tuple[Array, ...], Array]:
        """What is remembered of a decision, which of the slots are for a new snapshot, and where updates lead."""
        before, after, notes, action = state.part("learned"), decision.state, state.part("notes"), decision.action
        is_raised = (peak_factor(after) > peak_factor(before)) | (after.phase != before.phase)
        notes = notes._replace(
            rounds=notes.rounds + 1,
            has_losses=evidence.has_losses,
            is_falling=evidence.is_falling,
            has_peaked=notes.has_peaked | (evidence.end >= evidence.peak),
            is_bound=after.is_bound(evidence.highest, xp),
            quiet=jnp.where(is_raised, 0, notes.quiet + 1),
            rolled_back=notes.rolled_back + (action == Action.ROLL_BACK),
            event=decision.event,
            why=jnp.where(decision.why > 0, decision.why, notes.why),
        )
        snapshots = decision.snapshots if self.rollback else Snapshots.none()
        target = jnp.where(state.steps.withheld, _AS_IT_IS, -1)
        target = jnp.where(action == Action.RESTART, _ORIGIN, target)
        target = jnp.where(action == Action.ROLL_BACK, decision.slot, target)  # never without snapshots
        keeps = tuple((action == Action.KEEP) & (decision.slot == slot) for slot in (0, 1))
        return after.bounded(evidence.highest, xp), snapshots, notes, keeps, target

    def _led(self, params: Tree, made: Tree, state: AutoState, *, completes: Array) -> tuple[Tree, AutoState]:
        """Updates that lead elsewhere, and the base's state there.

        ``completes``: this is no step of training: its update removes what rounding has left of the one before.
        """
        target, kinds = state.part("round").returns, (as_exact(params), state.inner)
        places = [*state.slots, (state.origin, None), (optax.apply_updates(params, made), None)]
        ways = [lambda place=place: typed_as(self._place(place, params), kinds) for place in places]
        weights, inner = jax.lax.switch(target - (_ORIGIN - len(state.slots)), ways)
        out = jax.tree.map(lambda x, u: x.astype(u.dtype), difference(weights, params), made)
        rest = difference(weights, optax.apply_updates(params, out))
        is_done = completes | (dot(rest, rest) <= _RESIDUE**2 * dot(weights, weights))
        rest, phase, plan = jnp.where(is_done, -1, target), state.part("learned").phase, state.part("plan")
        round = Round.beginning(state.steps.made, phase, plan, returns=rest)
        after = state.remembering(round=round, path=state.part("path")._replace(begun=state.steps.made))
        return out, after._replace(inner=inner, steps=state.steps.with_new_round(True))

    def _place(self, place: tuple[Tree, Tree | None], params: Tree) -> tuple[Tree, Tree]:
        """Weights at least in float32, and the base's state there: a new one if there is none, since it may be NaN."""
        weights, inner = place
        if inner is None:
            inner = self.base.init(jax.tree.map(lambda x, p: x.astype(p.dtype), weights, params))
        return as_exact(weights), inner


def _with_sample(state: AutoState, before: Steps, gradients: Tree, params: Tree) -> AutoState:
    """The state with the gradients of a step that was just made."""
    gradients = jax.tree.map(lambda g: jnp.where(before.withheld, jnp.nan, g), gradients)
    round, trees, rate = state.part("round"), (state.origin, state.total), state.steps.rate
    (origin, total), path = state.part("path").sampled(trees, gradients, params, rate, before.rates.total, before.made)
    sizes = round.sizes.at[quotient(before.made - round.begun, round.stride)].set(largest(gradients))
    return state.remembering(path=path, round=round._replace(sizes=sizes))._replace(origin=origin, total=total)


def _measured(state: AutoState, *distance: Array) -> tuple[Measured, Path]:
    is_first = state.part("learned").phase == Phase.FIRST
    return state.part("path").measured(sizes_of(state.origin), *distance, state.steps.rates.total, is_first)


def _begun(
    state: AutoState, path: Path, evidence: Evidence, decision: Decision, still_looks: Array
) -> tuple[Path, Steps]:
    """The path and the steps as the next round begins."""
    steps, lost = state.steps, evidence.measured.is_broken | state.steps.withheld
    is_first = state.part("learned").phase == Phase.FIRST
    resets_path = decision.resets_path | (evidence.looks & lost & ~is_first) | ~still_looks
    resets_path = resets_path | (steps.made >= state.part("plan").total)
    begun = jnp.where(resets_path, steps.made, path.begun)
    return path._replace(begun=begun), steps.with_new_round(resets_path)


def _decided(
    apart: Apart, state: AutoState, evidence: Evidence, blocks: Blocks
) -> tuple[Decision, LossHistory, Progress]:
    """What follows from a round, and the losses so far as they are remembered after it."""
    has_losses, snapshots, before = evidence.has_losses, state.part("snapshots"), state.part("progress")
    learned = state.part("learned")
    phase = learned.phase

    def known() -> LossHistory:
        begins = has_losses & ~state.part("notes").has_losses  # gradients were judged until now
        return where(begins, LossHistory.new(), state.part("history"))

    def verdict() -> Judged:
        doubted = has_losses & evidence.measured.has_estimate & (evidence.estimated_log_factor == -jnp.inf)
        return judge(history, noise, blocks, evidence.is_falling, doubted)

    def fresh() -> tuple[Progress, Blocks]:
        own = before._replace(losses=(), steps=())
        is_harder = (judged.verdict == Verdict.FALSE_ALARM) & jnp.isfinite(evidence.measured.moved)
        return where(is_harder & (phase == Phase.SEARCHING), own.cleared(), own), blocks.only_if(has_losses)

    def cases_of() -> tuple[State, Cases, Array, Array]:
        cases = Cases.of(learned, snapshots, evidence, judged, outlook)
        adds = cases.is_judged & ~cases.is_excused & (judged.verdict == Verdict.FINE) & (blocks.count > 0)
        added, goes_back = jnp.where(adds, count_of(history.latest), 0), cases.is_excused | cases.is_back
        return learned.bounded(evidence.highest, xp), cases, goes_back, added

    history = apart(known)
    ordered = jnp.sort(history.second_differences)
    noise = apart(lambda: noise_in(ordered))
    judged = apart(verdict)
    progress, losses = apart(fresh)
    progress = progress._replace(losses=before.losses, steps=before.steps)
    progress, outlook = progress.after(apart, losses, evidence.end, phase)
    evidence = evidence._replace(is_below=outlook.is_below, has_gained=outlook.has_gained)
    found, cases, goes_back, added = apart(cases_of)
    decision, step = after_round(apart, found, snapshots, evidence, cases), snapshots.steps
    progress = when(goes_back, lambda one: one.rolled_back(before, step[decision.slot]), progress)
    after = when(cases.is_judged, lambda one: where(cases.is_excused, one, one.after(judged, blocks)), history)
    after = when(cases.is_dead, lambda one: one.suspecting(outlook.latest, outlook.first), after)
    after = when(cases.is_astray, lambda one: one.suspecting(jnp.nan, jnp.nan), after)
    after = when(cases.is_slowed, lambda one: one.cleared(), after)
    return decision, after._replace(second_differences=history.longer(added)), progress


def _only_finite(params: Tree, made: Tree, is_off: Array) -> tuple[Tree, Array]:
    """The updates without those that would make a weight NaN or infinite, or none at all; whether all were fine."""
    fits = jax.tree.map(lambda p, u: jnp.isfinite((p + u).astype(p.dtype)), params, made)
    kept = jax.tree.map(lambda u, fit: jnp.where(fit & ~is_off, u, jnp.zeros_like(u)), made, fits)
    all_fit = jnp.all(jnp.stack([jnp.all(fit) for fit in jax.tree.leaves(fits)]))
    return kept, all_fit | is_off


def _checked(gradients: Tree, state: Any, params: Tree | None, value: Any) -> Array | None:
    """The loss. Raises for what cannot be a step of this state."""
    cure = "call update(grads, state, params, value=loss)"
    must_be("given to update(), since the search measures how far they move", params is not None, cure, params=params)
    must_be("that of hdet.jax.auto", isinstance(state, AutoState), "make it by init(params)", state=state)
    refuse_other_rule(state)
    for name, tree in (("params", params), ("grads", gradients)):
        if _outline(tree) != _outline(state.origin):
            raise ArgumentError(
                f"{name} must have the arrays of the params that the state was made for, but got another tree or other "
                "shapes; make the state by init(params), with all arrays that are trained"
            )
    fits = value is None or (jnp.ndim(value) == 0 and not jnp.iscomplexobj(value))
    must_be("one real number, the loss", fits, "reduce it first, for instance loss.mean()", value=value)
    return None if value is None else jnp.asarray(value, jnp.result_type(float))


def _outline(tree: Tree) -> Any:
    return jax.tree.structure(tree), [jnp.shape(leaf) for leaf in jax.tree.leaves(tree)]
