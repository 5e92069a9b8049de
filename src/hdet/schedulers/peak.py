"""The peak of a schedule: where its rising phase ends, known before the first step from a copy of the schedule."""

from __future__ import annotations

import bisect
import copy
import gc
import math
import time
import warnings
from collections.abc import Callable, Sequence
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer, lr_scheduler

from hdet.parameters import unwrapped
from hdet.schedulers.arguments import emptied

_REHEARSED = 10_000
"""How many steps of a schedule are rehearsed, one after the other."""
_POINTS = 4096
"""How many steps of a longer schedule are looked at; then those around the highest one are looked at again."""
_SECONDS = 0.6
"""The time limit for all of this."""
_CLOSE = 1e-3
"""A later peak must be higher by this part, or else the schedule's first one counts."""
_EQUAL = 1e-9
"""The same if every step was looked at: rates that are computed step by step are rounded."""
_ASKED = (
    lr_scheduler.LambdaLR,
    lr_scheduler.OneCycleLR,
    lr_scheduler.CyclicLR,
    lr_scheduler.CosineAnnealingWarmRestarts,
)
"""Schedules of torch that know their rates at any step, beside those that have a closed form by name."""
_NOT_LOOKED_INTO = (type, FunctionType, BuiltinFunctionType, ModuleType)
RatesAt = Callable[[int], list[float]]


class Peak(NamedTuple):
    """Where a schedule's rising phase ends."""

    step: int
    rates: list[float | None]
    """The rate of each parameter group at that step; None for a group that was added since."""


def peak_of(schedules: Sequence[tuple[Optimizer, Any]], steps: int, every: int, lead: int) -> Peak:
    """The first step at which the leading group's rate is highest. Neither schedules nor optimizers are touched.

    The first 10,000 steps of a schedule are rehearsed. torch's own schedules, and SequentialLR and ChainedScheduler of
    them, can be asked for any step: of a longer run 4096 steps are looked at, and those around the highest one. Of
    other schedules, and if time is up, the highest rate that was seen counts as the peak.

    Args:
        schedules: each with the optimizer that it writes to, in the order of the groups.
        steps: of the run.
        every: steps of training per step of the schedule.
        lead: the leading group.
    """
    ends, count = time.perf_counter() + _SECONDS, math.ceil(steps / every)
    copies = [_rehearsal(optimizer, schedule) for optimizer, schedule in schedules]
    asked = [_from_here(empty, own) for empty, own in copies]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no optimizer steps, and that schedulers are asked for a step
        peak, rates = _walk(copies, min(count, _REHEARSED), lead, ends)
        if count > _REHEARSED and None not in asked:
            later = _search(lambda t: [rate for one in asked if one is not None for rate in one(t)], count, lead, ends)
            if later is not None and later[1][lead] > rates[lead] * (1 + _CLOSE):
                peak, rates = later
    return Peak(peak * every, [*rates])


def _walk(copies: Sequence[tuple[Optimizer, Any]], count: int, lead: int, ends: float) -> tuple[int, list[float]]:
    """The highest of the first steps, and the rates there."""
    peak = 0
    highest: list[float] = []
    for t in range(count):
        rates = [rate for empty, _ in copies for rate in _held(empty)]
        if not highest or rates[lead] > highest[lead] * (1 + _EQUAL):
            peak, highest = t, rates
        if time.perf_counter() > ends:
            break
        for _, own in copies:
            own.step()
    return peak, highest


def _search(rates_at: RatesAt, count: int, lead: int, ends: float) -> tuple[int, list[float]] | None:
    """The same over all steps: a coarse grid first, then finer ones around the highest rate; None if time is up."""
    first, end = 0, count
    while True:
        stride = math.ceil((end - first) / _POINTS)
        looked, found = range(first, end, stride), []
        for t in looked:
            if time.perf_counter() > ends:
                return None
            found.append(rates_at(t)[lead])
        enough = max(found) * (1 - (_EQUAL if stride == 1 else _CLOSE))
        i = next(i for i, rate in enumerate(found) if rate >= enough)
        while i + 1 < len(found) and found[i + 1] > found[i] * (1 + _EQUAL):
            i += 1
        if stride == 1:
            return looked[i], rates_at(looked[i])
        first, end = max(looked[i] - stride + 1, 0), min(looked[i] + stride, count)


# -- copies of schedules ----------------------------------------------------------------------------------------------


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


def _held(optimizer: Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


def _from_here(optimizer: Optimizer, schedule: Any) -> RatesAt | None:
    """A function from the number of steps from now to the rates; None if the schedule has to make these steps."""
    asked = _by_epoch(optimizer, schedule)
    if asked is None:
        return None
    while not hasattr(schedule, "last_epoch"):
        schedule = schedule._schedulers[0]  # all parts of a ChainedScheduler are at one step
    begin = int(schedule.last_epoch)
    return lambda t: asked(begin + t)


def _by_epoch(optimizer: Optimizer, schedule: Any) -> RatesAt | None:
    """A function from the step to the rates, if the schedule is torch's own and can compute them for any step."""
    methods = [getattr(type(schedule), name, None) for name in ("step", "get_lr")]
    if any(getattr(method, "__module__", None) != lr_scheduler.__name__ for method in methods):
        return None
    children = [_by_epoch(optimizer, child) for child in getattr(schedule, "_schedulers", ())]
    known = [child for child in children if child is not None]
    if len(known) < len(children):
        return None
    if isinstance(schedule, lr_scheduler.SequentialLR):
        begins = [0, *schedule._milestones]

        def in_turn(epoch: int) -> list[float]:
            turn = bisect.bisect_right(begins, epoch, lo=1) - 1
            return known[turn](epoch - begins[turn])

        return in_turn
    if isinstance(schedule, lr_scheduler.ChainedScheduler):
        base = [float(group["initial_lr"]) for group in optimizer.param_groups]

        def multiplied(epoch: int) -> list[float]:
            each = [child(epoch) for child in known]
            return [rate and rate * math.prod(own[g] / rate for own in each) for g, rate in enumerate(base)]

        is_product = all(hasattr(child, "_get_closed_form_lr") for child in schedule._schedulers)
        return multiplied if is_product else None
    if not (isinstance(schedule, _ASKED) or hasattr(schedule, "_get_closed_form_lr")):
        return None

    def asked(epoch: int) -> list[float]:
        schedule.step(epoch)
        return _held(optimizer)

    return asked
