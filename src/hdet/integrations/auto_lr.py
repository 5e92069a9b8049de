"""What ``AutoLR`` of Lightning and of the Trainer share: the scheduler that they are given, and the end of the run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from hdet.checks import must_be, must_count
from hdet.errors import ArgumentError
from hdet.schedulers.auto_scheduler import AutoScheduler
from hdet.schedulers.replica_scheduler import ReplicaScheduler
from hdet.schedulers.trapezoid import LengthError

SCHEDULERS = AutoScheduler, ReplicaScheduler
"""Classes of hdet's schedulers."""


def options_of_auto(given: list[Any], options: Mapping[str, Any], cure: str) -> dict[str, Any] | None:
    """The arguments of ``hdet.auto``; None if the trainer has a scheduler of hdet, which is used as it is.

    Args:
        given: schedulers that the trainer has. One of torch is the schedule on which the rate is found.
        options: arguments of ``AutoLR``; those that such a scheduler replaces must be left out.
        cure: what to do about schedulers that AutoLR cannot use.
    """
    ours = [one for one in given if isinstance(one, SCHEDULERS)]
    torchs = [one for one in given if isinstance(one, LRScheduler) and not isinstance(one, ReduceLROnPlateau)]
    rule, names = "at most one scheduler, whose rates are known in advance", [type(one).__name__ for one in given]
    must_be(rule, len(given) <= 1 and (ours or torchs == given), cure, lr_scheduler=", ".join(names))
    unused = [name for name in options if options[name] is not None and (ours or (torchs and name == "schedule"))]
    rule, cure = "empty, because the trainer has a scheduler already", "give them to that scheduler, or leave it out"
    must_be(rule, not unused, cure, options=unused)
    if ours:
        return None
    return {**options, "schedule": torchs[0]} if torchs else dict(options)


def mean_of(scheduler: AutoScheduler | ReplicaScheduler) -> AbstractContextManager[None]:
    """``scheduler.consensus()``, unless it was entered already."""
    return nullcontext() if scheduler.rank_group.in_consensus else scheduler.consensus()


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
        scheduler: any scheduler of hdet; an Ensemble has no length.
        planned: steps that the trainer will make.
        arguments: those of the trainer that say how many steps it makes.
    """
    length = getattr(scheduler, "total_steps", math.inf)
    if planned > length:
        kind, cure = "", f"build the scheduler with total_steps={planned}"
        if scheduler.last_epoch > 0:
            kind, cure = "restored ", f"resume with the {arguments} and the AutoLR(finish=...) that the run began with"
        raise ArgumentError(
            f"the trainer is to make {planned} steps, but the {kind}schedule ends at step {length}; {cure}"
        )


@contextmanager
def length_from(arguments: str, options: Mapping[str, Any]) -> Iterator[None]:
    """Load a checkpoint inside. If its run cannot have the given length, the error says where that comes from.

    Args:
        arguments: those of the framework that say how many steps it makes.
        options: those of ``AutoLR``, which may have ``total_steps``.
    """
    try:
        yield
    except LengthError as error:
        source = arguments if options.get("total_steps") is None else "total_steps of AutoLR"
        raise ArgumentError(
            f"{error}. Here total_steps is given by {source}. A run that is to be extended, or shortened, at any "
            "step needs AutoLR(finish=...)"
        ) from None
