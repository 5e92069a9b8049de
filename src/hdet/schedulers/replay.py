"""``hdet.schedule_from``: the schedule that an earlier run has found, read from its journal."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from hdet.errors import ArgumentError
from hdet.journal import JournalData
from hdet.journal.reading import Found, found_schedules
from hdet.optimizer import check_optimizer, put_rate, rate_names, unwrapped


def schedule_from(journal: str | os.PathLike[str] | JournalData, optimizer: Optimizer) -> LambdaLR:
    """The found schedule as a LambdaLR, to train again without the ensemble.

    Each parameter group takes the rate of its knob, by name: ``lr[1]`` is the second group's, ``lr[head]`` that of the
    group with the "name" head. A group that was added during the run has rate 0 until the step at which it was added.
    If the first group's rate is the only one in the journal, all groups take it. Between the steps of the journal the
    square root of the rate is interpolated linearly, which follows the end of a cosine; the fall of a trapezoid is
    computed. The first step of a search, and the steps that were rolled back, are left out.

    Args:
        journal: a file written by ``journal=``, or its data.
        optimizer: its rates are replaced.
    """
    optimizer = unwrapped(optimizer)
    check_optimizer(optimizer)
    found = found_schedules(journal)
    names = _rates_of(optimizer, list(found))
    for group in optimizer.param_groups:
        put_rate(group, 1.0)  # LambdaLR multiplies the rate that it finds
        group.pop("initial_lr", None)
    return LambdaLR(optimizer, [partial(_rate_at, found=found[name]) for name in names])


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


def _rate_at(t: int, found: Found) -> float:
    return found.at(t) if t >= found.begins else 0.0
