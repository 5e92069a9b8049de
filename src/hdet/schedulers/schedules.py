"""Schedules of the user's: a scheduler of torch, a function of the step, or anything that writes rates.

:class:`PlainRates` knows the rates that such a schedule would give alone, at this step and one step ahead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from hdet.checks import is_real, must_be, shown
from hdet.errors import ArgumentError, HdetError
from hdet.optimizer import Rate, copy_rate, put_rate, unwrapped, with_added
from hdet.ranks.agreement import RankGroup
from hdet.state import state_in_words


class Schedule(Protocol):
    """Anything that writes learning rates into the optimizer: every torch scheduler, HF's, timm's by its adapter."""

    @property
    def step(self) -> Callable[..., None]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any], /) -> None: ...


def check_schedule_of(optimizer: Optimizer, schedule: object) -> None:
    """Raise unless something is a schedule of this optimizer."""
    has_step = callable(getattr(schedule, "step", None))
    must_be("an object with step(), as torch's schedulers", has_step, "give the scheduler", schedule=schedule)
    if unwrapped(getattr(schedule, "optimizer", optimizer)) is not optimizer:
        raise ArgumentError("schedule belongs to another optimizer; build it on the one that is given")
    if isinstance(getattr(schedule, "rank_group", None), RankGroup):
        raise ArgumentError(
            f"schedule is hdet's {type(schedule).__name__}, which finds or spreads the rates already; give torch's "
            "scheduler, for instance OneCycleLR"
        )


def emptied(optimizer: Optimizer) -> Optimizer:
    """A stand-in for an optimizer: it has the same groups without weights, for a scheduler to write to."""
    empty = SGD([{"params": [torch.zeros(1)]} for _ in optimizer.param_groups], lr=0.0)
    empty.defaults = dict(optimizer.defaults)
    for row, own in zip(empty.param_groups, optimizer.param_groups, strict=True):
        row.update({key: number_of_its_own(value) for key, value in own.items() if key != "params"})
    return empty


def number_of_its_own(value: Any) -> Any:
    """torch writes into a number that is a tensor. On the host, where reading it does not wait for a device."""
    return value.detach().cpu().clone() if isinstance(value, Tensor) and value.numel() == 1 else value


class StepFunction:
    """A scheduler that multiplies an optimizer's own rates by a function of the step.

    Args:
        optimizer: one, or several seen as one.
        function: from a step to a factor. It is called once for each step, and never for one after the last.
        steps: of the run.
    """

    def __init__(self, optimizer: Optimizer, function: Callable[[int], Any], steps: int) -> None:
        self.optimizer, self.function, self.steps, self.last_epoch = optimizer, function, steps, 0
        self._write()

    def step(self) -> None:
        """Go to the next step."""
        self.last_epoch += 1
        self._write()

    def _write(self) -> None:
        factor = self._factor(min(self.last_epoch, self.steps - 1))
        for group in self.optimizer.param_groups:
            if "initial_lr" not in group:
                group["initial_lr"] = copy_rate(group["lr"])
            put_rate(group, group["initial_lr"] * factor)

    def _factor(self, t: int) -> float:
        """What the function says. Raises unless rates can be multiplied by it."""
        answer = answer_of(self.function, t)
        number = number_of(answer)
        if number is not None and 0 <= number < math.inf:
            return number
        if isinstance(answer, HdetError):
            raise answer
        raise ArgumentError(
            f"schedule must give a finite number, not below 0, for each step from 0 to {self.steps - 1}, but at step "
            f"{t} it {in_words(answer)}; for instance schedule=lambda t: 1 - t / {self.steps}"
        ) from (answer if isinstance(answer, Exception) else None)

    def state_dict(self) -> dict[str, Any]:
        """The step. The function is not saved, and rates are the optimizer's."""
        return {"last_epoch": self.last_epoch}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`."""
        self.last_epoch = int(state_dict["last_epoch"])


def answer_of(function: Callable[[Any], Any], given: Any) -> Any:
    """What a function of the user's returns, or the exception that it raises."""
    try:
        return function(given)
    except Exception as error:
        return error


def in_words(answer: Any) -> str:
    """An answer, for messages."""
    if isinstance(answer, Exception):
        return f"raised {type(answer).__name__}: {shown(str(answer))}"
    return f"returned {shown(answer)}"


def number_of(value: Any) -> float | None:
    """A number, also in an array without dimensions; None if it is no number."""
    value = value.item() if getattr(value, "shape", None) == () else value
    return float(value) if is_real(value) else None


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


def _fits(schedule: Schedule, state: Any) -> bool:
    """Whether a schedule can go on from a state, as far as its keys show it."""
    if isinstance(schedule, AllSchedules):
        parts = {str(i): one for i, one in enumerate(schedule.schedules)}
        return isinstance(state, Mapping) and all(key in state and _fits(one, state[key]) for key, one in parts.items())
    if isinstance(schedule, (LRScheduler, StepFunction)):
        return _has_keys_of(schedule.state_dict(), state)
    return state is not None


def _has_keys_of(own: Mapping[str, Any], state: Any) -> bool:
    """Whether a state has the public keys of ``own``, and as many parts as a SequentialLR, say, each with its keys."""
    if not isinstance(state, Mapping):
        return False
    for key, value in own.items():
        if isinstance(value, list) and value and all(isinstance(part, Mapping) for part in value):
            theirs = state.get(key)
            if not isinstance(theirs, list) or len(theirs) != len(value) or not all(map(_has_keys_of, value, theirs)):
                return False
        elif key not in state and not key.startswith("_"):
            return False
    return True


class PlainRates:
    """The rates that a schedule would give alone.

    They are remembered, because many schedules compute the next rate from the one in the optimizer, where other rates
    stand.

    Args:
        optimizer: the optimizer that trains.
        schedule: writes the rates; None: they stay.
    """

    def __init__(self, optimizer: Optimizer, schedule: Schedule | None) -> None:
        self.optimizer = optimizer
        self.schedule = schedule
        self.now: list[Rate] = self._held()
        """The rates of this step."""
        self._coming: list[Rate] | None = None
        """Those of the next step, if the schedule has made it already."""
        self._has_grown = False
        """Whether a group was added, of which the schedule may know nothing."""

    def ahead(self, *metrics: float) -> list[Rate]:
        """The rates of the next step of the schedule, which is made once: most cannot be asked for a later step.

        The optimizer keeps its rates. ReduceLROnPlateau makes a step only if there are metrics.
        """
        if self._coming is None:
            if self.schedule is None or (isinstance(self.schedule, ReduceLROnPlateau) and not metrics):
                return self.now
            held = self._held()
            self.put(self.now)
            try:
                self.schedule.step(*metrics)
                self._coming = self._held()
            except (KeyError, IndexError, ValueError) as error:
                if not self._has_grown or isinstance(error, HdetError):
                    raise
                raise ArgumentError(
                    f"schedule is a {type(self.schedule).__name__}, which has no rate for a parameter group that was "
                    "added after it was built; give a function of the step, for instance schedule=lambda t: 1 - t / "
                    "1000, or the group from the beginning, with weights that do not require gradients yet"
                ) from error
            finally:
                self.put(held)
        return self._coming

    def step(self) -> None:
        """Go to the rates of the next step."""
        self.now, self._coming = self.ahead(), None

    def grow(self, rates: Mapping[int, Rate]) -> None:
        """Groups were added to the optimizer; their plain rates, by their numbers."""
        self._has_grown = True
        self.now = with_added(self.now, rates)
        if self._coming is not None:
            self._coming = with_added(self._coming, rates)

    def saved(self) -> dict[str, Any]:
        """The rates, and the schedule's own state; for a checkpoint."""
        schedule = self.schedule.state_dict() if self.schedule is not None else None
        return {"plain_lrs": [copy_rate(rate) for rate in self.now], "schedule": schedule}

    def check(self, state: Any) -> None:
        """Raise if a state is not one of this schedule. torch's schedulers would load it without checking."""
        if not (_fits(self.schedule, state) if self.schedule is not None else state is None):
            raise ArgumentError(
                f"the checkpoint's schedule is {state_in_words(state)}, but here it is a "
                f"{type(self.schedule).__name__}; build the scheduler with the schedule that it was saved with"
            )

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`saved`."""
        if self.schedule is not None:
            self.schedule.load_state_dict(state["schedule"])
        self.now, self._coming = [copy_rate(rate) for rate in state["plain_lrs"]], None

    def put(self, rates: Sequence[Rate]) -> None:
        """Write rates into the optimizer."""
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            put_rate(group, rate)

    def _held(self) -> list[Rate]:
        return [copy_rate(group["lr"]) for group in self.optimizer.param_groups]
