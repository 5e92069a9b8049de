"""Any schedule of the user's: the plain rates that it would give alone, and the schedulers that change them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from hdet.checks import must_be, shown
from hdet.errors import ArgumentError
from hdet.parameters import Rate, added_groups, copy_rate, group_counts, put_rate, unwrapped, with_added
from hdet.schedulers.loading import check_schedule, refuse_foreign, tell_another_length, watch_loading
from hdet.schedulers.run import Run, WithRun

AnyRun = TypeVar("AnyRun", bound=Run)


class Schedule(Protocol):
    """Anything that writes learning rates into the optimizer: every torch scheduler, HF's, timm's by its adapter."""

    def step(self) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any], /) -> None: ...


def check_schedule_of(optimizer: Optimizer, schedule: object) -> None:
    """Raise unless something is a schedule of this optimizer; None leaves the rates as they are."""
    if schedule is None:
        return
    has_step = callable(getattr(schedule, "step", None))
    must_be("an object with step(), as torch's schedulers, or None", has_step, "give the scheduler", schedule=schedule)
    if unwrapped(getattr(schedule, "optimizer", optimizer)) is not optimizer:
        raise ArgumentError("schedule belongs to another optimizer; build it on the optimizer of the ensemble")
    if isinstance(schedule, WithRun):
        raise ArgumentError(
            "schedule is an hdet.OneCycleLR, which spreads the rates already; give torch's OneCycleLR as the schedule"
        )


class PlainRates:
    """The rates of a schedule alone. Many schedules compute the next rate from the one in the optimizer.

    Args:
        optimizer: the optimizer that trains.
        schedule: writes the rates; None: they stay.
    """

    def __init__(self, optimizer: Optimizer, schedule: Schedule | None) -> None:
        self.optimizer = optimizer
        self.schedule = schedule
        self.values: list[Rate] = self._held()
        self._counts = group_counts(optimizer)
        self._coming: list[Rate] | None = None
        """The rates of the next step, if the schedule has made it already."""

    def new_groups(self) -> list[int]:
        """The numbers of groups that were added to the optimizer since: they follow the schedule from now on."""
        new = added_groups(self.optimizer, self._counts)
        if new:
            held = self._held()
            self.values = with_added(self.values, {g: held[g] for g in new})
            if self._coming is not None:
                self._coming = with_added(self._coming, {g: held[g] for g in new})
            self._counts = group_counts(self.optimizer)
        return new

    def step(self, metrics: float | None = None) -> None:
        """One step of the schedule; ReduceLROnPlateau makes one only if there are metrics."""
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

    def write(self) -> None:
        """Put the schedule's values into the optimizer. Without a schedule its rates are left to others."""
        if self.schedule is not None:
            self._put(self.values)

    def _stepped(self, metrics: float | None) -> list[Rate]:
        """The rates after one step of the schedule, which is made once: most cannot be asked for a later step."""
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


class OnSchedule(WithRun, Generic[AnyRun]):
    """A run on a schedule of the user's: what ``hdet.Ensemble`` and ``hdet.auto(..., schedule=...)`` have in common.

    Args:
        optimizer: the optimizer that trains.
        schedule: writes plain rates; None: they stay.
        run: what makes of them the rates to train at.
    """

    _name: ClassVar[str]
    """What messages call it."""
    _run: AnyRun

    def __init__(self, optimizer: Optimizer, schedule: Schedule | None, run: AnyRun) -> None:
        self.optimizer = optimizer
        self.schedule = schedule
        self._run = run
        self._step = 0
        self._plain = PlainRates(optimizer, schedule)
        run.begin(optimizer)

    @property
    def _now(self) -> int:
        return self._step

    def _write_again(self) -> None:
        """Write the values of this step into the optimizer, and wherever else they act."""
        raise NotImplementedError

    def _take_in_new_groups(self) -> None:
        """Groups that were added to the optimizer follow the schedule from the next step on."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """The same on every rank, and no collective. Save the optimizer and the model as usual."""
        self._take_in_new_groups()
        return {
            "step": self._step,
            "total_steps": self._run.total_steps,
            "plain_lrs": [copy_rate(lr) for lr in self._plain.values],
            "schedule": self.schedule.state_dict() if self.schedule is not None else None,
            "hdet": self._run.state(),
        }

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Raise an :class:`hdet.ArgumentError` unless :meth:`load_state_dict` can go on from it. Changes nothing."""
        refuse_foreign(state_dict, set(self.state_dict()), self._name, f"a state of {self._name}")
        has_schedule = state_dict["schedule"] is not None
        if has_schedule != (self.schedule is not None) or len(state_dict["plain_lrs"]) != len(self._plain.values):
            raise ArgumentError(
                f"the checkpoint has {'a' if has_schedule else 'no'} schedule and {len(state_dict['plain_lrs'])} "
                f"parameter groups, but here the schedule is {shown(self.schedule)} and there are "
                f"{len(self._plain.values)}; build optimizer and scheduler as they were when it was saved"
            )
        check_schedule(self.schedule, state_dict["schedule"])
        self._run.check(state_dict["hdet"])

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a checkpoint of any rank, at any number of replicas; its values replace the constructor's."""
        self.check_state_dict(state_dict)
        self._step = int(state_dict["step"])
        tell_another_length(self._run.total_steps, state_dict["total_steps"], self._run.replica_index)
        if self.schedule is not None:
            self.schedule.load_state_dict(state_dict["schedule"])
        self._plain.load([copy_rate(lr) for lr in state_dict["plain_lrs"]])
        self._run.load(state_dict["hdet"], state_dict["total_steps"], self._step)
        self._write_again()
        watch_loading(self.optimizer, self, self._run, type(self)._write_again)
