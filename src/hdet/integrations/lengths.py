"""Where a run ends that a framework makes: whether its schedule is long enough, and a fall before it stops."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hdet.checks import is_int, must_be
from hdet.errors import ArgumentError
from hdet.schedulers.onecycle import OneCycleLR
from hdet.schedulers.plan import LengthError, Plan


def check_length(planned: float, scheduler: OneCycleLR, arguments: str) -> None:
    """Raise if a trainer is to make more steps than the schedule has: past its end torch has no rate.

    A checkpoint may bring the length of its own run. ``arguments``: those of the trainer that say how many steps it
    makes.
    """
    if planned <= scheduler.total_steps:
        return
    restored = scheduler.last_epoch > 0
    cure = (
        f"resume with the {arguments} that the run began with, or load only the weights and begin a new run"
        if restored
        else f"build it with total_steps={planned}"
    )
    raise ArgumentError(
        f"the trainer is to make {planned} steps, but the {'restored ' if restored else ''}schedule ends at step "
        f"{scheduler.total_steps}; {cure}"
    )


@contextmanager
def lengths_in(arguments: str, resume: str, hold: str) -> Iterator[None]:
    """Inside a checkpoint is loaded. If its run cannot have the length that is given, the error says it so.

    Args:
        arguments: those that give the length here.
        resume: what to do if the run must have ``{steps}`` steps.
        hold: what holds the rate until shortly before a run ends, so that it can be extended until then.
    """
    try:
        yield
    except LengthError as error:
        resets_path = f"load only the weights, and begin a new run; the peak rate that was found is {error.max_lr}"
        cure = "give more" if error.needed is None else f"{resume.format(steps=error.needed)}, or {resets_path}"
        raise ArgumentError(
            f"the steps given by {arguments} must be {error.must}, but are {error.got}; {cure}. A run that is to be "
            f"extended, or shortened, at any step needs {hold}"
        ) from None


class Ending:
    """The end of a run whose rate is held: it falls where somebody asks for a stop, and before the trainer's own end.

    Args:
        steps: over which it falls.
    """

    def __init__(self, steps: Any) -> None:
        must_be("an integer, at least 1", is_int(steps) and steps >= 1, "leave it out for no such end", finish=steps)
        self.steps = int(steps)

    @staticmethod
    def check(scheduler: Any) -> None:
        """Raise for a schedule that cannot be finished."""
        if not isinstance(scheduler, OneCycleLR) or scheduler.found is None:
            raise ArgumentError(
                f'finish= needs a hdet.OneCycleLR with max_lr="auto", but the scheduler is {type(scheduler).__name__}, '
                "which falls by itself; leave finish= out"
            )

    @staticmethod
    def is_under_way(scheduler: Any) -> bool:
        """Whether a schedule that :meth:`check` has seen falls by ``finish``."""
        return Plan.of(scheduler).is_finished

    def is_over(self, scheduler: OneCycleLR) -> bool:
        """Whether it has fallen."""
        return self.is_under_way(scheduler) and scheduler.last_epoch >= scheduler.total_steps

    def stops(self, scheduler: OneCycleLR, *, asked: bool, left: float) -> bool:
        """Whether training is to stop here. To be called between two steps; where the fall begins, a collective.

        Args:
            scheduler: what falls.
            asked: whether somebody asks for a stop.
            left: steps that the trainer will make in any case.
        """
        ahead = scheduler.total_steps - scheduler.last_epoch
        if left < 1 or ahead < 1:
            return True
        if self.is_under_way(scheduler) or ahead == 1:
            return False
        if asked or (left <= self.steps and scheduler.total_steps == math.inf):
            scheduler.finish(int(min(self.steps, left, ahead)))
        return False
