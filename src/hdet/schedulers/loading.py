"""Loading the state of a scheduler: whose it is, what must be said of it, and rates that an optimizer brings along."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar
from weakref import WeakSet, ref

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hdet.checks import shown, users_level
from hdet.errors import ArgumentError, ResumeWarning
from hdet.ranks.group import ReplicaIndex

Face = TypeVar("Face")
_watching: WeakSet[Any] = WeakSet()
"""Faces whose optimizer tells of being loaded."""
_SHOWN = 8
_KNOWN: tuple[tuple[str, set[str]], ...] = (
    ("the content of a whole file of hdet.save", {"hdet", "states", "values"}),
    ("a state of hdet.Ensemble", {"hdet", "plain_lrs"}),
    ("a state of hdet.OneCycleLR", {"hdet", "_schedule_phases"}),
    ("a state of torch's OneCycleLR", {"_schedule_phases", "total_steps"}),
    ("a state of torch's CosineAnnealingLR", {"T_max", "eta_min"}),
    ("a state of torch's LambdaLR", {"lr_lambdas"}),
    ("a state of torch's ReduceLROnPlateau", {"num_bad_epochs"}),
    ("a state of torch's SequentialLR", {"_schedulers", "_milestones"}),
    ("a state of another scheduler", {"last_epoch"}),
    ("a state of an optimizer", {"state", "param_groups"}),
    ("a state of a GradScaler", {"scale", "growth_factor"}),
)


class _Loaded(Protocol):
    is_just_loaded: bool
    """Between loading a checkpoint and the next step."""


def tell_another_length(mine: int | None, theirs: int | None, replica_index: ReplicaIndex) -> None:
    """The checkpoint's length replaces the constructor's, as in torch: the run ends where the file says."""
    if mine is not None and mine != theirs and replica_index.replica == 0:
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


def what_it_is(state: Any) -> str:
    """In words.

    >>> what_it_is({"state": {}, "param_groups": []})
    'a state of an optimizer'
    """
    if not isinstance(state, Mapping):
        return f"a {type(state).__name__} and no dict"
    if not state:
        return "an empty dict"
    keys = {str(key) for key in state}
    found = next((words for words, needed in _KNOWN if needed <= keys), None)
    if found is not None:
        return found
    if all(isinstance(value, Tensor) for value in state.values()):
        return "a state of a model"
    return f"a dict with the keys {shown(sorted(keys)[:_SHOWN])}"


def refuse_foreign(state: Any, needed: set[str], own: str, expected: str) -> None:
    """Raise unless a state has the keys that are needed.

    Args:
        state: what was given.
        needed: keys.
        own: the class whose state is expected.
        expected: that and what else is taken, in words.
    """
    keys = set(state) if isinstance(state, Mapping) else set()
    if needed <= keys:
        return
    found = what_it_is(state)
    missing = f" without {sorted(needed - keys)}" if found == f"a state of {own}" else ""
    raise ArgumentError(
        f"load_state_dict() was given {found}{missing}, but {expected} was expected; give it what state_dict() of a "
        f"{own} returned, or load the whole file by hdet.load"
    )


def check_schedule(schedule: Any, state: Any) -> None:
    """Raise if a state is not one of a torch scheduler, which would take it without looking."""
    if not isinstance(schedule, LRScheduler):
        return
    own = schedule.state_dict()
    missing = sorted(key for key in own if not key.startswith("_") and key not in state)
    if missing:
        raise ArgumentError(
            f"the checkpoint's schedule is {what_it_is(state)} without {missing}, but here it is a "
            f"{type(schedule).__name__}; build the ensemble with the schedule it was saved with"
        )
