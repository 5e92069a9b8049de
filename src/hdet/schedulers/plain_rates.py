"""Schedulers that change the plain rates of any schedule of the user's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from hdet.checks import must_be
from hdet.errors import ArgumentError
from hdet.parameters import Rate, added_groups, copy_rate, group_counts, put_rate, unwrapped, with_added
from hdet.schedulers import loading
from hdet.schedulers.run import Run, WithRun


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
    if isinstance(schedule, WithRun):
        raise ArgumentError(
            "schedule is an hdet.OneCycleLR, which spreads the rates already; give torch's OneCycleLR as the schedule"
        )


class OnSchedule(WithRun):
    """A run on a schedule of the user's: what ``hdet.Ensemble`` and ``hdet.auto(..., schedule=...)`` have in common.

    It remembers the plain rates, which the schedule would give alone, because many schedules compute the next rate from
    the one in the optimizer.

    Args:
        optimizer: the optimizer that trains.
        schedule: writes plain rates; None: they stay.
        run: what makes of them the rates to train at.
    """

    _name: ClassVar[str]
    """What messages call it."""

    def __init__(self, optimizer: Optimizer, schedule: Schedule | None, run: Run) -> None:
        self.optimizer = optimizer
        self.schedule = schedule
        self._run = run
        self.last_epoch = 0
        self._plain: list[Rate] = self._held()
        """The plain rates of this step."""
        self._coming: list[Rate] | None = None
        """Those of the next step, if the schedule has made it already."""
        self._counts = group_counts(optimizer)
        run.begin(optimizer)

    def _take_in_new_groups(self) -> None:
        """Groups that were added to the optimizer follow the schedule from the next step on."""
        raise NotImplementedError

    # -- plain rates --------------------------------------------------------------------------------------------------

    def _new_groups(self) -> list[int]:
        """The numbers of groups that were added to the optimizer since: they have plain rates from now on."""
        new = added_groups(self.optimizer, self._counts)
        if new:
            held = self._held()
            self._plain = with_added(self._plain, {g: held[g] for g in new})
            if self._coming is not None:
                self._coming = with_added(self._coming, {g: held[g] for g in new})
            self._counts = group_counts(self.optimizer)
        return new

    def _step_schedule(self) -> None:
        """Go to the plain rates of the next step."""
        self._plain, self._coming = self._stepped() if self._coming is None else self._coming, None

    def _ahead(self, *metrics: float) -> list[Rate]:
        """The plain rates of the next step. The optimizer keeps its rates until then."""
        if self._coming is None:
            held = self._held()
            self._coming = self._stepped(*metrics)
            self._put(held)
        return self._coming

    def _stepped(self, *metrics: float) -> list[Rate]:
        """The rates after one step of the schedule, which is made once: most cannot be asked for a later step.

        ReduceLROnPlateau makes one only if there are metrics.
        """
        if self.schedule is None or (isinstance(self.schedule, ReduceLROnPlateau) and not metrics):
            return self._plain
        self._put(self._plain)
        self.schedule.step(*metrics)
        return self._held()

    def _held(self) -> list[Rate]:
        return [copy_rate(row["lr"]) for row in self.optimizer.param_groups]

    def _put(self, rates: Sequence[Rate]) -> None:
        for row, rate in zip(self.optimizer.param_groups, rates, strict=True):
            put_rate(row, rate)

    # -- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The same on every rank, and no collective. Save the optimizer and the model as usual."""
        self._take_in_new_groups()
        return {
            "step": self.last_epoch,
            "total_steps": self._run.total_steps,
            "plain_lrs": [copy_rate(lr) for lr in self._plain],
            "schedule": self.schedule.state_dict() if self.schedule is not None else None,
            "hdet": self._run.state(),
        }

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Raise an :class:`hdet.ArgumentError` unless :meth:`load_state_dict` can go on from it. Changes nothing."""
        loading.refuse_foreign(state_dict, set(self.state_dict()), self._name, f"a state of {self._name}")
        loading.refuse_other_groups(len(state_dict["plain_lrs"]), self.optimizer)
        loading.check_schedule(self.schedule, state_dict["schedule"])
        self._run.check(state_dict["hdet"])

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a checkpoint of any rank, at any number of replicas; its values replace the constructor's."""
        self.check_state_dict(state_dict)
        self.last_epoch = int(state_dict["step"])
        loading.tell_another_length(self._run.total_steps, state_dict["total_steps"], self._run.replica_index)
        if self.schedule is not None:
            self.schedule.load_state_dict(state_dict["schedule"])
        self._plain, self._coming = [copy_rate(lr) for lr in state_dict["plain_lrs"]], None
        self._run.load(state_dict["hdet"], state_dict["total_steps"], self.last_epoch)
        self._write_again()
        self._watch_loading()
