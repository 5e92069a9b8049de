"""The plain rates of a schedule of the user's: those that it would give alone, at this step and one step ahead."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from hdet.checks import must_be
from hdet.errors import ArgumentError
from hdet.optimizer.groups import unwrapped, with_added
from hdet.optimizer.rates import Rate, copy_rate, put_rate
from hdet.ranks.agreement import RankGroup


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

    def ahead(self, *metrics: float) -> list[Rate]:
        """The rates of the next step of the schedule, which is made once: most cannot be asked for a later step.

        The optimizer keeps its rates. ReduceLROnPlateau makes a step only if there are metrics.
        """
        if self._coming is None:
            if self.schedule is None or (isinstance(self.schedule, ReduceLROnPlateau) and not metrics):
                return self.now
            held = self._held()
            self.put(self.now)
            self.schedule.step(*metrics)
            self._coming = self._held()
            self.put(held)
        return self._coming

    def step(self) -> None:
        """Go to the rates of the next step."""
        self.now, self._coming = self.ahead(), None

    def grow(self, added: Mapping[int, Mapping[str, Any]]) -> None:
        """Groups were added to the optimizer, by their numbers: their rates are plain ones."""
        rates = {g: copy_rate(group["lr"]) for g, group in added.items()}
        self.now = with_added(self.now, rates)
        if self._coming is not None:
            self._coming = with_added(self._coming, rates)

    def saved(self) -> dict[str, Any]:
        """The rates, and the schedule's own state; for a checkpoint."""
        schedule = self.schedule.state_dict() if self.schedule is not None else None
        return {"plain_lrs": [copy_rate(rate) for rate in self.now], "schedule": schedule}

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
