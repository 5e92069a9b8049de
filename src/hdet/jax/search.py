"""``hdet.jax.auto``: an optax optimizer whose learning rate is found in the run. The file to read first.

Every step scales the base's update and counts. Some steps are sampled (:mod:`hdet.jax.measure`), and where a round
ends the rule decides (:mod:`hdet.jax.rule`); both happen in one ``lax.cond``, whose other branch is empty.
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
from hdet.jax.bases import check_base, check_state, rates_in, with_rates
from hdet.jax.judge import Blocks, LossHistory, judge
from hdet.jax.measure import Path, Tree, as_exact, copied, dot, largest, less, moved_by
from hdet.jax.numbers import Array, Sum, absent, choose, number
from hdet.jax.progress import ENDS, LONGEST, Progress
from hdet.jax.rule import Decision, Evidence, State, after_round, code_of
from hdet.jax.schedule import Plan, Shape
from hdet.rollback.judge import BLOCKS, Verdict
from hdet.rollback.policy import Action
from hdet.search.constants import DEFAULT as C
from hdet.search.rule import Phase

_RESIDUE = 2.0**-17
"""What may be left of the way back, over the weights: so much is left in float32 if these had grown by a hundred."""


class Round(NamedTuple):
    """The round so far."""

    begun: Array
    """Steps that had been made when it began."""
    losses: Sum
    """Of the finite losses of each block ..."""
    finite: Array
    """... how many these were ..."""
    given: Array
    """... and whether there was any loss."""
    sizes: Array
    """The largest number of each gradient that was sampled; -1: none yet."""
    withheld: Array
    """Whether an update was withheld since it would have made weights NaN or infinite: nothing moves until the end."""

    @classmethod
    def beginning(cls, begun: Array) -> Round:
        zero = jnp.zeros(BLOCKS, jnp.int32)
        return cls(begun, Sum.zero(BLOCKS), zero, zero > 0, jnp.full_like(absent(BLOCKS), -1.0), jnp.zeros((), bool))


class Notes(NamedTuple):
    """What is remembered from round to round beside the rule's state."""

    rate: Array
    """Of the last step, in units of the guess."""
    rounds: Array
    has_losses: Array
    is_falling: Array
    has_peaked: Array
    is_bound: Array
    quiet: Array
    rolled_back: Array
    event: Array
    """What the last round has come to ..."""
    why: Array
    """... and why the search has stopped, if it has; see :func:`hdet.jax.rule.code_of`."""
    returns: Array
    """The slot from which the next call puts right what rounding has left of a roll back; -1: none."""

    @classmethod
    def new(cls, why: int) -> Notes:
        no, zero = jnp.zeros((), bool), jnp.zeros((), jnp.int32)
        return cls(number(0.0), zero, no, no, no, no, zero, zero, zero, jnp.asarray(why, jnp.int32), zero - 1)


class AutoState(NamedTuple):
    """The state of :func:`auto`: arrays, which can be saved, sharded and donated."""

    step: Array
    """Steps made."""
    inner: Tree
    """The base's own state."""
    guesses: tuple[Array, ...]
    """The rates that the base was made with, if they can be read."""
    found: State
    progress: Progress
    plan: Plan
    round: Round
    path: Path
    slots: tuple[tuple[Tree, Tree], ...]
    """Snapshots of weights and inner state: two, or none with ``rollback=False``."""
    notes: Notes


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
        schedule: an optax schedule. Only its shape counts: it is divided by its peak. None: a OneCycle.
        pct_start: the part of the run at which a OneCycle falls.
        rollback: whether two snapshots of weights and base state are kept for roll backs.
        highest: a rate that is never exceeded; None: no bound.

    Raises:
        ArgumentError: for arguments out of range, and for a base whose updates a rate does not scale.
    """
    length = total_steps is None or (is_int(total_steps) and 1 <= total_steps < LONGEST)
    must_be(
        f"an integer from 1 to {LONGEST - 1}, or None", length, "leave it out if nobody knows", total_steps=total_steps
    )
    must_be("a number from 0 to 1", is_real(pct_start) and 0 <= pct_start <= 1, "for instance 0.3", pct_start=pct_start)
    must_be("True or False", isinstance(rollback, bool), "leave it out for True", rollback=rollback)
    bound = highest is None or (is_real(highest) and float(highest) > 0)
    must_be("a number above 0, or None", bound, "leave it out for no bound", highest=highest)
    check_base(base)
    if schedule is not None and total_steps is None:
        raise ArgumentError("schedule must come with the length of the run, but total_steps is None; give total_steps")
    shape = None if schedule is None else Shape.of(schedule, int(total_steps or 0))
    search = _Search(optax.with_extra_args_support(base), total_steps, shape, float(pct_start), rollback, highest)
    return optax.GradientTransformationExtraArgs(search.init, search.update)


class _Search:
    """What does not change in a run, and the two functions of a gradient transformation."""

    def __init__(
        self,
        base: optax.GradientTransformationExtraArgs,
        total_steps: int | None,
        shape: Shape | None,
        pct_start: float,
        rollback: bool,
        highest: float | None,
    ) -> None:
        self.base, self.total_steps, self.shape, self.pct_start = base, total_steps, shape, pct_start
        self.rollback, self.highest = rollback, math.inf if highest is None else float(highest)

    # -- the state ----------------------------------------------------------------------------------------------------

    def init(self, params: Tree) -> AutoState:
        """Before the first step."""
        leaves = jax.tree.leaves(params)
        if not leaves or not all(jnp.issubdtype(jnp.asarray(leaf).dtype, jnp.inexact) for leaf in leaves):
            kinds = sorted({str(jnp.asarray(leaf).dtype) for leaf in leaves})
            raise ArgumentError(
                f"params must be floating-point arrays, at least one, but got {kinds}; leave others out, for instance "
                "by equinox.filter(model, equinox.is_inexact_array)"
            )
        params = jax.tree.map(jnp.asarray, params)
        inner = self.base.init(params)
        check_state(inner)
        too_short = self.total_steps is not None and self.total_steps < C.min_steps
        slots = ((params, inner), (params, inner)) if self.rollback else ()
        zero = jnp.zeros((), jnp.int32)
        state = AutoState(
            step=zero,
            inner=inner,
            guesses=rates_in(inner),
            found=State.new(Phase.STOPPED if too_short else Phase.FIRST),
            progress=Progress.new(),
            plan=Plan.of(self.total_steps, self.pct_start, None if self.shape is None else self.shape.step),
            round=Round.beginning(zero),
            path=Path.new(params),
            slots=slots,
            notes=Notes.new(code_of(Reason.TOO_SHORT) if too_short else 0),
        )
        return copied(state)

    # -- a step -------------------------------------------------------------------------------------------------------

    def update(
        self, updates: Tree, state: AutoState, params: Tree | None = None, *, value: Any = None, **more: Any
    ) -> tuple[Tree, AutoState]:
        """The updates of a step. ``value``: its loss."""
        loss = _checked(updates, state, params, value)
        returns, step = state.notes.returns >= 0, state.step + 1
        length, spot = _round_length(state), state.step - state.round.begun
        rate = self._rate(state)
        made, inner = self._made(updates, state, params, rate, more if value is None else {**more, "value": value})
        made, is_sound = _only_finite(params, made, is_off=state.round.withheld | returns)
        now = state._replace(
            step=step,
            inner=inner,
            path=state.path.passed(rate, _looks(state)),
            notes=state.notes._replace(rate=rate),
            round=_with_loss(state.round, loss, spot, length)._replace(withheld=state.round.withheld | ~is_sound),
        )
        stride = jnp.maximum((length + C.max_samples - 1) // C.max_samples, 1)
        samples, ends = _looks(state) & (spot % stride == 0), (step <= state.plan.total) & (spot + 1 >= length)

        def busy() -> tuple[Tree, AutoState]:
            """The step is sampled, or its round ends, or both."""
            path, sizes = jax.lax.cond(
                samples,
                lambda: _sampled(state, updates, params, rate, spot // stride),
                lambda: (state.path, state.round.sizes),
            )
            path = path._replace(rates=now.path.rates, stretch=now.path.stretch, typical=now.path.typical)
            seen = now._replace(path=path, round=now.round._replace(sizes=sizes))
            done: tuple[Tree, AutoState] = jax.lax.cond(
                ends, lambda: _typed_as(self._ended(seen, params, made), (made, now)), lambda: (made, seen)
            )
            return done

        now = _typed_as(now, state)
        branches = (lambda: (made, now), busy, lambda: _typed_as(self._returned(state, params, made), (made, now)))
        found: tuple[Tree, AutoState] = jax.lax.switch(jnp.where(returns, 2, samples | ends), branches)
        return found

    def _made(self, gradients: Tree, state: AutoState, params: Tree, rate: Array, more: dict[str, Any]) -> Any:
        """The base's updates at this rate, at least in float32, and its new state."""
        inner = with_rates(state.inner, tuple(guess * rate for guess in state.guesses))
        made, inner = self.base.update(gradients, inner, params, **more)
        made = jax.tree.map(lambda u, p: u.astype(jnp.promote_types(u.dtype, _exact(p.dtype))), made, params)
        return (made if state.guesses else jax.tree.map(lambda u: u * rate.astype(u.real.dtype), made)), inner

    def _rate(self, state: AutoState) -> Array:
        """In units of the guess."""
        shape: Any = self.shape or state.plan
        t = state.step
        value = jnp.where(state.found.phase == Phase.STOPPED, shape.plain(t), shape.held(t))
        return jnp.minimum(state.found.factor(t), self._most(state)) * value

    def _most(self, state: AutoState) -> Array:
        """The largest factor that the user's bound allows."""
        guesses = state.guesses or (number(1.0),)
        return self.highest / jnp.max(jnp.stack(guesses))

    def _returned(self, state: AutoState, params: Tree, made: Tree) -> tuple[Tree, AutoState]:
        """No step of training: it only puts right what rounding has left of a roll back."""
        targets = (*(weights for weights, _ in state.slots), state.path.origin)
        which = jnp.minimum(state.notes.returns, len(targets) - 1)
        out = jax.lax.switch(which, [lambda x=x: _way_to(x, params, made) for x in targets])
        step, none = state.step + 1, jnp.full_like(state.notes.returns, -1)
        return out, state._replace(step=step, round=Round.beginning(step), notes=state.notes._replace(returns=none))

    # -- the end of a round -------------------------------------------------------------------------------------------

    def _ended(self, state: AutoState, params: Tree, made: Tree) -> tuple[Tree, AutoState]:
        """Measure, decide, act. ``state`` is that after the step."""
        weights, found = moved_by(params, made), state.found
        looks, is_first = _looks(state) & (state.step < state.plan.total), found.phase == Phase.FIRST
        measured = state.path.measured(weights, is_first)
        lost = looks & ~is_first & (measured.lost | state.round.withheld)
        has_losses = state.notes.has_losses | jnp.any(state.round.given)
        begins = has_losses & ~state.notes.has_losses  # gradients were judged until now
        blocks = choose(has_losses, _loss_blocks(state), _size_blocks(state, looks & ~is_first))
        shape: Any = self.shape or state.plan
        before, highest = shape.held(state.step - 1), jnp.log(self._most(state))
        gradient = jnp.max(jnp.where(state.round.sizes == -1, 0.0, state.round.sizes))
        evidence = Evidence(
            end=state.step,
            steps=state.step - state.round.begun,
            length=jnp.where(state.plan.is_endless, C.assumed_length * state.step, state.plan.total),
            is_told=jnp.any(blocks.given),
            peak=state.plan.peak,
            is_falling=(state.step > state.plan.peak) & (shape.held(state.step) < C.fall_start),
            moved=jnp.where(state.round.withheld, jnp.inf, jnp.where(looks, measured.moved, 0.0)),
            estimated_level=jnp.log(jnp.where(looks & ~lost & (before > 0), measured.estimated_rate / before, 0.0)),
            straightness=jnp.where(looks & ~lost, measured.straightness, 0.0),
            gradient=jnp.where(looks & ~lost, gradient, 0.0),
            rates=jnp.where(looks, state.path.rates.total, 0.0),
            stretch=jnp.where(looks, state.path.stretch, 0),
            has_losses=has_losses,
            rounding=max(float(jnp.finfo(x.dtype).eps) / 2 for x in jax.tree.leaves(params)),
            highest=highest,
        )
        doubted = has_losses & evidence.asks & (evidence.estimated_level == -jnp.inf)
        judged = judge(choose(begins, LossHistory.new(), found.history), blocks, evidence.is_falling, doubted)
        is_harder = (found.phase == Phase.SEARCHING) & (judged.verdict == Verdict.FALSE_ALARM)
        fresh = choose(is_harder, Progress.new(), state.progress)  # earlier losses are no measure any more
        progress, outlook = fresh.after(blocks._replace(given=blocks.given & has_losses), state.step, is_first)
        decision = after_round(found.bounded(highest), evidence, judged, outlook)
        decision = decision._replace(state=decision.state.bounded(highest))
        goes_back = decision.action == Action.ROLL_BACK
        progress = choose(goes_back, state.progress.rolled_back(found.kept[decision.slot]), progress)
        notes = _noted(state, decision, evidence, highest)
        if not self.rollback:
            decision = decision._replace(state=decision.state._replace(kept=jnp.full_like(found.kept, -1)))
        out, inner, slots, returns = self._act(state, decision, params, made, weights)
        after = state._replace(
            inner=inner, found=decision.state, progress=progress, slots=slots, notes=notes._replace(returns=returns)
        )
        anew = decision.anew | lost | ~_looks(after) | (state.step >= state.plan.total)
        typical = jnp.where(looks, measured.typical, state.path.typical)
        return out, after._replace(path=state.path.begun(anew, typical), round=Round.beginning(state.step))

    def _act(self, state: AutoState, decision: Decision, params: Tree, made: Tree, weights: Tree) -> Any:
        """Do with the weights what was decided: updates, base state, snapshots, what the next call must put right."""
        slots, start = state.slots, state.path.origin

        def nothing() -> Any:
            return made, state.inner, slots, -1

        def begin_anew() -> Any:
            """The base's state may be NaN, and there is none to go back to."""
            return made, _typed_as(self.base.init(weights), state.inner), slots, -1

        def restart() -> Any:
            first = jax.tree.map(lambda x, p: x.astype(p.dtype), start, params)
            out, rest = _way_back(start, params, made)
            return out, _typed_as(self.base.init(first), state.inner), slots, jnp.where(rest, len(slots), -1)

        def keep(slot: int) -> Any:
            new = (weights, state.inner)
            return made, state.inner, tuple(new if i == slot else old for i, old in enumerate(slots)), -1

        def roll_back(slot: int) -> Any:
            out, rest = _way_back(slots[slot][0], params, made)
            return out, slots[slot][1], slots, jnp.where(rest, slot, -1)

        action, branches = decision.action, [nothing, begin_anew, restart]
        kind = jnp.where(action == Action.RESTART, 2, state.round.withheld)
        if slots:
            branches += [lambda: keep(0), lambda: keep(1), lambda: roll_back(0), lambda: roll_back(1)]
            kind = jnp.where(action == Action.KEEP, 3 + decision.slot, kind)
            kind = jnp.where(action == Action.ROLL_BACK, 5 + decision.slot, kind)
        typed = [
            lambda branch=branch: _typed_as(branch(), (made, state.inner, slots, state.notes.returns))
            for branch in branches
        ]
        return jax.lax.switch(kind, typed)


# -- parts of a step --------------------------------------------------------------------------------------------------


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
    made_for = _outline(state.path.origin)
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


def _exact(dtype: Any) -> Any:
    return jnp.promote_types(dtype, jnp.float32)


def _typed_as(tree: Tree, like: Tree) -> Tree:
    """Each array in the type that it has had: so nothing is traced twice."""
    return jax.tree.map(lambda new, old: jnp.asarray(new, jnp.asarray(old).dtype), tree, like)


def _only_finite(params: Tree, made: Tree, is_off: Array) -> tuple[Tree, Array]:
    """The updates without those that would make a weight NaN or infinite, or none at all; whether all were fine."""
    fits = jax.tree.map(lambda p, u: jnp.isfinite((p + u).astype(p.dtype)), params, made)
    kept = jax.tree.map(lambda u, fit: jnp.where(fit & ~is_off, u, jnp.zeros_like(u)), made, fits)
    all_fit = jnp.all(jnp.stack([jnp.all(fit) for fit in jax.tree.leaves(fits)]))
    return kept, all_fit | is_off


def _looks(state: AutoState) -> Array:
    """Steps are of interest until the schedule falls."""
    phase = state.found.phase
    return (phase == Phase.FIRST) | ((phase == Phase.SEARCHING) & ~state.notes.is_falling)


def _round_length(state: AutoState) -> Array:
    """Of the round that has begun. The last two steps of a run end rounds too, and each until one was measured."""
    begun, total = state.round.begun, state.plan.total
    ends = jnp.asarray(ENDS, jnp.int32)
    full = ends[jnp.minimum(jnp.searchsorted(ends, begun, side="right"), len(ENDS) - 1)]
    end = jnp.minimum(full, jnp.where(begun < total - 1, total - 1, total))
    return jnp.where(state.found.phase == Phase.FIRST, 1, jnp.maximum(end - begun, 1))


def _with_loss(round: Round, loss: Array | None, spot: Array, length: Array) -> Round:
    """A loss is counted in its block. Of weights that would be NaN by now, it would be NaN."""
    if loss is None:
        return round
    count = jnp.minimum(length, BLOCKS)
    block = jnp.arange(BLOCKS) == jnp.minimum(((spot + 1) * count - 1) // length, count - 1)
    is_finite = block & jnp.isfinite(loss) & ~round.withheld
    losses = round.losses.plus(jnp.where(is_finite, loss, 0.0))
    return round._replace(losses=losses, finite=round.finite + is_finite, given=round.given | block)


def _sampled(state: AutoState, gradients: Tree, params: Tree, rate: Array, spot: Array) -> tuple[Path, Array]:
    """The path with the gradients of the step to come, and the sizes; ``spot``: which of the round's samples it is."""
    is_void = state.round.withheld
    size = jnp.where(is_void, jnp.nan, largest(gradients))
    seen = state.path.sampled(gradients, params, rate, is_void), state.round.sizes.at[spot].set(size)
    found: tuple[Path, Array] = _typed_as(seen, (state.path, state.round.sizes))
    return found


def _loss_blocks(state: AutoState) -> Blocks:
    round, length = state.round, state.step - state.round.begun
    count, k = jnp.minimum(length, BLOCKS), jnp.arange(BLOCKS)
    steps = (k + 1) * length // count - k * length // count
    return Blocks(round.losses.total / round.finite, steps.astype(jnp.result_type(float)), round.given)


def _size_blocks(state: AutoState, is_searching: Array) -> Blocks:
    """Where no loss is ever given, the logarithms of the gradients' sizes."""
    sizes = state.round.sizes
    mean = jnp.where((sizes > 0) & jnp.isfinite(sizes), jnp.log(sizes), jnp.nan)
    return Blocks(mean, jnp.ones_like(sizes), is_searching & (sizes != -1) & (sizes != 0))


def _noted(state: AutoState, decision: Decision, evidence: Evidence, highest: Array) -> Notes:
    notes, before, after = state.notes, state.found, decision.state
    is_raised = (after.peak_factor > before.peak_factor) | (after.phase != before.phase)
    is_bound = (highest < jnp.inf) & (jnp.minimum(after.level, after.ceiling) >= highest - 1e-6)
    return notes._replace(
        rounds=notes.rounds + 1,
        has_losses=evidence.has_losses,
        is_falling=evidence.is_falling,
        has_peaked=notes.has_peaked | (state.step >= state.plan.peak),
        is_bound=is_bound,
        quiet=jnp.where(is_raised, 0, notes.quiet + 1),
        rolled_back=notes.rolled_back + (decision.action == Action.ROLL_BACK),
        event=decision.event,
        why=jnp.where(decision.why > 0, decision.why, notes.why),
    )


def _way_to(target: Tree, params: Tree, made: Tree) -> Tree:
    """The updates that lead there."""
    return jax.tree.map(lambda x, u: x.astype(u.dtype), less(target, params), made)


def _way_back(target: Tree, params: Tree, made: Tree) -> tuple[Tree, Array]:
    """The updates that lead there, and whether rounding leaves too much of the way: weights had grown far larger."""
    out = _way_to(target, params, made)
    rest = less(target, moved_by(params, out))
    return out, ~(dot(rest, rest) <= _RESIDUE**2 * dot(as_exact(target), as_exact(target)))
