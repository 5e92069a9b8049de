"""A search, or a guard, in the checkpoint of a framework that saves only ``state_dict()``.

If all ranks hold the same weights, one rank writes for all. If each holds a part of them (FSDP2, ZeRO), each rank
writes a file of its own.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch

from hdet.checks import users_level
from hdet.errors import ResumeWarning
from hdet.files import replacing
from hdet.ranks.group import connect
from hdet.ranks.shards import place
from hdet.rollback.guard import Guard

SEARCH = "hdet_search"
"""What a search is called in a checkpoint of all ranks."""
GUARD = "hdet_guard"
"""What a guard is called there."""


def search_state(scheduler: Any, *, alone: bool = False) -> dict[str, Any]:
    """The tensors of a search, with the losses of all ranks; empty if there is no search. Collective.

    ``alone``: with the losses of this rank only, because other ranks may have stopped. Not a collective.
    """
    state = scheduler.search_state_dict() if getattr(scheduler, "search", None) is not None else {}
    if state and not alone:
        state["losses"] = [row for own in connect(None).gather_objects(state["losses"]) for row in own]
    return state


def guard_state(guard: Guard) -> dict[str, Any]:
    """The state of a guard, with the losses of all ranks. Collective."""
    with guard.gathered(connect(None)):
        return guard.state_dict()


def holds_parts(optimizer: Any) -> bool:
    """Whether each rank holds a part of the weights: FSDP2, ZeRO."""
    return any(place(p) for group in optimizer.param_groups for p in group["params"])


def name_on_rank(optimizer: Any, name: str = SEARCH) -> str:
    """The name of a search in a checkpoint: one for all ranks, or one for each rank if it holds a part."""
    group = connect(None)
    return f"{name}_{group.rank}_of_{group.replica_index.size}" if holds_parts(optimizer) else name


def write_search(folder: str | os.PathLike[str], scheduler: Any) -> None:
    """Write a search into the folder of a checkpoint, completely or not at all. Collective."""
    state = search_state(scheduler)
    if state:
        _write(folder, SEARCH, scheduler.optimizer, state)


def read_search(folder: str | os.PathLike[str], scheduler: Any) -> None:
    """Resume a search, once scheduler and optimizer are loaded. Does nothing if they were not loaded. Collective.

    If the checkpoint was saved without hdet's callback, or by another number of ranks that hold parts, the scheduler
    itself says what is missing.
    """
    search = getattr(scheduler, "search", None)
    if search is None or not search.is_just_loaded:
        return
    state = _read(_file(folder, SEARCH, scheduler.optimizer))
    if state is not None:
        scheduler.load_search_state_dict(state)


def write_guard(folder: str | os.PathLike[str], guard: Guard, optimizer: Any) -> None:
    """Write a guard into the folder of a checkpoint, completely or not at all. Collective."""
    _write(folder, GUARD, optimizer, guard_state(guard))


def read_guard(folder: str | os.PathLike[str], guard: Guard, optimizer: Any) -> None:
    """Resume a guard. Collective."""
    file = _file(folder, GUARD, optimizer)
    state = _read(file)
    if state is not None:
        guard.load_state_dict(state)
    else:
        warn_without_guard(file)


def warn_without_guard(path: str | os.PathLike[str]) -> None:
    """Warn on one rank, at the user's line, that a checkpoint has no guard for these ranks."""
    if connect(None).rank == 0:
        text = f"no hdet.Guard of as many ranks was saved at {path}: the guard starts again; to keep it, save "
        warnings.warn(f"{text}checkpoints with the same callback", ResumeWarning, stacklevel=users_level())


def _file(folder: str | os.PathLike[str], name: str, optimizer: Any) -> Path:
    return Path(folder) / f"{name_on_rank(optimizer, name)}.pt"


def _write(folder: str | os.PathLike[str], name: str, optimizer: Any, state: dict[str, Any]) -> None:
    if connect(None).rank == 0 or holds_parts(optimizer):
        with replacing(_file(folder, name, optimizer)) as draft:
            torch.save(state, draft)


def _read(file: Path) -> dict[str, Any] | None:
    """The state; None unless every rank has its file. Collective."""
    complete = all(connect(None).gather_objects(file.exists()))
    return torch.load(file, map_location="cpu", weights_only=True) if complete else None
