"""A search in the checkpoint of a framework that saves only ``state_dict()``.

If all ranks hold the same weights, one rank writes for all. If each holds a part of them (FSDP2, ZeRO), each rank
writes a file of its own.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from hdet.files import replacing
from hdet.ranks.group import connect
from hdet.ranks.shards import place

SEARCH = "hdet_search"
"""The name of a search in a checkpoint of all ranks."""
Folder = str | os.PathLike[str]


def search_state(scheduler: Any, *, alone: bool = False) -> dict[str, Any]:
    """The tensors of a search, with the losses of all ranks; empty if there is no search. Collective.

    ``alone``: with the losses of this rank only, because other ranks may have stopped. Not a collective.
    """
    state = scheduler.search_state_dict() if getattr(scheduler, "search", None) is not None else {}
    if state and not alone:
        state["losses"] = [row for own in connect(None).gather_objects(state["losses"]) for row in own]
    return state


def write_search(folder: Folder, scheduler: Any) -> None:
    """Write a search into the folder of a checkpoint, completely or not at all. Collective."""
    state = search_state(scheduler)
    if state:
        write(folder, SEARCH, scheduler.optimizer, state)


def read_search(folder: Folder, scheduler: Any) -> None:
    """Resume a search, once scheduler and optimizer are loaded. Does nothing if they were not loaded. Collective.

    If the checkpoint was saved without hdet's callback, or by another number of ranks that hold parts, the scheduler
    itself says what is missing.
    """
    search = getattr(scheduler, "search", None)
    if search is None or not search.steps.is_loaded:
        return
    state = read(folder, SEARCH, scheduler.optimizer)
    if state is not None:
        scheduler.load_search_state_dict(state)


def holds_parts(optimizer: Any) -> bool:
    """Whether each rank holds a part of the weights: FSDP2, ZeRO."""
    return any(place(p) for group in optimizer.param_groups for p in group["params"])


def name_on_rank(optimizer: Any, name: str) -> str:
    """The name in a checkpoint: one for all ranks, or one for each rank if it holds a part."""
    group = connect(None)
    return f"{name}_{group.rank}_of_{group.replica_index.size}" if holds_parts(optimizer) else name


def write(folder: Folder, name: str, optimizer: Any, state: dict[str, Any]) -> None:
    """Write a file for all ranks, or for this one if it holds a part."""
    if connect(None).rank == 0 or holds_parts(optimizer):
        with replacing(_file(folder, name, optimizer)) as draft:
            torch.save(state, draft)


def read(folder: Folder, name: str, optimizer: Any) -> dict[str, Any] | None:
    """What :func:`write` has written; None unless every rank has its file. Collective."""
    file = _file(folder, name, optimizer)
    complete = all(connect(None).gather_objects(file.exists()))
    return torch.load(file, map_location="cpu", weights_only=True) if complete else None


def _file(folder: Folder, name: str, optimizer: Any) -> Path:
    return Path(folder) / f"{name_on_rank(optimizer, name)}.pt"
