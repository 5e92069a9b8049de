"""Whether a schedule is long enough for what a framework is about to do."""

from __future__ import annotations

from hdet.errors import ArgumentError
from hdet.schedulers.onecycle import OneCycleLR


def check_length(planned: int, scheduler: OneCycleLR, arguments: str) -> None:
    """Raise if a trainer is to make more steps than the schedule has: past its end torch has no rate.

    A checkpoint brings the length of its own run. ``arguments``: those of the trainer that say how many steps it makes.
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
