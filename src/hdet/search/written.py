"""The rates that a scheduler has written for a search: whether they are still those in the optimizer.

If somebody else writes one, the search would measure steps of another length than it thinks, and find a wrong rate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol
from weakref import ref

from torch import Tensor

from hdet.search.reporting import listed, warn

_Groups = Sequence[Mapping[str, Any]]


class Scheduler(Protocol):
    """What writes rates."""

    last_epoch: int

    def _own_again(self, *, is_loaded: bool) -> None: ...


class Written:
    """The rates as the scheduler has left them in its optimizer. Nothing is read from a device unless they changed.

    A float is known by its value; a tensor by itself, and by how often it was changed in place.
    """

    def __init__(self) -> None:
        self.is_shared = False
        """Whether other schedulers have their turn too, as in SequentialLR: rates of others are then no surprise."""
        self._marks: list[Any] = []
        self._scheduler: ref[Scheduler] | None = None
        self._is_told = False
        """Whether people know of it, and it has not stopped since."""

    def begin(self, scheduler: Scheduler) -> None:
        """Rates are written by this scheduler. It is held weakly: it holds the search."""
        self._scheduler = ref(scheduler)

    def note(self, groups: _Groups) -> None:
        """The scheduler has just written the rates of these groups."""
        rates = () if self.is_shared else [group["lr"] for group in groups]
        self._marks = [rate if isinstance(rate, float) else _mark(rate) for rate in rates]

    def forget(self) -> None:
        """Until rates are written again it is unknown whose they are."""
        self._marks = []

    def hold(self, groups: _Groups, *, is_loaded: bool) -> None:
        """Before a step: have the scheduler write its rates again, if others are there, and say so.

        ``is_loaded``: whether a checkpoint was loaded since the last step. It may have brought the rates of its run.
        """
        if len(self._marks) != len(groups):  # one was added, or rates of others are no surprise
            return
        for group, mark in zip(groups, self._marks, strict=True):
            if (rate := group["lr"]) is not mark and not _is_there(rate, mark):
                break
        else:  # as usual, without delay
            self._is_told = False
            return
        scheduler = None if self._scheduler is None else self._scheduler()
        if scheduler is None:
            return
        if scheduler.last_epoch < 0:  # SequentialLR leaves -1 in one that waits for its turn
            self.is_shared = True
            return
        found = [float(group["lr"]) for group in groups]
        scheduler._own_again(is_loaded=is_loaded)
        own = [float(group["lr"]) for group in groups]
        if found != own and not is_loaded and not self._is_told:
            self._is_told = True
            warn(
                f"the optimizer's lr was {listed(found)} at step {scheduler.last_epoch}, but the search had written "
                f"{listed(own)}, and has written that again. An lr is a guess, to be given before the scheduler is "
                "built; highest= bounds it, schedule= shapes it. If a checkpoint brought it, load its scheduler too"
            )

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and deepcopy: the copy of the scheduler calls :meth:`begin`."""
        return {**vars(self), "_scheduler": None}


def _mark(rate: Any) -> Any:
    return (rate, rate._version) if isinstance(rate, Tensor) else rate  # the version is known without reading it


def _is_there(rate: Any, mark: Any) -> bool:
    if isinstance(rate, Tensor):
        return isinstance(mark, tuple) and rate is mark[0] and rate._version == mark[1]
    return bool(rate == mark)
