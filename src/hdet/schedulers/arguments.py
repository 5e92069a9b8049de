"""Arguments that several schedulers have in common, and those of torch's OneCycleLR, which torch itself checks."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import OneCycleLR

from hdet.checks import is_int, is_real, must_be, shown
from hdet.errors import ArgumentError
from hdet.journal.file import mapped
from hdet.parameters import check_model, copy_rate, group_counts
from hdet.ranks.group import check_group
from hdet.ranks.shards import refuse_flat

PUBLISHED_SPREAD = 1 / 9
LONGEST = 2**53
"""The most steps of a run: floats, which the schedule computes with, cannot count further."""


class CommonArguments(NamedTuple):
    """Arguments that all schedulers take, as the user has given them."""

    group: Any
    model: Any
    journal: Any


def check_common(common: CommonArguments, optimizer: Optimizer) -> None:
    """Raise for arguments of the wrong type, and for parameters that FSDP1 has flattened."""
    check_group(common.group)
    check_model(common.model)
    refuse_flat(p for group in optimizer.param_groups for p in group["params"])


def refuse_given(given: Mapping[str, Any], defaults: Mapping[str, Any], whose: str, cure: str) -> None:
    """Raise for arguments that have no use here and were not left out.

    Args:
        given: arguments as the user has given them.
        defaults: those that have no use, with the values that they have if they are left out.
        whose: what they are for, in words.
        cure: what to do if that was meant.
    """
    for name, default in defaults.items():
        value = given[name]
        if type(value) is not type(default) or value != default:
            raise ArgumentError(f"{name} is for {whose}, but got {name}={shown(value)}; leave it out, or {cure}")


def check_length(total_steps: Any) -> None:
    """Raise unless ``total_steps`` can be the length of a run; None: it is unknown."""
    fits = total_steps is None or (is_int(total_steps) and 1 <= total_steps <= LONGEST)
    must_be(f"an integer from 1 to {LONGEST}, or None", fits, "leave it out if it is unknown", total_steps=total_steps)


def checked_length(sync_every: Any, default: int) -> int:
    """T, the steps of a round: ``sync_every``, or the default if it is None."""
    if sync_every is None:
        return default
    fits = is_int(sync_every) and 1 <= sync_every <= LONGEST
    must_be(f"an integer, at least 1 and at most {LONGEST}", fits, f"leave it out for {default}", sync_every=sync_every)
    return int(sync_every)


def rate_names(optimizer: Optimizer) -> list[str]:
    """The names of the learning rates of all parameter groups. They do not change when a group is added.

    ``lr[2]`` is that of the third group; ``lr[0.2]`` the same of the first of several optimizers.
    """
    counts = group_counts(optimizer)
    if len(counts) == 1:
        return [f"lr[{g}]" for g in range(counts[0])]
    return [f"lr[{part}.{g}]" for part, count in enumerate(counts) for g in range(count)]


SCHEDULE = tuple(name for name in inspect.signature(OneCycleLR).parameters if name not in ("optimizer", "verbose"))
"""Names of torch's arguments; ``verbose`` has no effect in torch 2.6, and is gone after it."""
LENGTHS = ("total_steps", "epochs", "steps_per_epoch")
_HIGHEST = torch.finfo(torch.float32).max
"""The highest rate that gradients can be multiplied by."""


def is_rate(rate: float) -> bool:
    """Whether weights can be trained at a rate."""
    return 0 <= rate <= _HIGHEST


_LEVELS: dict[str, tuple[str, str, Callable[[float], bool]]] = {
    "max_lr": ("max_lr", "finite and not below 0", is_rate),
    "div_factor": ("initial_lr", "a number that leaves rates finite", lambda rate: abs(rate) <= _HIGHEST),
    "final_div_factor": ("min_lr", "a number that leaves rates finite", lambda rate: abs(rate) <= _HIGHEST),
    "base_momentum": ("base_momentum", "a number", lambda momentum: not math.isnan(momentum)),
    "max_momentum": ("max_momentum", "a number", lambda momentum: not math.isnan(momentum)),
}
"""Arguments, what torch calls the value that it computes from them in a parameter group, and what it must be."""


def emptied(optimizer: Optimizer) -> Optimizer:
    """An optimizer without weights that has the same groups, for a scheduler to write to."""
    groups = [
        {key: copy.copy(value) for key, value in row.items() if key != "params"} for row in optimizer.param_groups
    ]
    empty = SGD([{"params": [torch.zeros(1)]} for _ in groups], lr=0.0)
    empty.defaults = optimizer.defaults
    for row, values in zip(empty.param_groups, groups, strict=True):
        row.update({**values, "lr": copy_rate(values["lr"])})
    return empty


def rehearsed(optimizer: Optimizer, schedule: dict[str, Any]) -> OneCycleLR:
    """torch's scheduler on an optimizer without weights: what torch refuses, it refuses before anything is changed.

    Raises an :class:`hdet.ArgumentError` for what torch takes though no finite rates come of it.
    """
    made = OneCycleLR(emptied(optimizer), **schedule)
    fits, cure = made.total_steps <= LONGEST, "count optimizer steps"
    must_be(f"at most {LONGEST}, also as epochs times steps_per_epoch", fits, cure, total_steps=made.total_steps)
    schedule["cycle_momentum"] = bool(schedule["cycle_momentum"])
    for name in ("pct_start", "last_epoch"):
        must_be("a number", not math.isnan(number_of(schedule[name]) or 0.0), "leave it out", **{name: schedule[name]})
    if schedule["last_epoch"] != -1:  # the levels are those of the run that is resumed
        return made
    for name, (level, rule, fits_rule) in _LEVELS.items():
        levels = [number_of(group.get(level, 0.0)) for group in made.optimizer.param_groups]
        fits = all(one is not None and fits_rule(one) for one in levels)
        must_be(rule, fits, "for instance 0.1" if name == "max_lr" else "leave it out", **{name: schedule[name]})
    return made


def number_of(value: Any) -> float | None:
    """The value of anything that torch can use as a number; None for anything else.

    >>> number_of(3), number_of(True), number_of("3"), number_of(1j), number_of(10**400), number_of([3])
    (3.0, 1.0, None, None, None, None)
    """
    if not isinstance(value, Tensor) and getattr(value, "ndim", 0) != 0:
        return None  # an array of one element would become a rate that is an array
    try:
        return float(value / 1.0)
    except Exception:  # whatever such an object raises
        return None


def told_of(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments for the journal, as JSON can hold them; without lengths."""
    return {name: mapped(v, _plain) for name, v in arguments.items() if name not in (*LENGTHS, "last_epoch")}


def alike_of(arguments: Mapping[str, Any]) -> dict[str, str]:
    """Arguments in words, for ranks to compare; without lengths, which are compared by themselves."""
    unused = () if arguments.get("cycle_momentum") else ("base_momentum", "max_momentum")
    told = told_of({name: value for name, value in arguments.items() if name not in unused})
    return {name: repr(mapped(value, _as_float)) for name, value in told.items()}


def _as_float(value: Any) -> Any:
    """25 and 25.0 are equal."""
    return float(value) if is_real(value) else value


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    number = number_of(value)
    return shown(value) if number is None else number
