"""The state of ``hdet.jax.auto``: a few trees of weights, and all small numbers in a few vectors.

To hand a hundred scalars from step to step takes longer than a training step of a small network, since each of them is
an argument, a result and often a copy. :attr:`AutoState.memory` is what the vectors say; what changes in every step is
not in them.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from hdet.jax.judge import LossHistory
from hdet.jax.measure import Path, Tree
from hdet.jax.numbers import Array
from hdet.jax.progress import Progress
from hdet.jax.round import Round, Steps
from hdet.jax.rule import Snapshots, new_state
from hdet.jax.schedule import Plan
from hdet.rule.constants import BLOCKS
from hdet.rule.enums import Phase
from hdet.rule.state import State


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

    def looks(self, phase: Array) -> Array:
        """Whether gradients are sampled: until the schedule falls."""
        return (phase == Phase.FIRST) | ((phase == Phase.SEARCHING) & ~self.is_falling)

    @classmethod
    def new(cls, why: int) -> Notes:
        no, zero = jnp.zeros((), bool), jnp.zeros((), jnp.int32)
        return cls(zero, no, no, no, no, zero, zero, zero, jnp.asarray(why, jnp.int32))


class Memory(NamedTuple):
    """What changes at the end of a round, or with a sample, except for trees of weights."""

    found: State
    snapshots: Snapshots
    history: LossHistory
    progress: Progress
    plan: Plan
    round: Round
    path: Path
    notes: Notes

    @classmethod
    def new(cls, phase: Phase, plan: Plan, why: int) -> Memory:
        """Before the first step."""
        found = new_state(phase)
        round = Round.beginning(jnp.zeros((), jnp.int32), found.phase, plan)
        return cls(found, Snapshots.none(), LossHistory.new(), Progress.new(), plan, round, Path.new(), Notes.new(why))


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
    """The memory: a vector of all floating-point numbers, one of all else, and its long arrays."""

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
    found: Memory = jax.eval_shape(lambda: Memory.new(Phase.FIRST, Plan.of(None, 0.3, None), 0))
    return found


@cache
def _places() -> dict[str, list[tuple[str, int, Any]]]:
    """For each part of the memory, of each array in it: in which vector it is, and where, and its shape and type."""
    found: dict[str, list[tuple[str, int, Any]]] = {}
    ends: dict[str, int] = {}
    for name, part in _outline()._asdict().items():
        for i, leaf in enumerate(jax.tree.leaves(part)):
            kind = "numbers" if jnp.issubdtype(leaf.dtype, jnp.floating) else "counts"
            key = kind if leaf.size <= BLOCKS else f"{name}{i}"
            found.setdefault(name, []).append((key, ends.get(key, 0), leaf))
            ends[key] = ends.get(key, 0) + leaf.size
    return found
