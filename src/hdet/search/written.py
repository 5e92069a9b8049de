"""The rates that a search has written: whether they are still those in the optimizer.

If somebody else writes one, the search would measure steps of another length than it thinks, and find a wrong rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from hdet.optimizer.rates import Rate, put_rate
from hdet.rule.found import listed
from hdet.search.reporting import warn

_Groups = Sequence[dict[str, Any]]


class Written:
    """The rates as they were left in the optimizer. Nothing is read from a device unless they changed.

    A float is known by its value; a tensor by itself, and by how often it was changed in place.
    """

    def __init__(self) -> None:
        self._rates: Sequence[Rate] = ()
        self._marks: list[Any] = []
        self._t = 0
        self._is_told = False
        """Whether people know of it, and it has not stopped since."""

    def note(self, groups: _Groups, rates: Sequence[Rate], t: int) -> None:
        """These rates of step ``t`` have just been written into these groups."""
        self._rates, self._t = rates, t
        self._marks = [own if isinstance(own := group["lr"], float) else _mark(own) for group in groups]

    def hold(self, groups: _Groups, *, is_loaded: bool) -> None:
        """Before a step: write the rates again, if others are there, and say so.

        ``is_loaded``: whether a checkpoint was loaded since the last step. It may have brought the rates of its run.
        """
        if len(self._marks) != len(groups):  # one was added
            return
        for group, mark in zip(groups, self._marks, strict=True):
            if (rate := group["lr"]) is not mark and not _is_there(rate, mark):
                break
        else:  # as usual, without delay
            self._is_told = False
            return
        found = [float(group["lr"]) for group in groups]
        for group, mark, rate in zip(groups, self._marks, self._rates, strict=True):
            group["lr"] = mark[0] if isinstance(mark, tuple) else mark  # the tensor itself
            put_rate(group, rate)
        self.note(groups, self._rates, self._t)
        own = [float(group["lr"]) for group in groups]
        if found != own and not is_loaded and not self._is_told:
            self._is_told = True
            warn(
                f"the optimizer's lr was {listed(found)} at step {self._t}, but the search had written "
                f"{listed(own)}, and has written that again. An lr is a guess, to be given before the scheduler is "
                "built; highest= bounds it, schedule= shapes it. If a checkpoint brought it, load its scheduler too"
            )


def _mark(rate: Any) -> Any:
    return (rate, rate._version) if isinstance(rate, Tensor) else rate  # the version is known without reading it


def _is_there(rate: Any, mark: Any) -> bool:
    if isinstance(rate, Tensor):
        return isinstance(mark, tuple) and rate is mark[0] and rate._version == mark[1]
    return bool(rate == mark)
