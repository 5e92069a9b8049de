"""A search in a framework's checkpoint, where frameworks save ``state_dict()`` alone.

Where all ranks hold the same weights one of them writes for all. Where they hold parts each writes its own.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch

from hdet.checks import users_level
from hdet.distributed.group import connect
from hdet.distributed.shards import place
from hdet.errors import ResumeWarning
from hdet.files import replacing
from hdet.schedulers.onecycle import OneCycleLR
from hdet.schedulers.scheduled import ScheduledSearch

NAME = "hdet_search"
"""What a search is called in a checkpoint of all ranks."""


def search_of(scheduler: Any, *, alone: bool = False) -> dict[str, Any]:
    """What a search holds in tensors, with the losses of all ranks. Collective. Nothing where none is made.

    ``alone``: with the losses of this rank, where the others may not be there any more. No collective.
    """
    found = scheduler.search_state_dict() if isinstance(scheduler, (OneCycleLR, ScheduledSearch)) else {}
    if found and not alone:
        found["losses"] = [row for own in connect(None).gather_objects(found["losses"]) for row in own]
    return found


def holds_parts(scheduler: Any) -> bool:
    """Whether a rank holds parts of the weights: FSDP2, ZeRO."""
    return any(place(p) for group in scheduler.optimizer.param_groups for p in group["params"])


def write_search(folder: str | os.PathLike[str], scheduler: Any) -> None:
    """Write a search into the folder of a checkpoint; no file is left by half. Collective."""
    search, group = search_of(scheduler), connect(None)
    if search and (group.rank == 0 or holds_parts(scheduler)):
        with replacing(_file(folder, scheduler)) as draft:
            torch.save(search, draft)


def read_search(folder: str | os.PathLike[str], scheduler: Any) -> None:
    """Go on with a search, once scheduler and optimizer are loaded. Collective. Nothing where they were left out.

    A checkpoint without it is one of a run without hdet's callback: the scheduler itself says what is missing.
    """
    if not (isinstance(scheduler, (OneCycleLR, ScheduledSearch)) and scheduler._run.is_just_loaded):
        return
    file, group = _file(folder, scheduler), connect(None)
    if all(group.gather_objects(file.exists())):
        scheduler.load_search_state_dict(torch.load(file, map_location="cpu", weights_only=True))
    elif group.rank == 0 and (others := sorted(path.name for path in file.parent.glob(f"{NAME}*.pt"))):
        warnings.warn(
            f"the search in {file.parent} was saved as {others[0]}, by other ranks than those here, which look for "
            f"{file.name}: parts of weights fit the ranks that they were saved by; resume on as many",
            ResumeWarning,
            stacklevel=users_level(),
        )


def part_name(scheduler: Any) -> str:
    """What a search is called in a checkpoint: one name for all, or one for each rank that holds parts."""
    group = connect(None)
    return f"{NAME}_{group.rank}_of_{group.seat.size}" if holds_parts(scheduler) else NAME


def _file(folder: str | os.PathLike[str], scheduler: Any) -> Path:
    return Path(folder) / f"{part_name(scheduler)}.pt"
