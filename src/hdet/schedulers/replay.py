"""What an earlier run has learned, for another one: its schedule."""

from __future__ import annotations

import bisect
import os
from collections.abc import Mapping, Sequence
from functools import partial

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from hdet.errors import ArgumentError, JournalError
from hdet.journal import JournalData, read_journal
from hdet.journal.lines import check_needed
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
    that the journal knows its square root is interpolated linearly, as the foot of a cosine goes. Of a search,
    the first step, whose length nobody knew, and what was gone back from are not repeated.

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
    start = _search_began(data)
    steps: list[int] = []
    values: list[float] = []
    total = (data.header.get("arguments") or {}).get("total_steps")
    total = total if isinstance(total, int) else None
    for before, record in zip([None, *data.rounds[:-1]], data.rounds, strict=True):
        began = int(before["step"]) if before is not None else 0
        ended = int(record["step"]) - 1  # base_before is the value at the round's last step
        for step, value in (
            (began, before["base"][g] if before is not None else None),
            (ended, record["base_before"][g]),
        ):
            is_new = not steps or step > steps[-1]
            if value is not None and step >= start and is_new and not (total and step >= total):
                steps.append(step)
                values.append(float(value))
        undone = record.get("went_back_to")
        while undone is not None and steps and steps[-1] >= undone:  # step N began from the weights of step N
            steps.pop()
            values.pop()
    if not steps:
        return [0], [float(data.rounds[-1]["base"][g])]
    if start > 0:
        steps.insert(0, 0)
        values.insert(0, values[0])
    return steps, values


def _search_began(data: JournalData) -> int:
    """The step from which on the length of steps was known; 0 where nothing was searched."""
    return max((int(r["step"]) for r in data.rounds if _is_first_step(r)), default=0)


def _is_first_step(record: Mapping[str, object]) -> bool:
    return str(record.get("event") or "").startswith(("first step", "restarted"))


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
