"""The ranks of a run, seen from one of them: they connect at the first step, and agree at each further occasion."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from hdet.errors import ArgumentError
from hdet.ranks.agreement import Agreement, Occasion, RankReport, agree, in_text
from hdet.ranks.arms import Arms
from hdet.ranks.group import Group, ReplicaGroup, ReplicaIndex, Solo, connect, find_replica_index
from hdet.ranks.presence import presence
from hdet.ranks.weights import NO_WEIGHTS, Weights

_initialised: Callable[[], bool] = dist.is_initialized if dist.is_available() else lambda: False
"""Whether torch.distributed is initialised. The function is looked up once, because every step calls it."""


@dataclass(eq=False)
class RankGroup:
    """The ranks of a run, seen from one of them. All must make the same calls, in the same order.

    Args:
        user_group: the user's process group or arms; None: the default group, once there is one.
        alike: arguments that must be equal on all ranks, as texts.
    """

    user_group: Group
    alike: Mapping[str, str]
    in_consensus: bool = field(default=False, init=False)
    """Whether this replica holds the replicas' mean."""
    _group: ReplicaGroup | None = field(default=None, init=False)

    @property
    def group(self) -> ReplicaGroup:
        """The replicas, once they are connected; this one alone before that."""
        return self._group or Solo()

    @property
    def replica_index(self) -> ReplicaIndex:
        """This replica's place, known at any time. Not a collective."""
        if self._group is not None:
            return self._group.replica_index
        return find_replica_index(self.user_group) if _initialised() else Solo.replica_index

    @property
    def is_due(self) -> bool:
        """Whether the replicas can be connected now and are not."""
        return self._group is None and _initialised()

    def check_step(self, t: int) -> None:
        """Raise if a step is made, at ``t``, while this replica holds the mean."""
        if self.in_consensus:
            raise ArgumentError(
                f"step() was called inside consensus(), at step {t}: the weights are restored afterwards, so training "
                "inside is lost; leave the `with` block first"
            )

    def resume(self, state: Mapping[str, object]) -> None:
        """After a checkpoint was loaded, its values must be equal on all ranks in place of the arguments."""
        self.alike = in_text(state)

    # -- communication ----------------------------------------------------------------------------------------------

    def first(
        self, t: int, weights: Weights, arguments: Mapping[str, object], *, keeps_journal: bool
    ) -> tuple[ReplicaGroup, Agreement]:
        """A group over the replicas, to be given to :meth:`begin`, and their agreement. Collective.

        It is hdet's own, so that its collectives cannot pair with others'. ``arguments``: further arguments
        that must be equal on all ranks.
        """
        presence().arrive(f"the first step, {t}")
        group, own = connect(self.user_group), RankReport(keeps_journal=keeps_journal)
        given = {**self.alike, **in_text(arguments), **self.alike}  # these count, and come first in messages
        return group, agree(group, Occasion.FIRST_STEP, t, weights, own, expect_equal=False, arguments=given)

    def begin(self, group: ReplicaGroup) -> None:
        """Use a group from here on: its replicas agree."""
        self._group = group

    def agree(
        self,
        occasion: Occasion,
        t: int,
        weights: Weights,
        own: RankReport,
        *,
        expect_equal: bool,
        values: Sequence[float] | None = None,
    ) -> Agreement:
        """Gather, raise on disagreement, conclude. Collective."""
        if self.group.replica_index.size > 1:
            presence().arrive(f"{occasion.value}, step {t}")
        else:
            weights = NO_WEIGHTS  # there is none to compare with: do not read them
        return agree(self.group, occasion, t, weights, own, expect_equal=expect_equal, values=values)

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """Inside, this replica holds the replicas' mean, and must not make a step. It cannot be entered twice."""
        if self.in_consensus:
            raise ArgumentError("consensus() is entered already; leave the outer `with ...consensus():` first")
        self.in_consensus = True
        try:
            yield
        finally:
            self.in_consensus = False

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and deepcopy: a process group cannot be copied, so the copy looks for the default group."""
        group = self.user_group if isinstance(self.user_group, Arms) else None
        return {**vars(self), "user_group": group, "_group": None}
