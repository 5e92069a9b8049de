"""The state of ``hdet.jax.auto``, and what users ask it: what was found, and to end a run of unknown length.

A state is a few trees of weights, and all small numbers in a few vectors. To hand a hundred scalars from step to step
takes longer than a training step of a small network, since each of them is an argument, a result and often a copy.
:attr:`AutoState.memory` is what the vectors say; what changes in every step, :class:`Steps`, is not in them.
"""

from __future__ import annotations

from functools import cache
from hashlib import sha256
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hdet._version import __version__
from hdet.checks import must_count
from hdet.errors import ArgumentError
from hdet.jax import numbers as xp
from hdet.jax.bases import parts_of
from hdet.jax.judge import LossHistory
from hdet.jax.measure import Path, Tree
from hdet.jax.numbers import Array, Sum, absent, number, quotient, where
from hdet.jax.progress import ENDS, LONGEST, Progress
from hdet.jax.rule import Snapshots, code_of, new_state, peak_factor
from hdet.jax.schedule import Plan
from hdet.rule.constants import BLOCKS, QUIET, all_numbers
from hdet.rule.constants import DEFAULT as C
from hdet.rule.enums import Phase, Reason
from hdet.rule.found import Found, status_of, within
from hdet.rule.state import State

_ENDS = np.resize(np.array(ENDS, np.int32), (len(ENDS) // 32 + 1, 32))
"""In rows, the first ones again at the end: over rows this short, XLA makes one kernel of a minimum, not three."""


class Round(NamedTuple):
    """Where a round begins and ends, and what was sampled in it."""

    begun: Array
    """Steps that had been made when it began."""
    end: Array
    """Steps that will have been made when it ends."""
    sizes: Array
    """The largest absolute value of each gradient that was sampled; -1: not sampled yet."""
    returns: Array
    """Where the next call leads, to remove what rounding has left of a rollback; -1: it is a step of training."""

    @classmethod
    def beginning(cls, step: Array, phase: Array, plan: Plan, returns: Array = -1) -> Round:
        """After ``step`` steps."""
        sizes = jnp.full_like(absent(BLOCKS), -1.0)
        return cls(step, cls.end_of(step, phase, plan), sizes, jnp.asarray(returns, jnp.int32))

    @staticmethod
    def end_of(begun: Array, phase: Array, plan: Plan) -> Array:
        """The last two steps of a run end rounds too, and each step does until a first one was measured."""
        full = jnp.min(jnp.where(begun < _ENDS, _ENDS, LONGEST))
        end = jnp.minimum(full, jnp.where(begun < plan.total - 1, plan.total - 1, plan.total))
        return jnp.where(phase == Phase.FIRST, begun + 1, jnp.maximum(end, begun + 1))

    @property
    def length(self) -> Array:
        return self.end - self.begun

    @property
    def stride(self) -> Array:
        """Every such step is sampled."""
        return quotient(self.length + C.max_samples - 1, C.max_samples)


class Steps(NamedTuple):
    """What changes in every step."""

    made: Array
    """How many there were."""
    rate: Array
    """Of the last one, in units of the guess."""
    rates: Sum
    """Of all steps of the path."""
    losses: Array
    """Of the round. Three rows with a number for each block: the mean of its finite losses, how many these are, and
    whether any loss was given."""
    withheld: Array
    """Whether an update was withheld because it would have made weights NaN or infinite. Then no weight moves until the
    round ends."""

    @classmethod
    def new(cls) -> Steps:
        """Before the first one."""
        losses = jnp.zeros((3, BLOCKS), jnp.result_type(float)).at[0].set(jnp.nan)
        return cls(jnp.zeros((), jnp.int32), number(0.0), Sum.zero(), losses, jnp.zeros((), bool))

    def next(self, round: Round, rate: Array, loss: Array | None, is_sound: Array) -> Steps:
        """One more. Its loss counts as NaN if updates are withheld."""
        losses = self.losses
        if loss is not None:
            spot, count = self.made - round.begun, jnp.minimum(round.length, BLOCKS)
            is_its = jnp.arange(BLOCKS) == quotient((spot + 1) * count - 1, round.length)
            is_finite = is_its & jnp.isfinite(loss) & ~self.withheld
            mean, finite, given = losses
            more = jnp.where(finite > 0, mean + (loss - mean) / (finite + 1), loss)
            rows = jnp.where(is_finite, more, mean), finite + is_finite, jnp.where(is_its, 1.0, given)
            losses = jnp.stack(rows)
        return Steps(self.made + 1, rate, self.rates.plus(rate), losses, self.withheld | ~is_sound)

    def with_new_round(self, resets_path: Array) -> Steps:
        """The next step begins a round, and a path too if ``resets_path``."""
        fresh = Steps.new()
        return fresh._replace(made=self.made, rate=self.rate, rates=where(resets_path, fresh.rates, self.rates))

    def judged(self, round: Round, has_losses: Array, is_searching: Array) -> tuple[Array, Array, Array]:
        """What :class:`Blocks` are made of: losses or, if none was ever given, logarithms of the gradients' sizes."""
        length, sizes, k = round.length, round.sizes, jnp.arange(BLOCKS)
        count = jnp.minimum(length, BLOCKS)
        steps = quotient((k + 1) * length, count) - quotient(k * length, count)
        losses = self.losses[0], steps.astype(sizes.dtype), self.losses[2] > 0
        mean = jnp.where((sizes > 0) & jnp.isfinite(sizes), jnp.log(sizes), jnp.nan)
        instead = mean, jnp.ones_like(sizes), is_searching & (sizes != -1) & (sizes != 0)
        return where(has_losses, losses, instead)


class Notes(NamedTuple):
    """What is remembered from round to round beside the rule's state."""

    rounds: Array
    has_losses: Array
    is_falling: Array
    has_peaked: Array
    is_bound: Array
    quiet: Array
    """Rounds since the rate was last raised."""
    rolled_back: Array
    event: Array
    """What the last round has come to."""
    why: Array
    """Why the search has stopped, if it has; see :func:`hdet.jax.rule.code_of`."""

    def looks(self, phase: Array) -> Array:
        """Whether gradients are sampled: until the schedule falls."""
        return (phase == Phase.FIRST) | ((phase == Phase.SEARCHING) & ~self.is_falling)

    @classmethod
    def new(cls, why: int) -> Notes:
        no, zero = jnp.zeros((), bool), jnp.zeros((), jnp.int32)
        return cls(zero, no, no, no, no, zero, zero, zero, jnp.asarray(why, jnp.int32))


class Memory(NamedTuple):
    """What changes at the end of a round, or with a sample, except for trees of weights."""

    learned: State
    snapshots: Snapshots
    history: LossHistory
    progress: Progress
    plan: Plan
    round: Round
    path: Path
    notes: Notes

    @classmethod
    def new(cls, plan: Plan, is_too_short: bool) -> Memory:
        """Before the first step."""
        found = new_state(Phase.STOPPED if is_too_short else Phase.FIRST)
        round = Round.beginning(jnp.zeros((), jnp.int32), found.phase, plan)
        notes = Notes.new(code_of(Reason.TOO_SHORT) if is_too_short else 0)
        return cls(found, Snapshots.none(), LossHistory.new(), Progress.new(), plan, round, Path.new(), notes)


class AutoState(NamedTuple):
    """The state of :func:`hdet.jax.auto`: arrays, which can be saved, sharded and donated."""

    inner: Tree
    """The base's own state."""
    guesses: tuple[Array, ...]
    """The rates that the base was made with, if they can be read."""
    origin: Tree
    """The weights at the beginning of the path."""
    total: Tree
    """The weighted sum of the gradients that were sampled on it."""
    slots: tuple[tuple[Tree, Tree], ...]
    """Snapshots of weights and inner state: two, or none with ``rollback=False``."""
    steps: Steps
    vectors: dict[str, Array]
    """The memory: a vector of all floating-point numbers, one of all else, and its long arrays. The first one's name
    says of which rule they are (:func:`rule_id`)."""

    @property
    def memory(self) -> Memory:
        """All small numbers by name."""
        return Memory(*map(self.part, Memory._fields))

    def part(self, name: str) -> Any:
        """One part of the memory."""
        leaves = []
        for key, begin, like in _places()[name]:
            value = jax.lax.slice(self.vectors[key], (begin,), (begin + like.size,)).reshape(like.shape)
            leaves.append(value != 0 if like.dtype == bool else value)
        return jax.tree.unflatten(jax.tree.structure(getattr(_outline(), name)), leaves)

    def remembering(self, **parts: Any) -> AutoState:
        """The state with other parts of its memory."""
        rows: dict[str, list[Array]] = {}
        for name, places in _places().items():
            if name in parts:
                for leaf, (key, _, like) in zip(jax.tree.leaves(parts[name]), places, strict=True):
                    is_real = jnp.issubdtype(like.dtype, jnp.floating)
                    value = jnp.asarray(leaf, jnp.result_type(float) if is_real else jnp.int32)
                    rows.setdefault(key, []).append(jnp.broadcast_to(value, like.shape).ravel())
            else:
                for key in dict.fromkeys(key for key, _, _ in places):
                    own = [(begin, begin + like.size) for one, begin, like in places if one == key]
                    rows.setdefault(key, []).append(self.vectors[key][own[0][0] : own[-1][1]])
        return self._replace(vectors={key: jnp.concatenate(row) for key, row in rows.items()})


@cache
def _outline() -> Memory:
    """The shapes and types in a memory; floats may be of either size."""
    return jax.eval_shape(lambda: Memory.new(Plan.of(None, None), is_too_short=False))


@cache
def rule_id() -> str:
    """A name for the rule's constants, and for what is remembered and in which order: of another hdet, it may differ.

    Constants are part of the compiled program, so a state cannot bring its own. It is refused instead, before a step is
    traced, since its vector has another name. Tools that restore into a state of now also compare names.
    """
    guards = {"LOOKS", "ROUNDS"}  # a guard's limits; there is none here
    own = sorted((name, value) for name, value in all_numbers().items() if name not in guards)
    return sha256(repr((own, _names_in(_outline()))).encode()).hexdigest()[:8]


def _names_in(part: Any) -> Any:
    """The names in a tree, and the shapes."""
    if hasattr(part, "_fields"):
        return [(name, _names_in(value)) for name, value in part._asdict().items()]
    return getattr(part, "shape", None)


def refuse_other_rule(state: AutoState) -> None:
    """Raise unless this hdet's rule can go on from a state."""
    (saved,) = [key for key in state.vectors if key.startswith("numbers")] or [""]
    if saved != (own := f"numbers-{rule_id()}"):
        raise ArgumentError(
            f"state must be of the rule {own.removeprefix('numbers-')}, which is that of hdet {__version__}, but got "
            f"one of {saved.removeprefix('numbers-') or 'none'}: its run began with other constants; go on with the "
            "hdet that began it, or begin a new run with these params"
        )


@cache
def _places() -> dict[str, list[tuple[str, int, Any]]]:
    """For each part of the memory, of each array in it: in which vector it is, and where, and its shape and type."""
    found: dict[str, list[tuple[str, int, Any]]] = {}
    ends: dict[str, int] = {}
    for name, part in _outline()._asdict().items():
        for i, leaf in enumerate(jax.tree.leaves(part)):
            kind = f"numbers-{rule_id()}" if jnp.issubdtype(leaf.dtype, jnp.floating) else "counts"
            key = kind if leaf.size <= BLOCKS else f"{name}{i}"
            found.setdefault(name, []).append((key, ends.get(key, 0), leaf))
            ends[key] = ends.get(key, 0) + leaf.size
    return found


# -- what users ask a state -----------------------------------------------------------------------------------------


def state_in(state: Any) -> AutoState:
    """The state of :func:`hdet.jax.auto` in that of a whole optimizer, such as an ``optax.chain``."""
    own = parts_of(state, lambda node: isinstance(node, AutoState))
    if len(own) != 1:
        raise ArgumentError(
            f"state must have the state of one hdet.jax.auto in it, but got {len(own)}; give what update() has returned"
        )
    refuse_other_rule(own[0])
    return own[0]


def found(state: Any) -> Found:
    """What was found so far, as in torch: rate, status, rollbacks. Waits for the device.

    The rate is in units of the base's own unless that was made by ``optax.inject_hyperparams``: so make it with 1.

    Args:
        state: of :func:`hdet.jax.auto`, or of an optimizer that it is a part of.
    """
    own = state_in(state)
    memory, plan, notes = own.memory, own.memory.plan, own.memory.notes
    status, why = status_of(
        memory.learned,
        [None, *Reason][int(notes.why)],
        is_falling=notes.is_falling,
        rests=(own.steps.made >= plan.total)
        | (plan.is_endless & notes.has_peaked & (notes.quiet >= QUIET))
        | notes.is_bound,
        is_bound=notes.is_bound,
        has_fallen=memory.progress.has_fallen,
    )
    factor, guesses = float(peak_factor(memory.learned)), own.guesses or (1.0,)
    rates = tuple(float(guess) * factor for guess in guesses) if notes.rounds > 0 else ()
    rate = rates[0] if rates else float("nan")
    return Found(rate, status, int(notes.rolled_back), rates, why.text if why else "", within(memory.learned))


def finish(state: Any, steps: int) -> Any:
    """The state of a run that ends after ``steps`` more steps: from here on the rate falls by 1 - sqrt.

    Call it between two steps, outside ``jit``; nothing is traced again. A rate that falls already goes on from there.

    Args:
        state: of :func:`hdet.jax.auto`, or of an optimizer that it is a part of; the result is of the same kind.
        steps: steps that training still makes.
    """
    own = state_in(state)
    memory, t = own.memory, own.steps.made
    if isinstance(t, jax.core.Tracer):
        text = "finish() must be called outside jit, but the state is being traced; call it between two steps"
        raise ArgumentError(text)
    plan, searched, now, total = memory.plan, memory.learned, int(t), int(memory.plan.total)
    if plan.is_given:
        raise ArgumentError(
            f"finish() must be called without schedule=, but this run follows a schedule of {total} steps; leave it "
            "out, hdet.jax.auto(base, total_steps), or begin a new run with a schedule of the steps that are left"
        )
    must_count(1, "give the steps that training is still to make", high=LONGEST - 1 - now, steps=steps)
    if now >= total:
        raise ArgumentError(
            f"finish() must be called before the run ends, but it has ended at step {total}; go on from a checkpoint"
        )
    has_fallen = (t > plan.falls_from) & ~plan.is_endless
    share = jnp.where((searched.phase == Phase.STOPPED) & ~has_fallen, plan.plain(t), 1.0) * searched.rise(t, C, xp)
    plan, after = plan.finished(t, int(steps)), searched.peaking(number(now - 1.0), share, xp)
    end = jnp.maximum(Round.end_of(memory.round.begun, after.phase, plan), t + 1)
    new = own.remembering(plan=plan, learned=after, round=memory.round._replace(end=end))
    return jax.tree.map(lambda node: new if node is own else node, state, is_leaf=lambda node: node is own)
