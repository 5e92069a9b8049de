"""A search, or a guard, in a framework's checkpoint, where frameworks save ``state_dict()`` alone.

Where all ranks hold the same weights one of them writes for all. Where they hold parts each writes its own.
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

NAME = "hdet_search"
"""What a search is called in a checkpoint of all ranks."""
GUARD = "hdet_guard"
"""The same of a guard."""


def search_of(scheduler: Any, *, alone: bool = False) -> dict[str, Any]:
    """What a search holds in tensors, with the losses of all ranks. Collective. Nothing where none is made.

    ``alone``: with the losses of this rank, where the others may not be there any more. No collective.
    """
    found = scheduler.search_state_dict() if getattr(scheduler, "search", None) is not None else {}
    if found and not alone:
        found["losses"] = [row for own in connect(None).gather_objects(found["losses"]) for row in own]
    return found


def holds_parts(optimizer: Any) -> bool:
    """Whether a rank holds parts of the weights: FSDP2, ZeRO."""
    return any(place(p) for group in optimizer.param_groups for p in group["params"])


def write_search(folder: str | os.PathLike[str], scheduler: Any) -> None:
    """Write a search into the folder of a checkpoint; no file is left by half. Collective."""
    search = search_of(scheduler)
    if search:
        _write(_file(folder, scheduler.optimizer), search, scheduler.optimizer)


def read_search(folder: str | os.PathLike[str], scheduler: Any) -> None:
    """Go on with a search, once scheduler and optimizer are loaded. Collective. Nothing where they were left out.

    A checkpoint without it is one of a run without hdet's callback: the scheduler itself says what is missing.
    """
    running = getattr(scheduler, "search", None)
    if running is None or not running.is_just_loaded:
        return
    file = _file(folder, scheduler.optimizer)
    search = _read(file)
    if search is not None:
        scheduler.load_search_state_dict(search)
    elif others := sorted(path.name for path in file.parent.glob(f"{NAME}*.pt")):
        _warn(
            f"the search in {file.parent} was saved as {others[0]}, by other ranks than those here, which look for "
            f"{file.name}: parts of weights fit the ranks that they were saved by; resume on as many"
        )


def guard_state(guard: Guard) -> dict[str, Any]:
    """What a guard holds, with the losses of all ranks. Collective."""
    with guard.gathered(connect(None)):
        return guard.state_dict()


def write_guard(folder: str | os.PathLike[str], guard: Guard, optimizer: Any) -> None:
    """Write a guard into the folder of a checkpoint; no file is left by half. Collective."""
    _write(_file(folder, optimizer, GUARD), guard_state(guard), optimizer)


def read_guard(folder: str | os.PathLike[str], guard: Guard, optimizer: Any) -> None:
    """Go on with a guard. Collective."""
    file = _file(folder, optimizer, GUARD)
    state = _read(file)
    if state is not None:
        guard.load_state_dict(state)
    else:
        warn_of_no_guard(file)


def warn_of_no_guard(path: str | os.PathLike[str]) -> None:
    """A run goes on from a checkpoint that has no guard for these ranks."""
    _warn(
        f"no hdet.Guard of as many ranks was saved at {path}: the guard begins anew, with new snapshots. To keep it, "
        "save the checkpoint with the same callback"
    )


def _write(file: Path, state: dict[str, Any], optimizer: Any) -> None:
    if connect(None).rank == 0 or holds_parts(optimizer):
        with replacing(file) as draft:
            torch.save(state, draft)


def _read(file: Path) -> dict[str, Any] | None:
    """None unless every rank has its file. Collective."""
    there = all(connect(None).gather_objects(file.exists()))
    return torch.load(file, map_location="cpu", weights_only=True) if there else None


def _warn(words: str) -> None:
    """On one rank."""
    if connect(None).rank == 0:
        warnings.warn(words, ResumeWarning, stacklevel=users_level())


def part_name(optimizer: Any, name: str = NAME) -> str:
    """What a search is called in a checkpoint: one name for all, or one for each rank that holds parts."""
    group = connect(None)
    return f"{name}_{group.rank}_of_{group.replica_index.size}" if holds_parts(optimizer) else name


def _file(folder: str | os.PathLike[str], optimizer: Any, name: str = NAME) -> Path:
    return Path(folder) / f"{part_name(optimizer, name)}.pt"
