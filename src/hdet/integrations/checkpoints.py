"""A search and a guard in the checkpoint of a framework that saves only ``state_dict()`` of a scheduler, and no guard.

If all ranks hold the same weights, one rank writes for all. If each holds a part of them (FSDP2, ZeRO), each rank
writes a file of its own.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hdet.checks import users_level
from hdet.errors import ResumeWarning
from hdet.files import replacing
from hdet.ranks.group import connect
from hdet.ranks.shards import place
from hdet.rollback.guard import Guard
from hdet.schedulers.auto_scheduler import AutoScheduler

SEARCH, GUARD = "hdet_search", "hdet_guard"
"""Their names in a checkpoint of all ranks."""
Folder = str | os.PathLike[str]


def search_state(scheduler: Any, *, alone: bool = False) -> dict[str, Any]:
    """The tensors of a search, with the losses of all ranks; empty if there is no search. Collective.

    ``alone``: with the losses of this rank only, because other ranks may have stopped. Not a collective.
    """
    state = scheduler.search_state_dict() if isinstance(scheduler, AutoScheduler) else {}
    if state and not alone:
        state["losses"] = [row for own in connect(None).gather_objects(state["losses"]) for row in own]
    return state


def write_search(folder: Folder, scheduler: Any) -> None:
    """Write a search into the folder of a checkpoint, completely or not at all. Collective."""
    state = search_state(scheduler)
    if state:
        _write(folder, SEARCH, scheduler.optimizer, state)


def read_search(folder: Folder, scheduler: Any) -> None:
    """Resume a search, once scheduler and optimizer are loaded. Does nothing if they were not loaded. Collective.

    If the checkpoint was saved without hdet's callback, or by another number of ranks that hold parts, the scheduler
    itself says what is missing.
    """
    if isinstance(scheduler, AutoScheduler) and scheduler.search.steps.is_loaded:
        scheduler.load_search_state_dict(_read(folder, SEARCH, scheduler.optimizer))


class AccumulatingGuard(Guard):
    """Judges the mean loss of the batches of every step. A checkpoint has a file of it."""

    _accumulated: tuple[float | Tensor, ...] = ()
    """The losses of the batches since the last step."""

    def observe(self, loss: float | Tensor | None) -> None:
        """Count the loss of a batch, if this rank has one."""
        if loss is not None:
            self._accumulated += (loss.detach() if isinstance(loss, Tensor) else loss,)

    def end_step(self) -> None:
        """The optimizer has made its step."""
        losses, self._accumulated = self._accumulated, ()
        Guard.step(self, sum(losses) / len(losses) if losses else None)

    def write(self, folder: Folder) -> None:
        """Write the guard into the folder of a checkpoint, completely or not at all. Collective."""
        _write(folder, GUARD, self._optimizer, self.state_of_all())

    def read(self, folder: Folder) -> None:
        """Resume the guard from the folder of a checkpoint. Collective."""
        self.resume(_read(folder, GUARD, self._optimizer), folder)

    def resume(self, state: dict[str, Any] | None, checkpoint: Folder) -> None:
        """Load a state. If it is empty, warn on one rank, at the user's line, that the checkpoint had no guard."""
        if state:
            self.load_state_dict(state)
        elif connect(None).rank == 0:
            text = (
                f"no hdet.Guard of as many ranks was saved at {checkpoint}: the guard starts again; to keep it, save "
            )
            warnings.warn(f"{text}checkpoints with the same callback", ResumeWarning, stacklevel=users_level())


def has_parts(optimizer: Any) -> bool:
    """Whether each rank holds a part of the weights: FSDP2, ZeRO."""
    return any(place(p) for group in optimizer.param_groups for p in group["params"])


def name_on_rank(optimizer: Any, name: str) -> str:
    """The name in a checkpoint: one for all ranks, or one for each rank if it holds a part."""
    group = connect(None)
    return f"{name}_{group.rank}_of_{group.replica_index.size}" if has_parts(optimizer) else name


def _write(folder: Folder, name: str, optimizer: Any, state: dict[str, Any]) -> None:
    """Write a file for all ranks, or for this one if it holds a part."""
    if connect(None).rank == 0 or has_parts(optimizer):
        with replacing(_file(folder, name, optimizer)) as draft:
            torch.save(state, draft)


def _read(folder: Folder, name: str, optimizer: Any) -> dict[str, Any]:
    """What :func:`_write` has written; empty unless every rank has its file. Collective."""
    file = _file(folder, name, optimizer)
    complete = all(connect(None).gather_objects(file.exists()))
    return torch.load(file, map_location="cpu", weights_only=True) if complete else {}


def _file(folder: Folder, name: str, optimizer: Any) -> Path:
    return Path(folder) / f"{name_on_rank(optimizer, name)}.pt"
