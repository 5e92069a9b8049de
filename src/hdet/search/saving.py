"""A search in a checkpoint: plain numbers in lists, and tensors beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from hdet.checks import STATE_VERSION, in_pairs, reading, shown
from hdet.errors import ArgumentError
from hdet.ranks.group import ReplicaIndex
from hdet.rollback.losses import Losses
from hdet.rollback.policy import Snapshot
from hdet.rollback.saving import fields_of, from_fields, losses_of, plain
from hdet.rollback.snapshots import Snapshots
from hdet.search.measure import Measure
from hdet.search.memory import Memory
from hdet.search.rule import State

_FIRST = "load the scheduler's own state first, of the same checkpoint, or leave the search out"


def saved_memory(memory: Memory) -> dict[str, Any]:
    """The memory's fields by name. Snapshots are saved with their tensors."""
    found = in_pairs(fields_of(memory.found._replace(snapshots=())))
    return {**fields_of(memory), "found": found}


def loaded_memory(state: Mapping[str, Any]) -> Memory:
    """From :func:`saved_memory`. What does not fit raises."""
    found = from_fields(State, dict(state["found"]))
    return from_fields(Memory, {**state, "found": plain(found)})


def has_tensors(search: Any) -> bool:
    """Whether there are tensors to load. Raises if it is not a dict."""
    if not isinstance(search, Mapping):
        raise ArgumentError(
            f"the state of a search does not fit this scheduler: it must be a dict, but got {shown(search)}; give what "
            "search_state_dict() returned"
        )
    return len(search) > 0


def read_tensors(
    search: Mapping[str, Any], optimizer: Optimizer, t: int, groups: Sequence[int], replica_index: ReplicaIndex
) -> tuple[Losses, tuple[Snapshot, ...], Measure, Snapshots]:
    """The tensors of a search; raises unless they are of step ``t`` and fit the optimizer."""
    with reading("the state of a search", _FIRST):
        version, step = search["version"], search["step"]
        if (version, step) != (STATE_VERSION, t):
            raise ValueError(f"it is of version {version} at step {step}, the scheduler {STATE_VERSION} at {t}")
        return (
            losses_of(search["losses"], replica_index),
            tuple(Snapshot(int(step), int(slot)) for step, slot in search["kept"]),
            Measure.loaded(search["measure"], groups, optimizer),
            Snapshots.loaded(search["snapshots"], optimizer),
        )
