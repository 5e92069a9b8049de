"""The plain rates: what an optimizer would hold by its schedule alone, beside what is written into it."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from hdet.parameters import Rate, copy_rate, put_rate

__all__ = ["Peak", "PlainRates", "Schedule", "peak_of"]


class Schedule(Protocol):
    """Anything that writes learning rates into the optimizer: every torch scheduler, HF's, timm's by its adapter."""

    def step(self) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any], /) -> None: ...


class PlainRates:
    """A schedule steps on rates of its own: many schedules go on from what the optimizer holds.

    Args:
        optimizer: whose rates.
        schedule: writes them; None: they stay.
    """

    def __init__(self, optimizer: Optimizer, schedule: Schedule | None) -> None:
        self.optimizer = optimizer
        self.schedule = schedule
        self.values: list[Rate] = self._held()
        self._coming: list[Rate] | None = None
        """Of the next step, where the schedule has made it already."""

    def new_groups(self) -> range:
        """Groups that were added to the optimizer since: they follow the schedule from now on."""
        groups = self.optimizer.param_groups
        new = range(len(self.values), len(groups))
        self.values += [copy_rate(groups[g]["lr"]) for g in new]
        return new

    def step(self, metrics: float | None = None) -> None:
        """One step of the schedule; ReduceLROnPlateau makes one where there are metrics."""
        self.load(self._stepped(metrics) if self._coming is None else self._coming)

    def ahead(self, metrics: float | None = None) -> list[Rate]:
        """What :meth:`step` will make of the values. The optimizer keeps its rates until then."""
        if self._coming is None:
            held = self._held()
            self._coming = self._stepped(metrics)
            self._put(held)
        return self._coming

    def load(self, values: Sequence[Rate]) -> None:
        """Go on from these values."""
        self.values, self._coming = list(values), None

    def _stepped(self, metrics: float | None) -> list[Rate]:
        """Whoever looks ahead must not make the schedule's step twice: most can neither be asked nor be copied."""
        if self.schedule is None or (isinstance(self.schedule, ReduceLROnPlateau) and metrics is None):
            return self.values
        self._put(self.values)
        if isinstance(self.schedule, ReduceLROnPlateau) and metrics is not None:
            self.schedule.step(metrics)
        else:
            self.schedule.step()
        return self._held()

    def _held(self) -> list[Rate]:
        return [copy_rate(row["lr"]) for row in self.optimizer.param_groups]

    def _put(self, rates: Sequence[Rate]) -> None:
        for row, rate in zip(self.optimizer.param_groups, rates, strict=True):
            put_rate(row, rate)


class Peak(NamedTuple):
    """Where a schedule's rising phase ends."""

    step: int
    rates: list[float]
    """Of each parameter group, there."""


def peak_of(schedules: Sequence[tuple[Optimizer, Any]], steps: int, every: int, lead: int) -> Peak:
    """The first step at which the leading group's rate is highest, from a rehearsal. Neither is touched.

    Args:
        schedules: each with the optimizer that it writes to, in the order of the groups.
        steps: of the run.
        every: the schedule makes a step in so many.
        lead: the leading group.
    """
    rehearsed = [_rehearsal(own, schedule) for own, schedule in schedules]
    highest = Peak(0, [])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no optimizer steps
        for t in range(0, steps, every):
            rates = [float(row["lr"]) for own, _ in rehearsed for row in own.param_groups]
            if not highest.rates or rates[lead] > highest.rates[lead] * (1 + 1e-9):
                highest = Peak(t, rates)
            for _, step in rehearsed:
                step()
    return highest


def _rehearsal(optimizer: Optimizer, schedule: Any) -> tuple[Optimizer, Callable[[], Any]]:
    """An optimizer of nothing with the same groups, and the step of a copy of its schedule."""
    groups = [{key: copy.copy(v) for key, v in row.items() if key != "params"} for row in optimizer.param_groups]
    empty = SGD([{"params": [torch.zeros(1)]} for _ in groups], lr=0.0)
    for row, values in zip(empty.param_groups, groups, strict=True):
        row.update({key: copy_rate(value) if key == "lr" else value for key, value in values.items()})
    own = copy.deepcopy(schedule, {id(optimizer): empty})
    return empty, own.step
