"""torch's own arguments of a OneCycleLR: torch checks them; what it takes but cannot compute with is refused here."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import OneCycleLR

from hdet.checks import must_be, shown
from hdet.journal.file import mapped
from hdet.parameters import copy_rate
from hdet.schedulers.arguments import LONGEST

SCHEDULE = tuple(name for name in inspect.signature(OneCycleLR).parameters if name not in ("optimizer", "verbose"))
"""Names of torch's arguments; ``verbose`` has no effect in torch 2.6, and is gone after it."""
LENGTHS = ("total_steps", "epochs", "steps_per_epoch")
_HIGHEST = torch.finfo(torch.float32).max
"""No rate above it can be multiplied with gradients."""


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
"""Arguments, what torch makes of them in a parameter group, and what that must be."""


def emptied(optimizer: Optimizer) -> Optimizer:
    """An optimizer of nothing with the same groups, for a scheduler to write to."""
    groups = [
        {key: copy.copy(value) for key, value in row.items() if key != "params"} for row in optimizer.param_groups
    ]
    empty = SGD([{"params": [torch.zeros(1)]} for _ in groups], lr=0.0)
    empty.defaults = optimizer.defaults
    for row, values in zip(empty.param_groups, groups, strict=True):
        row.update({**values, "lr": copy_rate(values["lr"])})
    return empty


def rehearsed(optimizer: Optimizer, schedule: dict[str, Any]) -> OneCycleLR:
    """torch's scheduler on an optimizer of nothing: what torch refuses, it refuses before anything is changed.

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
    """Of anything with which torch can compute as with a number; None: it cannot.

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
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    number = number_of(value)
    return shown(value) if number is None else number
