"""Loading the state of a scheduler: whether it fits, and what the user is told.

A state is refused before anything is changed. torch itself loads any dict without checking it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hdet.checks import is_int, is_real, shown, users_level
from hdet.errors import ArgumentError, ResumeWarning
from hdet.ranks.group import ReplicaIndex
from hdet.schedulers.step_function import StepFunction

NEEDED = {"total_steps", "last_epoch", "base_lrs", "_last_lr", "_step_count"}
"""Keys of a state of torch's OneCycleLR, in every version."""
_SHOWN = 8


def tell_another_length(mine: int | None, theirs: int | None, replica_index: ReplicaIndex) -> None:
    """Warn if the checkpoint's length differs from the constructor's, which it replaces, as in torch."""
    if mine is not None and mine != theirs and replica_index.replica == 0:
        length = "no known length" if theirs is None else f"{theirs} steps"
        warnings.warn(
            f"the checkpoint is of a run of {length}, but this scheduler was built with total_steps={mine}: the "
            "checkpoint's length counts, as in torch; build it with that, or load only the weights and begin a new "
            "run",
            ResumeWarning,
            stacklevel=users_level(),
        )


def refuse_foreign(state: Any, needed: set[str], own: str, expected: str) -> None:
    """Raise unless a state is a dict with the keys that are needed.

    Args:
        state: what the user has given.
        needed: the keys.
        own: the class whose state is expected.
        expected: that state, and others that can be loaded, in words.
    """
    if isinstance(state, Mapping) and needed <= set(state):
        return
    raise ArgumentError(
        f"load_state_dict() was given {_in_words(state)}, but {expected} was expected; give it what state_dict() of a "
        f"{own} returned, or load the whole file by hdet.load"
    )


def _in_words(state: Any) -> str:
    if not isinstance(state, Mapping):
        return f"a {type(state).__name__}"
    return f"a dict with the keys {shown(sorted(map(str, state))[:_SHOWN])}"


def check_schedule(schedule: Any, state: Any) -> None:
    """Raise if a state is not one of this schedule. torch's schedulers would load it without checking."""
    is_known = isinstance(schedule, (LRScheduler, StepFunction)) and state is not None
    missing = [key for key in schedule.state_dict() if not key.startswith("_") and key not in state] if is_known else []
    if missing or (schedule is None) != (state is None):
        raise ArgumentError(
            f"the checkpoint's schedule is {_in_words(state)}, but here it is a {type(schedule).__name__}; build the "
            "scheduler with the schedule that it was saved with"
        )


def refuse_mangled(state: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raise unless torch's part of a state has values of the kinds that the scheduler has itself.

    torch would load them, and fail at a later step. What ``own`` does not have is left to torch.
    """
    for key, mine in sorted(own.items()):
        is_whole = key not in _COUNTS or is_int(state[key]) or (key == "total_steps" and state[key] == math.inf)
        if key in state and not (_is_alike(state[key], mine) and is_whole):
            raise ArgumentError(
                f"the checkpoint's {key} must be {_KINDS.get(type(mine), 'as here')}, as {shown(mine)} is, but it is "
                f"{shown(state[key])}; the checkpoint is damaged: load an earlier one"
            )


_COUNTS = {"total_steps", "last_epoch", "_step_count"}
_KINDS = {bool: "True or False", int: "a number", float: "a number", str: "a word", list: "a list of its items"}
_WORDS = {"cos", "linear", "trapezoid", "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum"}
"""Of a OneCycleLR: how it anneals, and the levels between which its phases go."""


def _is_alike(value: Any, mine: Any) -> bool:
    """Whether a value is of the same kind; lists and dicts by what they hold."""
    if isinstance(mine, bool):
        return isinstance(value, bool)
    if isinstance(mine, str):
        return isinstance(value, str) and value in _WORDS
    if isinstance(mine, list):
        is_filled = isinstance(value, (list, tuple)) and bool(value)
        return is_filled and all(_is_alike(one, mine[0]) for one in value)
    if isinstance(mine, Mapping):
        return isinstance(value, Mapping) and all(key in value and _is_alike(value[key], mine[key]) for key in mine)
    if is_real(mine) or isinstance(mine, Tensor):
        number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        return is_real(number) and not math.isnan(number)
    return True


def refuse_other_groups(rates: int, optimizer: Optimizer) -> None:
    """Raise unless a state, with its number of rates, is of an optimizer with as many parameter groups."""
    groups = len(optimizer.param_groups)
    if rates != groups:
        raise ArgumentError(
            f"the checkpoint has the rates of {rates} parameter groups, but the optimizer has {groups}; build the "
            "optimizer as it was when it was saved, or load the right checkpoint"
        )
