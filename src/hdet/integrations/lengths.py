"""The end of a run in a framework's trainer: ``AutoLR(finish=...)``, and a run that is resumed with another length."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hdet.checks import must_count
from hdet.errors import ArgumentError
from hdet.schedulers.auto_scheduler import AutoScheduler
from hdet.schedulers.onecycle import OneCycleLR
from hdet.schedulers.trapezoid import LengthError


class Finish:
    """``finish=`` of an ``AutoLR``: the rate is constant, and falls before training stops.

    It falls when a callback or the user's code requests a stop, and before the trainer's own end.

    Args:
        steps: number of steps over which the rate falls.
    """

    def __init__(self, steps: int) -> None:
        self.steps = must_count(1, "leave it out if the schedule is to fall by itself", finish=steps)

    def check(self, scheduler: Any) -> None:
        """Raise if the schedule cannot be finished."""
        if not isinstance(scheduler, AutoScheduler) or not scheduler.can_finish:
            raise ArgumentError(
                f"finish= needs the scheduler of hdet.auto without schedule=, but this {type(scheduler).__name__} "
                "falls by itself; leave finish= out"
            )

    def stops(self, scheduler: AutoScheduler, *, requested: bool, left: float) -> bool:
        """Whether training is to stop here. Call it between two steps; if the fall begins here, it is a collective.

        Args:
            scheduler: the one whose rate falls.
            requested: whether a callback or the user's code has requested a stop.
            left: steps that the trainer will make if nothing stops it.
        """
        ahead = scheduler.total_steps - scheduler.last_epoch
        ends = requested or (left <= self.steps and ahead == math.inf)
        if ends and left >= 1 and ahead > 1 and not scheduler.is_finished:
            scheduler.finish(int(min(self.steps, left, ahead)))
        return min(left, ahead) < 1


def check_length(scheduler: Any, planned: float, arguments: str) -> None:
    """Raise if the trainer will make more steps than the schedule has, whose length may be that of a checkpoint.

    Args:
        scheduler: any scheduler of hdet.
        planned: steps that the trainer will make.
        arguments: those of the trainer that say how many steps it makes.
    """
    if not isinstance(scheduler, (AutoScheduler, OneCycleLR)) or planned <= scheduler.total_steps:
        return
    kind, cure = "", f"build the scheduler with total_steps={planned}"
    if scheduler.last_epoch > 0:
        kind, cure = "restored ", f"resume with the {arguments} and the AutoLR(finish=...) that the run began with"
    raise ArgumentError(
        f"the trainer is to make {planned} steps, but the {kind}schedule ends at step {scheduler.total_steps}; {cure}"
    )


@contextmanager
def length_from(arguments: str) -> Iterator[None]:
    """Load a checkpoint inside. If its run cannot have the given length, the error says where that comes from.

    Args:
        arguments: those of the framework that say how many steps it makes.
    """
    try:
        yield
    except LengthError as error:
        raise ArgumentError(
            f"{error}. Here total_steps is given by {arguments}. A run that is to be extended, or shortened, at any "
            "step needs AutoLR(finish=...)"
        ) from None
