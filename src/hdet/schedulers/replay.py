"""``hdet.schedule_from``: the schedule that an earlier run has found, read from its journal."""

from __future__ import annotations

import bisect
import math
import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from hdet.checks import reading
from hdet.errors import ArgumentError
from hdet.events import Event
from hdet.journal import JournalData, read_journal
from hdet.parameters import check_optimizer, put_rate, unwrapped
from hdet.schedulers.arguments import rate_names

Found = tuple[list[int], list[float]]
"""Steps in ascending order, and the base value from each of them on."""


def found_schedules(journal: str | os.PathLike[str] | JournalData) -> dict[str, Found]:
    """The base value of every knob over the steps of a run: at the beginning of each round, and at its end."""
    data = journal if isinstance(journal, JournalData) else read_journal(journal)
    if not data.rounds:
        raise ArgumentError("the journal has no round yet; give one of a run that has ended at least one")
    with reading("the journal", "it is damaged: give another file"):
        return {name: _points(data, name, begins) for name, begins in _beginnings(data).items()}


def schedule_from(journal: str | os.PathLike[str] | JournalData, optimizer: Optimizer) -> LambdaLR:
    """The found schedule as a LambdaLR, to train again without the ensemble.

    Each parameter group takes the rate of its knob, by name: ``lr[1]`` is the second group's, ``lr[head]`` that of the
    group with the "name" head. A group that was added during the run has rate 0 until the step at which it was added.
    If the first group's rate is the only one in the journal, all groups take it. Between the steps of the journal the
    square root of the rate is interpolated linearly, which follows the end of a cosine. The first step of a search,
    and the steps that were rolled back, are left out.

    Args:
        journal: a file written by ``journal=``, or its data.
        optimizer: its rates are replaced.
    """
    optimizer = unwrapped(optimizer)
    check_optimizer(optimizer)
    data = journal if isinstance(journal, JournalData) else read_journal(journal)
    found, begins = found_schedules(data), _beginnings(data)
    names = _rates_of(optimizer, list(found))
    for group in optimizer.param_groups:
        put_rate(group, 1.0)  # LambdaLR multiplies the rate that it finds
        group.pop("initial_lr", None)
    return LambdaLR(optimizer, [partial(_rate_at, begins=begins[name], found=found[name]) for name in names])


def _rates_of(optimizer: Optimizer, knobs: Sequence[str]) -> list[str]:
    """For each parameter group the name of the knob in the journal that is its rate."""
    rates = [name for name in knobs if name.startswith("lr[") and name.endswith("]")]
    named = [f"lr[{group['name']}]" if "name" in group else "" for group in optimizer.param_groups]
    pairs = list(zip(named, rate_names(optimizer), strict=True))
    own = [name if name in rates else number for name, number in pairs]
    if len(rates) == 1 and (rates[0] == own[0] or rates[0] not in own):
        return rates * len(own)
    if len(rates) > len(own) or any(name not in rates for name in own):
        raise ArgumentError(
            f"the journal has {len(rates)} learning rates, {rates}, but those of the optimizer's {len(own)} parameter "
            f"groups are called {[name or number for name, number in pairs]}; build the optimizer with the groups of "
            'that run, in their order or with their names: {"params": ..., "name": "head"} has lr[head]'
        )
    return own


def _knobs(data: JournalData, record: Mapping[str, Any]) -> list[str]:
    """The names of the values in the lists of a round: the header's, unless groups were added."""
    return [str(name) for name in record.get("knobs") or data.header["knobs"]]


def _beginnings(data: JournalData) -> dict[str, int]:
    """Every knob, and the step from which it exists: the one at which its group was added, or 0."""
    found: dict[str, int] = {}
    before = 0
    for record in data.rounds:
        for name in _knobs(data, record):
            found.setdefault(name, before)
        found |= record.get("added") or {}
        before = int(record["step"])
    return found


def _points(data: JournalData, name: str, begins: int) -> Found:
    first_steps = [r for r in data.rounds if r.get("event") in (Event.FIRST_STEP, Event.RESTARTED)]
    start = max((int(r["step"]) for r in first_steps), default=0)  # earlier rates are arbitrary
    total = {**(data.header.get("arguments") or {}), **data.rounds[-1]}.get("total_steps")  # it may have changed
    end = total if isinstance(total, int) and total else math.inf
    points: list[tuple[int, float]] = []
    known: list[tuple[int, float]] = []
    """Step and value at the end of the last round."""
    for record in data.rounds:
        names = _knobs(data, record)
        if name not in names:
            continue
        g = names.index(name)
        known.append((int(record["step"]) - 1, record["base_before"][g]))  # the value at the round's last step
        for step, value in known:
            if start <= step < end and (not points or step > points[-1][0]):
                points.append((step, float(value)))
        known = [(int(record["step"]), record["base"][g])]
        undone = record.get("rolled_back_to")
        if undone is not None:  # step N began from the weights of step N
            points = [point for point in points if point[0] < undone]
    if not points:
        points = [(begins, known[0][1])]
    elif start > 0 or begins > 0:
        points = [(begins, points[0][1]), *(point for point in points if point[0] > begins)]
    return [step for step, _ in points], [float(value) for _, value in points]


def _rate_at(t: int, begins: int, found: Found) -> float:
    return value_at(t, *found) if t >= begins else 0.0


def value_at(t: int, steps: Sequence[int], values: Sequence[float]) -> float:
    """The value at a step: between two known ones its square root is interpolated linearly; outside the nearest.

    >>> [value_at(t, [1, 3], [1.0, 9.0]) for t in (0, 2, 9)]
    [1.0, 4.0, 9.0]
    """
    i = bisect.bisect_right(steps, t)
    if i in (0, len(steps)):
        return values[max(i - 1, 0)]
    done = (t - steps[i - 1]) / (steps[i] - steps[i - 1])
    before, after = values[i - 1], values[i]
    if done == 0:
        return before
    if before < 0 or after < 0:
        return before + (after - before) * done
    return float((before**0.5 * (1 - done) + after**0.5 * done) ** 2)
