"""The end of a run in a framework's trainer: whether the schedule is long enough, and ``AutoLR(finish=...)``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hdet.checks import is_int, must_be
from hdet.errors import ArgumentError
from hdet.schedulers.onecycle import OneCycleLR
from hdet.schedulers.plan import LengthError, Plan


@contextmanager
def loading_length(arguments: str, resume: str, hold: str) -> Iterator[None]:
    """Load a checkpoint inside. If its run cannot have the given length, the error names the framework's arguments.

    Args:
        arguments: the framework's arguments that give the length.
        resume: what to do if the run must have ``{steps}`` steps.
        hold: what keeps the rate constant until shortly before the end, so that a run can be extended at any step.
    """
    try:
        yield
    except LengthError as error:
        new_run = f"load only the weights, and begin a new run; the peak rate that was found is {error.max_lr}"
        cure = "give more" if error.needed is None else f"{resume.format(steps=error.needed)}, or {new_run}"
        raise ArgumentError(
            f"the steps given by {arguments} must be {error.must}, but are {error.got}; {cure}. A run that is to be "
            f"extended, or shortened, at any step needs {hold}"
        ) from None


class Finish:
    """``finish=`` of an ``AutoLR``: the rate is constant, and falls before training stops.

    It falls when a callback or the user's code requests a stop, and before the trainer's own end.

    Args:
        steps: number of steps over which the rate falls; None: the schedule falls by itself.
    """

    def __init__(self, steps: Any) -> None:
        fits = steps is None or (is_int(steps) and steps >= 1)
        must_be("an integer, at least 1", fits, "leave it out if the schedule is to fall by itself", finish=steps)
        self.steps: int | None = None if steps is None else int(steps)

    def check(self, scheduler: Any, planned: float, arguments: str) -> None:
        """Raise if the schedule cannot be finished, or if the trainer will make more steps than the schedule has.

        A checkpoint may have brought the length of its own run.

        Args:
            scheduler: any scheduler of hdet.
            planned: steps that the trainer will make.
            arguments: those of the trainer that say how many steps it makes.
        """
        if self.steps is not None and (not isinstance(scheduler, OneCycleLR) or scheduler.found is None):
            raise ArgumentError(
                f'finish= needs a hdet.OneCycleLR with max_lr="auto", but the scheduler is {type(scheduler).__name__}, '
                "which falls by itself; leave finish= out"
            )
        if not isinstance(scheduler, OneCycleLR) or planned <= scheduler.total_steps or self.is_falling(scheduler):
            return
        cure, kind = f"build it with total_steps={planned}", ""
        if scheduler.last_epoch > 0:
            cure = f"resume with the {arguments} that the run began with, or load only the weights and begin a new run"
            kind = "restored "
        raise ArgumentError(
            f"the trainer is to make {planned} steps, but the {kind}schedule ends at step {scheduler.total_steps}; "
            f"{cure}"
        )

    def is_falling(self, scheduler: OneCycleLR) -> bool:
        """Whether the rate falls, or has fallen, because of ``finish=``."""
        return self.steps is not None and Plan.of(scheduler).is_finished

    def is_over(self, scheduler: OneCycleLR) -> bool:
        """Whether the rate has fallen because of ``finish=``."""
        return self.is_falling(scheduler) and scheduler.last_epoch >= scheduler.total_steps

    def stops(self, scheduler: OneCycleLR, *, requested: bool, left: float) -> bool:
        """Whether training is to stop here. Call it between two steps; if the fall begins here, it is a collective.

        Args:
            scheduler: the one whose rate falls.
            requested: whether a callback or the user's code has requested a stop.
            left: steps that the trainer will make if nothing stops it.
        """
        if self.steps is None:
            return requested
        ahead = scheduler.total_steps - scheduler.last_epoch
        if left < 1 or ahead < 1:
            return True
        if self.is_falling(scheduler) or ahead == 1:
            return False
        if requested or (left <= self.steps and scheduler.total_steps == math.inf):
            scheduler.finish(int(min(self.steps, left, ahead)))
        return False
