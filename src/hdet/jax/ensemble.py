"""Replica ensembles (HDET) in jax: replicas are the first axis of every array, on one device or over a mesh.

Each replica trains at its own values of some hyperparameters, the *knobs*. At the end of a round the weights of all
replicas are replaced by their mean, a controller moves the knobs' common values, and the replicas change places.
:class:`Ensemble` holds the settings; everything that changes is in a :class:`State`, a NamedTuple of arrays. All
methods are pure and work under ``jit`` and ``lax.scan``; rounds are counted in the state, so nothing is compiled again.

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
``ensemble.shared(gradients)``; then only knobs that act in the update say anything (docs/ensemble.md). Over a mesh,
call the same methods inside ``jax.shard_map`` with ``axis="replica"``, and share out the state by
``ensemble.specs("replica")`` (docs/jax.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

from hdet.checks import is_int, is_one_of, is_real, must_be, takes
from hdet.ensemble.controller import Corrected
from hdet.ensemble.design import Rounds, default_length, levels
from hdet.ensemble.knob import FACTOR_LIMITS, KnobSpec, scale_named
from hdet.ensemble.normalised import Normalised
from hdet.errors import ArgumentError
from hdet.jax import ensemble_rules as rules
from hdet.jax.ensemble_rules import AsPrinted

__all__ = ["AsPrinted", "Corrected", "Ensemble", "Knob", "Normalised", "State"]

Tree = Any
"""A pytree of arrays whose first axis is the replicas'."""
Axis = str | None
Probe = Callable[[Tree], Array] | None
_ANYWHERE = (-math.inf, math.inf)


@dataclass(frozen=True)
class Knob:
    """One hyperparameter that the replicas explore.

    Args:
        name: the key under which your code receives it.
        value: its first common value; or a schedule, a function of the step such as optax has. Then what is learned is
            a factor on the schedule.
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
        must_be("a text", isinstance(self.name, str) and self.name, 'for instance "lr"', name=self.name)
        fits = is_real(self.value) or takes(self.value, 0)
        must_be("a number or a function of the step", fits, "for instance 0.1", value=self.value)
        fits = isinstance(self.bounds, tuple) and len(self.bounds) == 2 and all(map(is_real, self.bounds))
        must_be("two numbers", fits, "give (low, high)", bounds=self.bounds)
        if callable(self.value):  # what is learned is a factor on it
            must_be("left out for a schedule", self.bounds == _ANYWHERE, "leave it out", bounds=self.bounds)
            fits = is_one_of(self.scale, ("relative", "log"))
            must_be('"relative" or "log" for a schedule', fits, "leave it out", scale=self.scale)
        self.start()  # refuses a value that the scale cannot hold

    @property
    def spec(self) -> KnobSpec:
        """The same in torch's package, which checks it."""
        bounds = float(self.bounds[0]), float(self.bounds[1])
        return KnobSpec(self.name, scale_named(self.scale), self.spread, bounds, callable(self.value))

    def start(self) -> float:
        """What is learned before the first round."""
        return self.spec.start(math.nan if callable(self.value) else float(self.value))

    def away(self, base: Array, d: Array) -> Array:
        """The value at distance ``d`` from ``base`` on the knob's scale."""
        if self.scale == "relative":
            return base * (1.0 + d)
        if self.scale == "linear":
            return base + d
        if self.scale == "log":
            most = 700.0 if d.dtype == jnp.float64 else 80.0  # its exponential is finite
            return base * jnp.exp(jnp.clip(d, -most, most))
        return jax.nn.sigmoid(jnp.log(base) - jnp.log1p(-base) + d)

    def moved(self, learned: Array, move: Array) -> Array:
        """What is learned after a round."""
        if callable(self.value):
            return jnp.clip(self.away(learned, move), *FACTOR_LIMITS)
        move = jnp.maximum(move, -0.9) if self.scale == "relative" else move  # a value never changes its sign
        return self.inside(self.away(learned, move))

    def inside(self, value: Array) -> Array:
        """One spread inside the bounds."""
        ends = (self.spec.scale.inside(end, self.spread, self.spec.bounds) for end in _ANYWHERE)
        return jnp.clip(value, *ends)


class State(NamedTuple):
    """All that changes in a run, beside the weights. N replicas, G knobs."""

    step: Array
    """Steps made."""
    round: Array
    """k, rounds ended."""
    observed: Array
    """Losses of the round so far ..."""
    sums: Array
    """... and their sum per replica: (N,), the one field that a mesh shares out."""
    places: Array
    """Where each replica stands in this round, from -1 to 1: (N, G)."""
    learned: Array
    """The common value of each knob, or the factor on its schedule: (G,). Of a rate with a decay of its own, the value
    that the decay has come to."""
    memory: Any
    """The controller's."""
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
        controller: moves the common values: ``Corrected()``, ``Normalised()`` or ``AsPrinted()``; None: nothing does.
        start: S_warm; the controller begins at the first end of a round from this step on.
        decay: "schedule": a factor on the schedule is learned; "exponential": from S_warm on, a rate decays to its
            schedule's last value by a factor a round, as in the paper with gamma corrected.
        seed: of the permutations.
    """

    knobs: Sequence[Knob]
    replicas: int
    sync_every: int | None = None
    total_steps: int | None = None
    controller: Corrected | Normalised | AsPrinted | None = field(default_factory=Corrected)
    start: int = 0
    decay: Literal["schedule", "exponential"] = "schedule"
    seed: int = 0

    def __post_init__(self) -> None:
        def check(name: str, rule: str, fits: object, cure: str) -> None:
            must_be(rule, fits, cure, **{name: getattr(self, name)})

        steps, every, rule = self.total_steps, self.sync_every, self.controller
        fits = isinstance(self.knobs, Sequence) and all(isinstance(knob, Knob) for knob in self.knobs)
        fits = fits and 0 < len(self.knobs) == len({knob.name for knob in self.knobs})
        check("knobs", "at least one Knob, each with a name of its own", fits, 'for instance [Knob("lr", 0.1)]')
        check("replicas", "an integer, at least 1", is_int(self.replicas) and self.replicas >= 1, "4 to 8 are usual")
        fits = rule is None or isinstance(rule, (Corrected, Normalised, AsPrinted))
        check("controller", "Corrected(), Normalised(), AsPrinted() or None", fits, "leave it out")
        fits = is_one_of(self.decay, ("schedule", "exponential")[: 1 if isinstance(rule, AsPrinted) else 2])
        check("decay", '"schedule" or, unless AsPrinted() has its own, "exponential"', fits, "leave it out")
        fits = not self._decays if steps is None else is_int(steps) and steps >= 1
        check(
            "total_steps", "an integer, at least 1, or None if no rate decays to the run's end", fits, "give a number"
        )
        fits = steps is not None if every is None else is_int(every) and every >= 1
        check("sync_every", "an integer, at least 1, or None if total_steps is known", fits, "for instance 100")
        fits = is_int(self.start) and 0 <= self.start < (steps or math.inf)
        check("start", "an integer from 0 to below total_steps", fits, "controller=None switches the controller off")
        fits = is_int(self.seed) and abs(self.seed) < 10**28
        check("seed", "an integer of at most 28 digits", fits, "for instance 0")

    # -- rounds and values --------------------------------------------------------------------------------------------

    @property
    def rounds(self) -> Rounds:
        """Where rounds end."""
        return Rounds(self.sync_every or default_length(self.total_steps or 1), self.total_steps)

    @property
    def _decays(self) -> bool:
        """Whether rates have a decay of their own from S_warm on."""
        return isinstance(self.controller, AsPrinted) or (self.controller is not None and self.decay == "exponential")

    @property
    def _has_schedule(self) -> Array:
        return jnp.asarray([callable(knob.value) for knob in self.knobs])

    def _schedule(self, t: Array | int) -> Array:
        """The schedule of each knob at step ``t``; 1 for knobs without."""
        return jnp.stack([jnp.asarray(knob.value(t) if callable(knob.value) else 1.0, float) for knob in self.knobs])

    def _bases(self, state: State) -> Array:
        schedule = self._schedule(state.step)
        if not self._decays:
            return schedule * state.learned
        return jnp.where(self._has_schedule & (state.step < self.rounds.next_end(self.start)), schedule, state.learned)

    def _spread_out(self, bases: Array, places: Array) -> list[Array]:
        """The value of each knob for replicas at some places."""
        return [knob.away(bases[g], knob.spread * places[:, g]) for g, knob in enumerate(self.knobs)]

    def values(self, state: State, axis: Axis = None) -> dict[str, Array]:
        """Each knob's value of this step for each replica, (N,); inside ``shard_map`` for this device's replicas."""
        columns = self._spread_out(self._bases(state), _rows(state.places, state.sums.shape[0], axis))
        return {knob.name: column for knob, column in zip(self.knobs, columns, strict=True)}

    def bases(self, state: State) -> dict[str, Array]:
        """The common value of each knob at this step, around which the replicas spread."""
        return {knob.name: value for knob, value in zip(self.knobs, self._bases(state), strict=True)}

    # -- before the first step ----------------------------------------------------------------------------------------

    def init(self) -> State:
        """The state before the first step."""
        zero = jnp.zeros((), jnp.int32)
        learned = jnp.asarray([knob.start() for knob in self.knobs])
        if self._decays:
            learned = jnp.where(self._has_schedule, self._schedule(self.rounds.next_end(self.start)), learned)
        memory = rules.nothing_seen(self.controller or Corrected(), len(learned))
        places = jnp.tile(jnp.asarray(levels(self.replicas))[:, None], len(learned))  # in order, as printed
        return State(zero, zero, zero, 0 * places[:, 0], places, learned, memory, jnp.ones(self.replicas, bool))

    def specs(self, axis: str) -> Any:
        """How ``jax.shard_map`` is to share out a state over the mesh's axis of that name: only the sums of losses."""
        return jax.tree.map(lambda _: PartitionSpec(), self.init())._replace(sums=PartitionSpec(axis))

    def copies(self, tree: Tree) -> Tree:
        """One copy for each replica, along a new first axis."""
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (self.replicas, *jnp.shape(x))), tree)

    def shared(self, gradients: Tree, axis: Axis = None) -> Tree:
        """For each replica the mean of all gradients, as data-parallel training has it."""
        every = jnp.ones(len(jax.tree.leaves(gradients)[0]), bool)
        return _averaged(gradients, every, every, axis)

    # -- a step -------------------------------------------------------------------------------------------------------

    def step(
        self, weights: Tree, own: Tree, state: State, losses: Array | None, *, probe: Probe = None, axis: Axis = None
    ) -> tuple[Tree, Tree, State]:
        """A step of training was made: count its losses and, if a round ends here, converge and move the knobs.

        A replica is live if its weights and its mean loss of the round are finite. One that is not takes the mean of
        the others, also of ``own``. If none is, weights stay as they are and ``state.live`` is False throughout.

        Args:
            weights: what is averaged: parameters, and statistics of normalisation layers if there are any.
            own: what each replica keeps for itself, usually the optimizer's state; ``()``: nothing.
            state: of the ensemble.
            losses: of this step, one per replica; None: not known, and replicas are only averaged.
            probe: the loss of one replica's weights on held-out data; compared in place of the training loss. It runs
                at the end of a round only. A knob that regularises needs it.
            axis: inside ``shard_map``: the mesh's axis over which replicas are shared out.

        Returns:
            weights, own, state. Arrays that are not floating are never averaged.
        """
        _check_rows((weights, own, losses), state.sums.shape[0])
        state = state._replace(step=state.step + 1)
        if losses is not None:
            state = state._replace(observed=state.observed + 1, sums=state.sums + jnp.asarray(losses, state.sums.dtype))
        ends = state.step % self.rounds.length == 0
        if self.total_steps is not None:
            ends |= (state.step >= self.total_steps - 1) & (state.step <= self.total_steps)
        all_of = weights, own, state
        weights, own, state = lax.cond(ends, lambda x: self._end_round(probe, axis, *x), lambda x: x, all_of)
        return weights, own, state._replace(sums=jnp.where(ends, 0.0, state.sums))

    def _end_round(self, probe: Probe, axis: Axis, weights: Tree, own: Tree, state: State) -> tuple[Tree, Tree, State]:
        n, losses = state.sums.shape[0], state.sums / state.observed
        signals = losses if probe is None else jax.vmap(probe)(weights)
        shown = [row.astype(losses.dtype) for row in (_finite(weights, n), losses, signals)]
        finite, losses, signals = _gathered(jnp.stack(shown), self.replicas, axis)
        live = (finite > 0) & (jnp.isfinite(losses) | (state.observed == 0)) | (self.replicas == 1)
        mine = _rows(live, n, axis)
        weights = _averaged(weights, mine, jnp.ones(n, bool), axis)
        own = lax.cond(jnp.all(live), lambda tree: tree, lambda tree: _averaged(tree, mine, ~mine, axis), own)
        state, k = self._steered(state, signals, live), state.round + 1
        order = rules.permutations(self.seed, k, len(self.knobs), self.replicas)
        places = jnp.asarray(levels(self.replicas))[order].T
        return weights, own, state._replace(round=k, observed=jnp.zeros_like(k), places=places, live=live)

    # -- moving the common values -------------------------------------------------------------------------------------

    def _steered(self, state: State, signals: Array, live: Array) -> State:
        """After the controller has seen the signals of all replicas."""
        rule, base = self.controller, state.learned
        if rule is None:
            return state
        signals, enough = rules.comparable(signals, live)
        begun = state.step >= self.start
        if isinstance(rule, AsPrinted):  # in units of the rate that the step just made had
            begun &= state.step % self.rounds.length == 0  # not in the last rounds, of one step each
            used = self._bases(state._replace(step=state.step - 1))
            gamma = jnp.where(self._has_schedule, rule.gamma(rule.ratio, self._rounds_left), 0.0)
            values = jnp.stack(self._spread_out(used, state.places), 1)
            memory, new = rules.as_printed(rule, state.memory, used, gamma, signals, values, live)
            new = jnp.where(enough, new, used * (1 - gamma))
            new = jnp.stack([v if callable(k.value) else k.inside(v) for k, v in zip(self.knobs, new, strict=True)])
        else:
            control: Any = rules.corrected if isinstance(rule, Corrected) else rules.normalised
            offsets = state.places * jnp.asarray([knob.spread for knob in self.knobs])
            memory, moves = control(rule, state.memory, signals, offsets, live)
            moves = jnp.where(enough, moves, 0.0)
            new = jnp.stack([knob.moved(base[g], moves[g]) for g, knob in enumerate(self.knobs)])
            if self._decays:
                new = jnp.where(self._has_schedule, self._decayed(base, moves), new)
        memory = jax.tree.map(lambda new, old: jnp.where(begun & enough, new, old), memory, state.memory)
        return state._replace(learned=jnp.where(begun, new, base), memory=memory)

    def _decayed(self, base: Array, moves: Array) -> Array:
        """base <- max(floor, base (1 - gamma)(1 + move)), with 1 - gamma = (floor / value at S_warm)^(1/K)."""
        first, floor = self._schedule(self.rounds.next_end(self.start)), self._schedule((self.total_steps or 0) - 1)
        ratio = jnp.where((first > 0) & (floor < first), jnp.maximum(floor, 0.0) / first, 1.0)
        return jnp.maximum(floor, base * ratio ** (1 / math.ceil(self._rounds_left)) * (1 + moves))

    @property
    def _rounds_left(self) -> float:
        """K = (S - S_warm) / T, at least 1."""
        return max(1.0, ((self.total_steps or 0) - self.rounds.next_end(self.start)) / self.rounds.length)


# -- replicas as an axis ----------------------------------------------------------------------------------------------


def _rows(table: Array, n: int, axis: Axis) -> Array:
    """Of one row per replica, those of this device, which holds ``n``."""
    return table if axis is None else lax.dynamic_slice_in_dim(table, lax.axis_index(axis) * n, n)


def _gathered(columns: Array, replicas: int, axis: Axis) -> Array:
    """(..., n) of this device -> (..., N) of all. Adding zeros is exact, and a NaN stays in its place."""
    at, room = lax.axis_index(axis) * columns.shape[-1] if axis else 0, (*columns.shape[:-1], replicas)
    return _summed(lax.dynamic_update_slice_in_dim(jnp.zeros(room, columns.dtype), columns, at, -1), axis)


def _summed(x: Array, axis: Axis) -> Array:
    """Over the devices."""
    return x if axis is None else lax.psum(x, axis)


def _finite(tree: Tree, n: int) -> Array:
    """Whether all of a replica's numbers are finite: (n,)."""
    floating = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]
    flags = [jnp.all(jnp.isfinite(x), axis=tuple(range(1, x.ndim))) for x in floating]
    return jnp.all(jnp.stack([jnp.ones(n, bool), *flags]), axis=0)


def _averaged(tree: Tree, live: Array, given: Array, axis: Axis) -> Tree:
    """The mean over live replicas for those that are ``given`` it; half precision is summed in float32."""
    count = _summed(jnp.sum(live), axis)

    def mean(x: Array) -> Array:
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return x
        shape = (-1, *[1] * (x.ndim - 1))
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        total = _summed(jnp.sum(jnp.where(live.reshape(shape), wide, 0), axis=0), axis)
        return jnp.where(given.reshape(shape) & (count > 0), (total / count).astype(x.dtype), x)

    return jax.tree.map(mean, tree)


def _check_rows(trees: tuple[Tree, Tree, Any], n: int) -> None:
    """Raise unless the first axis of every array is the replicas', and losses have no other."""
    for path, x in jax.tree_util.tree_leaves_with_path(trees):
        if jnp.shape(x)[:1] != (n,) or (x is trees[2] and jnp.ndim(x) > 1):
            raise ArgumentError(
                f"every array must have {n} rows, one per replica, and losses no other axis, but (weights, own, losses)"
                f"{jax.tree_util.keystr(path)} has the shape {jnp.shape(x)}; make copies by ensemble.copies(params), "
                "the optimizer's state by jax.vmap(optimizer.init)(copies), and losses by jax.vmap(train_step)"
            )
