"""Replica ensembles (HDET) in jax: replicas are the first axis of every array, on one device or over a mesh.

Each replica trains at its own values of some hyperparameters, the *knobs*. At the end of a round the weights of all
replicas are replaced by their mean, a controller moves the knobs' common values, and the replicas change places.
:class:`Ensemble` holds the settings; everything that changes is in a :class:`State`, a NamedTuple of arrays. All
methods are pure and work under ``jit`` and ``lax.scan``. The state counts the rounds: one program serves all of them.

>>> ensemble = Ensemble([Knob("lr", 0.1, spread=0.5)], replicas=4, sync_every=5, total_steps=20)
>>> def train_step(w, knobs, x):  # one replica, which receives its own value of each knob
...     loss, gradient = jax.value_and_grad(lambda w: jnp.mean((w - x) ** 2))(w)
...     return w - knobs["lr"] * gradient, loss
>>> @jax.jit
... def step(w, state, x):
...     w, losses = jax.vmap(train_step)(w, ensemble.values(state), x)
...     w, _, state = ensemble.step(w, (), state, losses)  # in place of (): the optimizer's state
...     return w, state
>>> w, state = ensemble.copies(jnp.zeros(3)), ensemble.init()
>>> for _ in range(20):
...     w, state = step(w, state, jnp.ones((4, 8, 1)))  # a batch for each replica
>>> w.shape, int(state.round), bool(ensemble.bases(state)["lr"] > 0.1)  # higher rates did better
((4, 3), 5, True)

Here each replica has gradients of its own. In the paper's body replicas apply the mean of their gradients,
``ensemble.shared(gradients)``; then only knobs that act in the update can be learned (docs/ensemble.md). Over a mesh,
call the same methods inside ``jax.shard_map`` with ``axis="replica"``, and give it ``ensemble.specs("replica")`` for
the state (docs/jax.md).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec

from hdet.checks import is_int, is_one_of, is_real, must_be
from hdet.ensemble.controller import AsPrinted, Corrected
from hdet.ensemble.design import Rounds, assign, default_length, levels
from hdet.ensemble.knob import FACTOR_LIMITS, LEAST_MOVE, KnobSpec
from hdet.ensemble.normalised import Normalised
from hdet.errors import ArgumentError
from hdet.jax import ensemble_rules as rules
from hdet.jax.numbers import where
from hdet.rule.constants import DIV_FACTOR, FINAL_DIV_FACTOR

__all__ = ["AsPrinted", "Corrected", "Ensemble", "Knob", "Normalised", "State"]

Tree = Any
"""A pytree of arrays whose first axis is the replicas'."""
Axis = str | None
Probe = Callable[[Tree], Array] | None
_ANYWHERE = (-math.inf, math.inf)
_TABLED = 1024
"""Where replicas stand is computed for this number of rounds, before compiling. Later rounds repeat them."""
_PRINTED_RATIO = DIV_FACTOR / FINAL_DIV_FACTOR
"""f_div / f_final in the decay of AsPrinted: the defaults of torch's OneCycleLR. Optax's schedules have neither."""


@dataclass(frozen=True)
class Knob:
    """One hyperparameter that the replicas explore.

    Args:
        name: the key under which your code receives it.
        value: its first common value; or a schedule, a function of the step as optax has them. Then a factor on the
            schedule is learned.
        spread: how far the outermost replicas are from the common value, on the scale.
        scale: "relative", "linear", "log" or "logit", as in docs/ensemble.md; a schedule takes the first and third.
        bounds: the range that no replica may leave; not for schedules.
    """

    name: str
    value: float | Callable[[Any], Any]
    spread: float = 1 / 9
    scale: Literal["relative", "linear", "log", "logit"] = "relative"
    bounds: tuple[float, float] = _ANYWHERE

    def __post_init__(self) -> None:
        free = self.bounds == _ANYWHERE and self.scale in ("relative", "log")
        rule = 'a number or, without bounds and with scale="relative" or "log", a schedule'
        must_be(rule, free if callable(self.value) else is_real(self.value), "for instance 0.1", value=self.value)
        self.start()  # refuses a value that the scale cannot hold

    @property
    def spec(self) -> KnobSpec:
        """The same knob in torch's package, which checks it."""
        return KnobSpec(self.name, self.scale, self.spread, self.bounds, callable(self.value))

    def start(self) -> float:
        """What is learned before the first round: the common value, or the factor on the schedule."""
        return self.spec.start(math.nan if callable(self.value) else float(self.value))

    def away(self, base: Array, d: Array) -> Array:
        """The value at distance ``d`` from ``base`` on the knob's scale."""
        if self.scale == "relative":
            return base * (1.0 + d)
        if self.scale == "linear":
            return base + d
        if self.scale == "log":
            return base * jnp.exp(d)
        return jax.nn.sigmoid(jnp.log(base) - jnp.log1p(-base) + d)

    def moved(self, learned: Array, move: Array) -> Array:
        """What is learned after a round. A value stays one spread inside its bounds."""
        if callable(self.value):
            return jnp.clip(self.away(learned, move), *FACTOR_LIMITS)
        move = jnp.maximum(move, LEAST_MOVE) if self.scale == "relative" else move  # a value never changes its sign
        return jnp.clip(self.away(learned, move), *self.spec.room)


class State(NamedTuple):
    """All that changes in a run, beside the weights. N replicas, G knobs."""

    step: Array
    """The number of steps made."""
    round: Array
    """k, the number of rounds that have ended. It decides where the replicas stand."""
    observed: Array
    """For how many steps of this round losses were given."""
    sums: Array
    """The sum of those losses per replica: (N,). A mesh splits this field only."""
    learned: Array
    """The common value of each knob, or the factor on its schedule: (G,). If rates have a decay of their own, the rate
    of the last round."""
    memory: Any
    """The controller's memory."""
    live: Array
    """Which replicas were finite when the last round ended: (N,). All False: training has diverged."""


@dataclass(frozen=True)
class Ensemble:
    """The settings of a replica ensemble.

    Args:
        knobs: what is explored; their order decides the permutations, as in torch's package.
        replicas: N.
        sync_every: T, steps in a round. None: a fiftieth of the run, at most 1000.
        total_steps: S; rounds end at every multiple of T, at S - 1 and at S. None: unknown.
        controller: moves the common values: ``Corrected()``, ``Normalised()`` or ``AsPrinted()``; None: they stay.
        start: S_warm; the controller begins at the first end of a round from this step on.
        decay: "schedule": a factor on the schedule is learned; "exponential": from S_warm on, a rate decays to its
            schedule's last value by a factor a round, as in the paper with gamma corrected. ``AsPrinted()`` has a decay
            of its own.
        seed: of the permutations.
        optimizer_state: "average" or "keep" at the end of a round; or the function that makes a new one of a replica's
            weights, such as ``optimizer.init``, which is torch's "reset". None: "average", as in torch, where replicas
            of equal gradients keep theirs because they are equal too.
    """

    knobs: Sequence[Knob]
    replicas: int
    sync_every: int | None = None
    total_steps: int | None = None
    controller: Corrected | Normalised | AsPrinted | None = field(default_factory=Corrected)
    start: int = 0
    decay: Literal["schedule", "exponential"] = "schedule"
    seed: int = 0
    optimizer_state: Literal["average", "keep"] | Callable[[Tree], Tree] | None = None

    def __post_init__(self) -> None:
        steps, every, start = self.total_steps, self.sync_every, self.start
        names = [knob.name for knob in self.knobs]
        named = 0 < len(names) == len({*names}) and (all(self._scheduled) or not isinstance(self.controller, AsPrinted))
        whole = not self._decays if steps is None else is_int(steps) and steps >= 1
        rounds = steps is not None if every is None else is_int(every) and every >= 1
        policy = callable(self.optimizer_state) or is_one_of(self.optimizer_state, (None, "average", "keep"))
        for name, rule, fits, cure in [
            ("knobs", "at least one, with different names, and schedules for AsPrinted()", named, "change the knobs"),
            ("replicas", "an integer, at least 1", is_int(self.replicas) and self.replicas >= 1, "4 to 8 are usual"),
            ("decay", '"schedule" or "exponential"', self.decay in ("schedule", "exponential"), "leave it out"),
            ("total_steps", "at least 1, or None if no rate decays to the run's end", whole, "give a number"),
            ("sync_every", "at least 1, or None if total_steps is known", rounds, "for instance 100"),
            ("optimizer_state", '"average", "keep" or a function', policy, "to reset it, give optimizer.init"),
            ("start", "at least 0 and below total_steps", 0 <= start < (steps or math.inf), "controller=None stops it"),
        ]:
            must_be(rule, fits, cure, **{name: getattr(self, name)})

    # -- rounds and values --------------------------------------------------------------------------------------------

    @cached_property
    def rounds(self) -> Rounds:
        """Where rounds end."""
        return Rounds(self.sync_every or default_length(self.total_steps or 1), self.total_steps)

    @cached_property
    def _table(self) -> np.ndarray:
        """How far each replica stands from the common values in round k: [k, N, G], by the hash of torch's package."""
        rounds = range(min(_TABLED, 1 + self.rounds.index(self.total_steps or sys.maxsize)))
        places = [assign(levels(self.replicas), self.seed, k, len(self.knobs)) for k in rounds]
        return np.array(places) * [knob.spread for knob in self.knobs]

    def _offsets(self, state: State) -> Array:
        return jnp.asarray(self._table)[state.round % len(self._table)]

    @property
    def _decays(self) -> bool:
        """Whether rates have a decay of their own from S_warm on."""
        return isinstance(self.controller, AsPrinted) or (self.controller is not None and self.decay == "exponential")

    @property
    def _scheduled(self) -> np.ndarray:
        return np.array([callable(knob.value) for knob in self.knobs])

    def _schedule(self, t: Array | int) -> Array:
        """The schedule of each knob at step ``t``; 1 for knobs without."""
        return jnp.stack([jnp.asarray(knob.value(t) if callable(knob.value) else 1.0, float) for knob in self.knobs])

    def _bases(self, state: State) -> Array:
        schedule = self._schedule(state.step)
        if not self._decays:
            return schedule * state.learned
        return jnp.where(self._scheduled & (state.step < self.rounds.next_end(self.start)), schedule, state.learned)

    def _spread_out(self, bases: Array, offsets: Array) -> Array:
        """The value of each knob for replicas at some offsets: (n, G)."""
        return jnp.stack([knob.away(bases[g], offsets[:, g]) for g, knob in enumerate(self.knobs)], 1)

    def values(self, state: State, axis: Axis = None) -> dict[str, Array]:
        """Each knob's value of this step for each replica, (N,); inside ``shard_map`` for this device's replicas."""
        offsets = _rows(self._offsets(state), state.sums.shape[0], axis)
        return self._named(self._spread_out(self._bases(state), offsets).T)

    def bases(self, state: State) -> dict[str, Array]:
        """The common value of each knob at this step, around which the replicas spread."""
        return self._named(self._bases(state))

    def _named(self, rows: Array) -> dict[str, Array]:
        return {knob.name: row for knob, row in zip(self.knobs, rows, strict=True)}

    # -- before the first step ----------------------------------------------------------------------------------------

    def init(self) -> State:
        """The state before the first step."""
        zero = jnp.zeros((), jnp.int32)
        learned = jnp.asarray([knob.start() for knob in self.knobs])
        if self._decays:
            learned = jnp.where(self._scheduled, self._schedule(self.rounds.next_end(self.start)), learned)
        memory, n = rules.nothing_seen(self.controller or Corrected(), len(self.knobs)), self.replicas
        return State(zero, zero, zero, jnp.zeros(n), learned, memory, live=jnp.ones(n, bool))

    def specs(self, axis: str) -> Any:
        """How ``jax.shard_map`` splits a state over the mesh's axis of that name: it splits only the sums of losses."""
        return jax.tree.map(lambda _: PartitionSpec(), self.init())._replace(sums=PartitionSpec(axis))

    def copies(self, tree: Tree) -> Tree:
        """One copy for each replica, along a new first axis."""
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (self.replicas, *jnp.shape(x))), tree)

    def shared(self, gradients: Tree, axis: Axis = None) -> Tree:
        """For each replica the mean of all gradients, as in data-parallel training."""
        every = jnp.ones(len(jax.tree.leaves(gradients)[0]), bool)
        return _averaged(gradients, every, every, axis)

    # -- a step -------------------------------------------------------------------------------------------------------

    def step(
        self, weights: Tree, own: Tree, state: State, losses: Array | None, *, probe: Probe = None, axis: Axis = None
    ) -> tuple[Tree, Tree, State]:
        """Count the losses of a training step and, if a round ends with it, converge and move the knobs.

        A replica is live if its weights and its mean loss of the round are finite. One that is not takes the mean of
        the others, also of ``own``. If none is, weights stay as they are and ``state.live`` is False throughout.

        Args:
            weights: what is averaged: parameters, and statistics of normalisation layers if there are any.
            own: the replicas' optimizer states, see ``optimizer_state``; ``()``: none.
            state: of the ensemble.
            losses: of this step, one per replica; None: not known, and replicas are only averaged.
            probe: the loss of one replica's weights on held-out data; compared in place of the training loss. It runs
                at the end of a round only. A knob that regularises needs it.
            axis: inside ``shard_map``: the mesh's axis over which replicas are split.

        Returns:
            weights, own, state. Arrays that are not floating are never averaged.
        """
        _check_rows((weights, own, losses), state.sums.shape[0])
        state = state._replace(step=state.step + 1)
        if losses is not None:
            state = state._replace(observed=state.observed + 1, sums=state.sums + jnp.asarray(losses, state.sums.dtype))
        t, last = state.step, self.total_steps or -1
        ends = (t % self.rounds.length == 0) | (t == last - 1) | (t == last)
        end = partial(self._end_round, probe, axis)
        weights, own, state = lax.cond(ends, end, lambda *as_it_is: as_it_is, weights, own, state)
        return weights, own, state._replace(sums=jnp.where(ends, 0.0, state.sums))

    def _end_round(self, probe: Probe, axis: Axis, weights: Tree, own: Tree, state: State) -> tuple[Tree, Tree, State]:
        n, losses = state.sums.shape[0], state.sums / state.observed
        signals = losses if probe is None else jax.vmap(probe)(weights)
        shown = [row.astype(losses.dtype) for row in (_finite(weights, n), losses, signals)]
        finite, losses, signals = _gathered(jnp.stack(shown), self.replicas, axis)
        live = (finite > 0) & (jnp.isfinite(losses) | (state.observed == 0)) | (self.replicas == 1)
        mine = _rows(live, n, axis)
        every = jnp.ones(n, bool)
        weights = _averaged(weights, mine, every, axis)
        if callable(self.optimizer_state):
            own = where(jnp.any(live), jax.vmap(self.optimizer_state)(weights), own)
        elif self.optimizer_state == "keep":
            own = lax.cond(jnp.all(live), lambda tree: tree, lambda tree: _averaged(tree, mine, ~mine, axis), own)
        else:
            own = _averaged(own, mine, every, axis)
        state = state if self.controller is None else self._steered(self.controller, state, signals, live)
        return weights, own, state._replace(round=state.round + 1, observed=jnp.zeros_like(state.observed), live=live)

    # -- moving the common values -------------------------------------------------------------------------------------

    def _steered(self, rule: Corrected | Normalised | AsPrinted, state: State, signals: Array, live: Array) -> State:
        """The state after the controller has seen the signals of all replicas."""
        base, offsets, begun = state.learned, self._offsets(state), state.step >= self.start
        if isinstance(rule, AsPrinted):  # in units of the rate that the step just made had
            begun &= state.step % self.rounds.length == 0  # not in the last rounds, of one step each
            base = self._bases(state._replace(step=state.step - 1))
            offsets = self._spread_out(base, offsets)
        signals, enough = rules.comparable(signals, live)
        control: Any = rules.normalised if isinstance(rule, Normalised) else rules.corrected
        memory, moves = control(rule, state.memory, signals, offsets, live)
        moves = jnp.where(enough, moves, 0.0)
        new = jnp.stack([knob.moved(base[g], moves[g]) for g, knob in enumerate(self.knobs)])
        if self._decays:
            new = jnp.where(self._scheduled, self._decayed(rule, base, moves), new)
        memory = jax.tree.map(lambda new, old: jnp.where(begun & enough, new, old), memory, state.memory)
        return state._replace(learned=jnp.where(begun, new, state.learned), memory=memory)

    def _decayed(self, rule: Any, base: Array, moves: Array) -> Array:
        """Rates after a round: max(floor, base (1 - gamma)(1 + move)), with 1 - gamma = (floor / rate at S_warm)^(1/K).

        K is the number of rounds from S_warm to the end. ``AsPrinted`` has base (1 - gamma) + move, and its own gamma.
        """
        warm, steps = self.rounds.next_end(self.start), self.total_steps or 0
        if isinstance(rule, AsPrinted):
            return base * (1 - rule.gamma(_PRINTED_RATIO, max(1.0, (steps - warm) / self.rounds.length))) + moves
        first, floor = self._schedule(warm), self._schedule(steps - 1)
        ratio = jnp.where((first > 0) & (floor < first), jnp.maximum(floor, 0.0) / first, 1.0)
        return jnp.maximum(floor, base * ratio ** (1 / self.rounds.left_from(warm)) * (1 + moves))


# -- replicas as an axis ----------------------------------------------------------------------------------------------


def _rows(table: Array, n: int, axis: Axis) -> Array:
    """Of one row per replica, those of this device, which holds ``n``."""
    return table if axis is None else lax.dynamic_slice_in_dim(table, lax.axis_index(axis) * n, n)


def _gathered(columns: Array, replicas: int, axis: Axis) -> Array:
    """(..., n) of this device -> (..., N) of all. Adding zeros is exact, and a NaN stays in its place."""
    at, room = lax.axis_index(axis) * columns.shape[-1] if axis else 0, (*columns.shape[:-1], replicas)
    return lax.psum(lax.dynamic_update_slice_in_dim(jnp.zeros(room, columns.dtype), columns, at, -1), axis or ())


def _finite(tree: Tree, n: int) -> Array:
    """Whether all numbers of a replica are finite: (n,)."""
    floating = [x.reshape(n, -1) for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]
    flags = [jnp.all(jnp.isfinite(x), axis=1) for x in floating]
    return jnp.all(jnp.stack([jnp.ones(n, bool), *flags]), axis=0)


def _averaged(tree: Tree, live: Array, given: Array, axis: Axis) -> Tree:
    """The mean over live replicas for those that are ``given`` it; half precision is summed in float32."""
    count = lax.psum(jnp.sum(live), axis or ())

    def mean(x: Array) -> Array:
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return x
        shape = (-1, *[1] * (x.ndim - 1))
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        total = lax.psum(jnp.sum(jnp.where(live.reshape(shape), wide, 0), axis=0), axis or ())
        return jnp.where(given.reshape(shape) & (count > 0), (total / count).astype(x.dtype), x)

    return jax.tree.map(mean, tree)


def _check_rows(trees: tuple[Tree, Tree, Any], n: int) -> None:
    """Raise unless the first axis of every array is the replicas', and losses have no other."""
    for path, x in jax.tree_util.tree_leaves_with_path(trees):
        if jnp.shape(x)[:1] != (n,) or (x is trees[2] and jnp.ndim(x) > 1):
            raise ArgumentError(
                f"every array must have {n} rows, one per replica, and losses no other axis, but (weights, own, losses)"
                f"{jax.tree_util.keystr(path)} has the shape {jnp.shape(x)}; ensemble.copies(params) makes such rows"
            )
