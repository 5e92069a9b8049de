"""The end of a run in a framework's trainer: ``AutoLR(finish=...)``, and a run that is resumed with another length."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from hdet.checks import must_count
from hdet.errors import ArgumentError
from hdet.schedulers.onecycle import OneCycleLR
from hdet.schedulers.plan import LengthError, Plan


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
        if not isinstance(scheduler, OneCycleLR) or scheduler.search is None:
            raise ArgumentError(
                f'finish= needs a hdet.OneCycleLR with max_lr="auto", but the scheduler is {type(scheduler).__name__}, '
                "which falls by itself; leave finish= out"
            )

    def stops(self, scheduler: OneCycleLR, *, requested: bool, left: float) -> bool:
        """Whether training is to stop here. Call it between two steps; if the fall begins here, it is a collective.

        Args:
            scheduler: the one whose rate falls.
            requested: whether a callback or the user's code has requested a stop.
            left: steps that the trainer will make if nothing stops it.
        """
        ahead = scheduler.total_steps - scheduler.last_epoch
        ends = requested or (left <= self.steps and ahead == math.inf)
        if ends and left >= 1 and ahead > 1 and not Plan.of(scheduler).is_finished:
            scheduler.finish(int(min(self.steps, left, ahead)))
        return min(left, ahead) < 1


def check_length(scheduler: Any, planned: float, arguments: str) -> None:
    """Raise if the trainer will make more steps than the schedule has, whose length may be that of a checkpoint.

    Args:
        scheduler: any scheduler of hdet.
        planned: steps that the trainer will make.
        arguments: those of the trainer that say how many steps it makes.
    """
    if not isinstance(scheduler, OneCycleLR) or planned <= scheduler.total_steps:
        return
    kind, cure = "", f"build the scheduler with total_steps={planned}"
    if scheduler.last_epoch > 0:
        kind, cure = "restored ", f"resume with the {arguments} and the AutoLR(finish=...) that the run began with"
    raise ArgumentError(
        f"the trainer is to make {planned} steps, but the {kind}schedule ends at step {scheduler.total_steps}; {cure}"
    )


@contextmanager
def loading_length(arguments: str, cure: str, hold: str) -> Iterator[None]:
    """Load a checkpoint inside. If its run cannot have the given length, the error names the framework's arguments.

    Args:
        arguments: the framework's arguments that give the length.
        cure: what to do if the run must have ``{steps}`` steps.
        hold: what keeps the rate constant until shortly before the end, so that a run can be extended at any step.
    """
    try:
        yield
    except LengthError as error:
        new_run = f"load only the weights, and begin a new run; the peak rate that was found is {error.max_lr}"
        cure = "give more" if error.needed is None else f"{cure.format(steps=error.needed)}, or {new_run}"
        raise ArgumentError(
            f"the steps given by {arguments} must be {error.must}, but are {error.got}; {cure}. A run that is to be "
            f"extended, or shortened, at any step needs {hold}"
        ) from None


def loading_auto_lr(options: Mapping[str, Any], finish: Finish | None, arguments: str, cure: str) -> Any:
    """:func:`loading_length` for an ``AutoLR``, whose ``total_steps``, if given, replaces the trainer's arguments."""
    if options.get("total_steps") is not None:
        arguments, cure = "total_steps of AutoLR", "AutoLR(total_steps={steps})"
    without = "" if finish is None else ", without finish="
    return loading_length(arguments, f"resume with {cure}{without}", "AutoLR(finish=...)")
