"""Loading a checkpoint: what must be said of it, and rates that an optimizer brings with its own."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Protocol, TypeVar
from weakref import WeakSet, ref

from torch.optim import Optimizer

from hdet.checks import users_level
from hdet.distributed.group import Seat
from hdet.errors import ResumeWarning

__all__ = ["tell_another_length", "watch_loading"]

Face = TypeVar("Face")
_watching: WeakSet[Any] = WeakSet()
"""Faces whose optimizer tells of being loaded."""


class _Loaded(Protocol):
    is_just_loaded: bool
    """Between loading a checkpoint and the next step."""


def tell_another_length(mine: int | None, theirs: int | None, seat: Seat) -> None:
    """The checkpoint's length replaces the constructor's, as in torch: the run ends where the file says."""
    if mine is not None and mine != theirs and seat.replica == 0:
        length = "no known length" if theirs is None else f"{theirs} steps"
        warnings.warn(
            f"the checkpoint is of a run of {length}, but this scheduler was built with total_steps={mine}: the "
            "checkpoint's length counts, as in torch; build it with that, or load only the weights and begin a new "
            "run",
            ResumeWarning,
            stacklevel=users_level(),
        )


def watch_loading(optimizer: Optimizer, face: Face, run: _Loaded, rewrite: Callable[[Face], None]) -> None:
    """Let ``rewrite`` write this replica's values again if the optimizer is loaded after the face.

    An optimizer's checkpoint brings rank 0's values. The hook holds the face weakly: no reference cycle.
    """
    if face in _watching:
        return
    held, own = ref(face), ref(run)

    def after_load(_: Optimizer) -> None:
        found, mine = held(), own()
        if found is not None and mine is not None and mine.is_just_loaded:
            rewrite(found)

    try:
        optimizer.register_load_state_dict_post_hook(after_load)
    except AttributeError:  # a framework's wrapper that has no hooks: the next step() writes the values
        return
    _watching.add(face)
