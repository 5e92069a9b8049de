"""The peak of a schedule: where its rising phase ends, known before the first step from a copy of the schedule."""

from __future__ import annotations

import copy
import gc
import math
import time
import warnings
from collections.abc import Sequence
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer

from hdet.parameters import unwrapped
from hdet.schedulers.arguments import emptied

_REHEARSED = 20_000
"""How many steps of a schedule are rehearsed."""
_SECONDS = 0.6
"""The time limit for them."""
_EQUAL = 1e-9
"""A later peak must be higher by this part, or else the first one counts: rates computed step by step are rounded."""
_NOT_LOOKED_INTO = (type, FunctionType, BuiltinFunctionType, ModuleType)


class Peak(NamedTuple):
    """Where a schedule's rising phase ends."""

    step: int
    rates: list[float | None]
    """The rate of each parameter group at that step; None for a group that was added since."""


def peak_of(schedules: Sequence[tuple[Optimizer, Any]], steps: int, every: int, lead: int) -> Peak:
    """The first step at which the leading group's rate is highest. Neither schedules nor optimizers are touched.

    The first 20,000 steps of a schedule are rehearsed, or as many as the time limit allows. If the rate still rises
    after them, the highest one that was seen counts as the peak.

    Args:
        schedules: each with the optimizer that it writes to, in the order of the groups.
        steps: of the run.
        every: steps of training per step of the schedule.
        lead: the leading group.
    """
    ends = time.perf_counter() + _SECONDS
    copies = [_rehearsal(optimizer, schedule) for optimizer, schedule in schedules]
    peak, highest = 0, _rates(copies)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no optimizer steps
        for t in range(1, min(math.ceil(steps / every), _REHEARSED)):
            if time.perf_counter() > ends:
                break
            for _, own in copies:
                own.step()
            rates = _rates(copies)
            if rates[lead] > highest[lead] * (1 + _EQUAL):
                peak, highest = t, rates
    return Peak(peak * every, [*highest])


def _rates(copies: Sequence[tuple[Optimizer, Any]]) -> list[float]:
    return [float(group["lr"]) for empty, _ in copies for group in empty.param_groups]


def _rehearsal(optimizer: Optimizer, schedule: Any) -> tuple[Optimizer, Any]:
    """An optimizer of nothing with the same groups, and a copy of its schedule. Models are not copied with it."""
    empty = emptied(optimizer)
    memo: dict[int, Any] = {}
    seen: set[int] = set()
    queue = [schedule]
    while queue:
        value = queue.pop()
        if id(value) in seen or isinstance(value, _NOT_LOOKED_INTO):
            continue
        seen.add(id(value))
        if isinstance(value, Optimizer) and unwrapped(value) is optimizer:
            memo[id(value)] = empty
        elif isinstance(value, (nn.Module, nn.Parameter)):
            memo[id(value)] = value
        else:
            queue += gc.get_referents(value)
    return empty, copy.deepcopy(schedule, memo)
