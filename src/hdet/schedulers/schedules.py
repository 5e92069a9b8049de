"""Schedules of the user's: a scheduler of torch, or anything else that writes rates.

:class:`PlainRates` knows the rates that such a schedule would give alone, at this step and one step ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from hdet.checks import must_be
from hdet.errors import ArgumentError, HdetError
from hdet.optimizer import Rate, copy_rate, put_rates, unwrapped, with_added
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


def _has_keys_of(own: Mapping[str, Any], state: Any) -> bool:
    """Whether a state has the public keys of ``own``, and as many parts as a SequentialLR, say, each with its keys."""
    if not isinstance(state, Mapping):
        return False
    for key, value in own.items():
        if isinstance(value, list) and value and all(isinstance(part, Mapping) for part in value):
            theirs = state.get(key)
            if not isinstance(theirs, list) or len(theirs) != len(value) or not all(map(_has_keys_of, value, theirs)):
                return False
        elif key not in state and key not in _ONCE_TORCHS and not str(key).startswith("_"):
            return False
    return True


_ONCE_TORCHS = {"verbose"}
"""Public keys that torch's schedulers had up to 2.6: a state may come from a newer torch."""


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
            put_rates(self.optimizer, self.now)
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
                put_rates(self.optimizer, held)
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
        if not (state is None if self.schedule is None else _has_keys_of(self.schedule.state_dict(), state)):
            raise ArgumentError(
                f"the checkpoint's schedule is {state_in_words(state)}, but here it is a "
                f"{type(self.schedule).__name__}; build the scheduler with the schedule that it was saved with"
            )

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`saved`."""
        if self.schedule is not None:
            self.schedule.load_state_dict(state["schedule"])
        self.now, self._coming = [copy_rate(rate) for rate in state["plain_lrs"]], None

    def _held(self) -> list[Rate]:
        return [copy_rate(group["lr"]) for group in self.optimizer.param_groups]
