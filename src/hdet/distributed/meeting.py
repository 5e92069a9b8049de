"""The meeting: who the replicas are, when they first see each other, and what they show."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from hdet.distributed.arms import Arms
from hdet.distributed.group import Group, ReplicaGroup, Seat, Solo, connect, find_seat
from hdet.distributed.presence import presence
from hdet.distributed.rollcall import Occasion, RollCall, Shown, call, in_words
from hdet.distributed.tally import Tally
from hdet.distributed.weights import NO_WEIGHTS, Weights

__all__ = ["Meeting"]

_initialised: Callable[[], bool] = dist.is_initialized if dist.is_available() else lambda: False
"""Whether torch.distributed is. Looked up once, because every step calls it."""


class Meeting:
    """The replicas of a run, seen from one of them.

    Args:
        group: the user's process group or arms; None: the default group, once there is one.
        tally: the steps that this rank has made, which all must have made.
    """

    def __init__(self, group: Group, tally: Tally) -> None:
        self._tally = tally
        self._user_group = group
        self._group: ReplicaGroup | None = None

    @property
    def group(self) -> ReplicaGroup:
        """The replicas that have met; alone before that."""
        return self._group or Solo()

    @property
    def seat(self) -> Seat:
        """This replica's place; may be asked at any time, no collective."""
        if self._group is not None:
            return self._group.seat
        return find_seat(self._user_group) if _initialised() else Solo.seat

    @property
    def is_due(self) -> bool:
        """Whether the replicas could meet and have not."""
        return self._group is None and _initialised()

    def gathered(self) -> ReplicaGroup:
        """Our own group over the replicas, so that our collectives cannot pair with others'. Collective."""
        return connect(self._user_group)

    def begin(self, group: ReplicaGroup) -> None:
        """The replicas have met and agree."""
        self._group = group

    def roll_call(
        self,
        occasion: Occasion,
        t: int,
        terms: Mapping[str, float],
        weights: Weights,
        shown: Shown,
        *,
        expect_equal: bool,
        values: Sequence[float] | None = None,
        within: ReplicaGroup | None = None,
    ) -> RollCall:
        """Show and see, raise on disagreement, conclude. Collective. ``within``: other replicas than :attr:`group`."""
        group = within or self.group
        alone = group.seat.size == 1
        if not alone:
            presence().arrive(f"{in_words(occasion)}, step {t}")
        agreed = {} if alone else {"step": float(t), **self._tally.counts(), **terms}
        known = NO_WEIGHTS if alone else weights  # nobody to compare with: do not read them
        return call(group, occasion, agreed, known, shown, expect_equal=expect_equal, values=values)

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and deepcopy: a process group cannot be copied, so the copy looks for the default group."""
        group = self._user_group if isinstance(self._user_group, Arms) else None
        return {**vars(self), "_user_group": group, "_group": None}
