"""What an earlier run has learned, for another one: its schedule."""

from __future__ import annotations

import bisect
import math
import os
from collections.abc import Sequence
from functools import partial

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from hdet.errors import ArgumentError, JournalError
from hdet.journal import JournalData, read_journal
from hdet.journal.file import check_needed
from hdet.parameters import check_optimizer, put_rate, unwrapped

Found = tuple[list[int], list[float]]
"""Steps in ascending order, and the base value from each of them on."""


def found_schedules(journal: str | os.PathLike[str] | JournalData) -> dict[str, Found]:
    """The base value of every knob over the steps of a run: at the beginning of each round, and at its end."""
    data = journal if isinstance(journal, JournalData) else read_journal(journal)
    if not data.rounds:
        raise ArgumentError("the journal has no round yet; give one of a run that has ended at least one")
    names = [str(name) for name in data.header.get("knobs") or ()]
    if not names:
        raise JournalError("the journal's header names no knobs; give a file written by journal=")
    for record in data.rounds:
        try:
            check_needed(record, ("base_before", "base"), len(names))
        except ValueError as error:
            raise JournalError(
                f"round {record.get('round')} of the journal is damaged: {error}; remove its line, or give another file"
            ) from error
    return {name: _points(data, g) for g, name in enumerate(names)}


def schedule_from(journal: str | os.PathLike[str] | JournalData, optimizer: Optimizer) -> LambdaLR:
    """The found schedule as a LambdaLR, to train again without the ensemble.

    Each parameter group takes the rate of its knob; with one rate in the journal, all groups take it. Between the steps
    of the journal the square root of the rate is interpolated linearly, which follows the end of a cosine. The first
    step of a search, and the steps that were rolled back, are left out.

    Args:
        journal: a file written by ``journal=``, or its data.
        optimizer: its rates are replaced.
    """
    optimizer = unwrapped(optimizer)
    check_optimizer(optimizer)
    rates = [found for name, found in found_schedules(journal).items() if name.startswith("lr")]
    groups = optimizer.param_groups
    if len(rates) not in (1, len(groups)):
        raise ArgumentError(
            f"the journal has {len(rates)} learning rates, but the optimizer has {len(groups)} parameter groups; build "
            "the optimizer with the groups of that run"
        )
    found = rates if len(rates) == len(groups) else rates * len(groups)
    for group in groups:
        put_rate(group, 1.0)  # LambdaLR multiplies the rate that it finds
        group.pop("initial_lr", None)
    return LambdaLR(optimizer, [partial(value_at, steps=steps, values=values) for steps, values in found])


def _points(data: JournalData, g: int) -> Found:
    first_steps = [r for r in data.rounds if str(r.get("event") or "").startswith(("first step", "restarted"))]
    start = max((int(r["step"]) for r in first_steps), default=0)  # before it nobody knew how long steps are
    total = {**(data.header.get("arguments") or {}), **data.rounds[-1]}.get("total_steps")  # it may have changed
    end = total if isinstance(total, int) and total else math.inf
    points: list[tuple[int, float]] = []
    known: list[tuple[int, float]] = []
    """Where the last round ended."""
    for record in data.rounds:
        known.append((int(record["step"]) - 1, record["base_before"][g]))  # the value at the round's last step
        for step, value in known:
            if start <= step < end and (not points or step > points[-1][0]):
                points.append((step, float(value)))
        known = [(int(record["step"]), record["base"][g])]
        undone = record.get("went_back_to")
        if undone is not None:  # step N began from the weights of step N
            points = [point for point in points if point[0] < undone]
    if not points:
        points = [(0, known[0][1])]
    elif start > 0:
        points.insert(0, (0, points[0][1]))
    return [step for step, _ in points], [float(value) for _, value in points]


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
