"""``hdet.auto(..., schedule=...)``: the rate is found on any schedule."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from hdet.auto.saving import ResumableSearch
from hdet.auto.telling import Found, found_html
from hdet.checks import Rule, count, number, some_rates
from hdet.errors import ArgumentError
from hdet.parameters import Rate, copy_rate, parts_of, put_rate
from hdet.schedulers.arguments import Ours, rate_names, search_of
from hdet.schedulers.plain_rates import OnSchedule, Schedule

_RISE = 0.1
"""The search climbs for this part of the run at least, also on a schedule that falls from its first step on (LOG, any
schedule)."""


def guesses_of(optimizer: Optimizer) -> list[float]:
    """The rates that a schedule was built on, or is to be."""
    return [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]


class AllSchedules:
    """The schedules of several optimizers as one."""

    def __init__(self, schedules: Sequence[Any]) -> None:
        self.schedules = list(schedules)

    def step(self) -> None:
        for schedule in self.schedules:
            schedule.step()

    def state_dict(self) -> dict[str, Any]:
        return {str(i): schedule.state_dict() for i, schedule in enumerate(self.schedules)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        for i, schedule in enumerate(self.schedules):
            schedule.load_state_dict(state_dict[str(i)])


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


class ScheduledSearch(OnSchedule[ResumableSearch]):
    """A schedule times a factor that is found in the run. Made by :func:`hdet.auto`.

    The schedule's rising phase is held at its peak, and the search climbs in its place. From the peak on the rate is
    the schedule times the factor.
    """

    _name = "hdet.auto"

    def __init__(
        self,
        optimizer: Optimizer,
        schedule: Schedule,
        *,
        total_steps: int,
        every: int,
        ours: Ours,
        go_back: bool,
    ) -> None:
        guesses = guesses_of(optimizer)
        lead = min(g for g, guess in enumerate(guesses) if guess > 0)
        schedules = schedule.schedules if isinstance(schedule, AllSchedules) else [schedule]
        kind = type(schedules[0]).__name__
        alike = {"lr": repr(guesses), "schedule": kind, "schedule_every": repr(every)}
        told = {
            "max_lr": "auto",
            "guess": guesses,
            "schedule": kind,
            "schedule_every": every,
            "go_back": go_back,
            "total_steps": total_steps,
        }
        run = search_of(optimizer, ours, guesses, total_steps, told, alike, go_back=go_back)
        self._peak = peak_of(list(zip(parts_of(optimizer), schedules, strict=True)), total_steps, every, lead)
        self._every = every
        super().__init__(optimizer, schedule, run)
        self._write_again()

    # -- the loop -----------------------------------------------------------------------------------------------------

    def step(self, loss: float | Tensor | None = None) -> None:
        """Observe a loss if one is given, end the round if one ends here, and go to the next step of the schedule."""
        t = self._step + 1
        self._take_in_new_groups()
        self._run.step(self.optimizer, self._step, t, loss, self._rates_at, self._rise)
        if t % self._every == 0:
            self._plain.step()
        self._step = t
        self._write_again()

    # -- values -------------------------------------------------------------------------------------------------------

    def get_last_lr(self) -> list[float]:
        """The rates of the parameter groups, as in torch's schedulers."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    @property
    def base_lrs_now(self) -> list[Rate]:
        """The rate of each parameter group."""
        return self._run.rates(self._values(self._step), self._step)

    def _values(self, t: int) -> list[Rate]:
        """The schedule at this step or at the next one, its rise held at the peak."""
        moves = t > self._step and t % self._every == 0
        values = self._plain.ahead() if moves else self._plain.values
        if not self._run.holds_rise or t >= self._peak.step:
            return list(values)
        added = values[len(self._peak.rates) :]
        return [*self._peak.rates, *added]

    def _rates_at(self, t: int) -> list[float]:
        return [float(value) for value in self._values(t)]

    def _rise(self) -> float:
        """Where the search's own climb ends: with the schedule's, but not at once where that has none."""
        return max(float(self._peak.step), _RISE * (self._run.total_steps or 0))

    def _take_in_new_groups(self) -> None:
        new = self._plain.new_groups()
        if new:
            self._run.grow(rate_names(new.start, new.stop))

    def _write_again(self) -> None:
        rates = self._run.rates(self._values(self._step), self._step)
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            put_rate(group, rate)

    # -- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The same on every rank, and no collective. Save the optimizer and the model as usual."""
        return {**super().state_dict(), "peak": self._peak.step, "peak_lrs": list(self._peak.rates)}

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Raise an :class:`hdet.ArgumentError` unless :meth:`load_state_dict` can go on from it. Changes nothing."""
        super().check_state_dict(state_dict)
        self._run.check(state_dict["hdet"])
        saved, mine = state_dict["total_steps"], self._run.total_steps
        if saved != mine:  # the schedule's own length stands in its own state, and nobody knows where
            raise ArgumentError(
                f"total_steps must be {saved} as in the run that was saved, since its schedule ends there, but got "
                f"total_steps={mine}; make the schedule as it was, and the scheduler with total_steps={saved}, or "
                f"begin a new run from the weights with lr={self._run.rate_in(state_dict['hdet']):.2g}, the rate that "
                "was found"
            )

    def _rules(self) -> dict[str, Rule]:
        peak = {"peak": number, "peak_lrs": some_rates}  # fewer, where groups were added since
        return {**super()._rules(), "total_steps": count(1), **peak}

    def _load_run(self, state_dict: Mapping[str, Any]) -> None:
        self._run.load(state_dict["hdet"], state_dict["total_steps"], self._step)
        self._peak = Peak(int(state_dict["peak"]), list(state_dict["peak_lrs"]))

    @property
    def found(self) -> Found:
        """What was found so far: the peak rate, whether it has settled, how often it was rolled back."""
        return self._run.memory.told

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return found_html(self.found, self._step, self._run.total_steps, self.get_last_lr()[0])

    def search_state_dict(self) -> dict[str, Any]:
        """As in :class:`hdet.OneCycleLR`."""
        return self._run.tensors(self.optimizer, self._step)

    def check_search_state_dict(self, search: Mapping[str, Any], state_dict: Mapping[str, Any]) -> None:
        """As in :class:`hdet.OneCycleLR`."""
        self._run.check_tensors(search, self.optimizer, state_dict["step"])

    def load_search_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """As in :class:`hdet.OneCycleLR`."""
        self._run.load_tensors(state_dict, self.optimizer, self._step)
