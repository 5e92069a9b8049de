"""The state of ``hdet.jax.auto``: a few trees of weights, and all small numbers in two vectors.

To hand a hundred scalars from step to step takes longer than a training step of a small network, since each of them is
an argument, a result and often a copy. :attr:`AutoState.memory` is what the two vectors say; what changes in every step
is not in them.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hdet.jax.measure import Path, Tree
from hdet.jax.numbers import Array
from hdet.jax.progress import Progress
from hdet.jax.round import Round, Steps
from hdet.jax.rule import State
from hdet.jax.schedule import Plan
from hdet.search.rule import Phase


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
    """What the last round has come to ..."""
    why: Array
    """... and why the search has stopped, if it has; see :func:`hdet.jax.rule.code_of`."""
    returns: Array
    """Where the next call leads, to remove what rounding has left of a rollback; -1: it is a step of training."""

    @classmethod
    def new(cls, why: int) -> Notes:
        no, zero = jnp.zeros((), bool), jnp.zeros((), jnp.int32)
        return cls(zero, no, no, no, no, zero, zero, zero, jnp.asarray(why, jnp.int32), zero - 1)


class Memory(NamedTuple):
    """What changes at the end of a round, or with a sample, except for trees of weights."""

    found: State
    progress: Progress
    plan: Plan
    round: Round
    path: Path
    notes: Notes

    @classmethod
    def new(cls, phase: Phase, plan: Plan, why: int) -> Memory:
        """Before the first step."""
        found = State.new(phase)
        round = Round.beginning(jnp.zeros((), jnp.int32), found.phase, plan)
        return cls(found, Progress.new(), plan, round, Path.new(), Notes.new(why))

    @property
    def looks(self) -> Array:
        """Whether gradients are sampled: until the schedule falls."""
        phase = self.found.phase
        return (phase == Phase.FIRST) | ((phase == Phase.SEARCHING) & ~self.notes.is_falling)


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
    numbers: Array
    """The memory's floating-point numbers, one after the other."""
    counts: Array
    """Its integers and truth values."""

    @property
    def memory(self) -> Memory:
        """All small numbers by name."""
        leaves, vectors, places = [], (self.counts, self.numbers), [0, 0]
        for leaf in jax.tree.leaves(_outline()):
            is_real, size = jnp.issubdtype(leaf.dtype, jnp.floating), int(np.prod(leaf.shape))
            begin = places[is_real]
            value = vectors[is_real][begin : begin + size].reshape(leaf.shape)
            leaves.append(value != 0 if leaf.dtype == bool else value)
            places[is_real] += size
        found: Memory = jax.tree.unflatten(jax.tree.structure(_outline()), leaves)
        return found

    def remembering(self, memory: Memory, **trees: Any) -> AutoState:
        """The state with another memory, and other trees."""
        rows: tuple[list[Array], list[Array]] = ([], [])
        for leaf, old in zip(jax.tree.leaves(memory), jax.tree.leaves(_outline()), strict=True):
            is_real = jnp.issubdtype(old.dtype, jnp.floating)
            kind = jnp.result_type(float) if is_real else jnp.int32
            rows[is_real].append(jnp.broadcast_to(jnp.asarray(leaf, kind), old.shape).ravel())
        counts, numbers = (jnp.concatenate(row) for row in rows)
        return self._replace(numbers=numbers, counts=counts, **trees)

    def with_new_round(self, memory: Memory, is_new_path: Array) -> AutoState:
        """The next step begins the memory's round, and a new path if ``is_new_path``."""
        begun = jnp.where(is_new_path, self.steps.made, memory.path.begun)
        memory = memory._replace(path=memory.path._replace(begun=begun))
        return self.remembering(memory, steps=self.steps.with_new_round(is_new_path))


@cache
def _outline() -> Memory:
    """The shapes and types in a memory."""
    found: Memory = jax.eval_shape(lambda: Memory.new(Phase.FIRST, Plan.of(None, 0.3, None), 0))
    return found
