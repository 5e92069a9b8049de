"""The meeting: who the replicas are, when they first see each other, and what they show."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from hdet.errors import ArgumentError
from hdet.ranks.agreement import Agreement, Occasion, Shown, call, check_arguments, in_text
from hdet.ranks.arms import Arms
from hdet.ranks.group import Group, ReplicaGroup, ReplicaIndex, Solo, connect, find_replica_index
from hdet.ranks.presence import presence
from hdet.ranks.weights import NO_WEIGHTS, Weights

_initialised: Callable[[], bool] = dist.is_initialized if dist.is_available() else lambda: False
"""Whether torch.distributed is. Looked up once, because every step calls it."""


class RankGroup:
    """The replicas of a run, seen from one of them. They must make as many steps each, in the same order.

    Args:
        group: the user's process group or arms; None: the default group, once there is one.
        alike: arguments that must be equal on all ranks, in words.
    """

    def __init__(self, group: Group, alike: Mapping[str, str]) -> None:
        self._user_group = group
        self._alike = alike
        self._group: ReplicaGroup | None = None
        self.in_consensus = False
        """Whether this replica holds the replicas' mean."""

    @property
    def group(self) -> ReplicaGroup:
        """The replicas that have met; alone before that."""
        return self._group or Solo()

    @property
    def replica_index(self) -> ReplicaIndex:
        """This replica's place; may be asked at any time, no collective."""
        if self._group is not None:
            return self._group.replica_index
        return find_replica_index(self._user_group) if _initialised() else Solo.replica_index

    @property
    def is_due(self) -> bool:
        """Whether the replicas could meet and have not."""
        return self._group is None and _initialised()

    def check_step(self, t: int) -> None:
        """Raise if a step is made, at ``t``, while this replica holds the mean."""
        if self.in_consensus:
            raise ArgumentError(
                f"step() was called inside consensus(), at step {t}: the weights are put back afterwards, so "
                "training inside is lost; leave the `with` block first"
            )

    def resume(self, state: Mapping[str, object]) -> None:
        """A checkpoint was loaded: its values replace the arguments, and must be equal on all ranks in their place."""
        self._alike = in_text(state)

    # -- seeing each other ----------------------------------------------------------------------------------------

    def first(
        self, t: int, weights: Weights, arguments: Mapping[str, object], *, keeps_journal: bool
    ) -> tuple[ReplicaGroup, Agreement]:
        """Our own group over the replicas, whose roll was called; :meth:`begin` goes on with it. Collective.

        A group of our own, so that our collectives cannot pair with others'. ``arguments``: further ones that must be
        equal on all ranks.
        """
        presence().arrive(f"the first step, {t}")
        group, shown = connect(self._user_group), Shown(journal=keeps_journal)
        roll = self.agree(Occasion.FIRST_STEP, t, weights, shown, expect_equal=False, within=group)
        others = {name: text for name, text in in_text(arguments).items() if name not in self._alike}
        check_arguments(group, {**self._alike, **others}, weights.device)
        return group, roll

    def begin(self, group: ReplicaGroup) -> None:
        """The replicas have met and agree."""
        self._group = group

    def agree(
        self,
        occasion: Occasion,
        t: int,
        weights: Weights,
        shown: Shown,
        *,
        expect_equal: bool,
        values: Sequence[float] | None = None,
        within: ReplicaGroup | None = None,
    ) -> Agreement:
        """Show and see, raise on disagreement, conclude. Collective. ``within``: other replicas than :attr:`group`."""
        group = within or self.group
        alone = group.replica_index.size == 1
        if not alone:
            presence().arrive(f"{occasion.value}, step {t}")
        known = NO_WEIGHTS if alone else weights  # nobody to compare with: do not read them
        return call(group, occasion, t, known, shown, expect_equal=expect_equal, values=values)

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """Inside, this replica holds the replicas' mean, and may make no step. Not to be entered twice."""
        if self.in_consensus:
            raise ArgumentError("consensus() is entered already; leave the outer `with ...consensus():` first")
        self.in_consensus = True
        try:
            yield
        finally:
            self.in_consensus = False

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and deepcopy: a process group cannot be copied, so the copy looks for the default group."""
        group = self._user_group if isinstance(self._user_group, Arms) else None
        return {**vars(self), "_user_group": group, "_group": None}
