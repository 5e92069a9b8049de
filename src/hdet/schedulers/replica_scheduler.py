"""What the schedulers in front of replicas share: ``hdet.OneCycleLR`` and ``hdet.Ensemble``."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakSet

from torch import Tensor
from torch.optim import Optimizer

from hdet.checks import users_level
from hdet.ensemble.elastic_replicas import ElasticReplicas
from hdet.ensemble.replicas import Replicas
from hdet.errors import ResumeWarning
from hdet.optimizer import group_counts, hook_loading
from hdet.ranks.agreement import RankGroup
from hdet.ranks.group import Group
from hdet.ranks.torchft import Torchft

PUBLISHED_SPREAD = 1 / 9
_watching: WeakSet[Any] = WeakSet()
"""Schedulers that hear of it when their optimizer is loaded."""


def replicas_of(group: Group) -> type[Replicas]:
    """The class of the replicas in a user's ``group=``: those of torchft come and go."""
    return ElasticReplicas if isinstance(group, Torchft) else Replicas


class ReplicaScheduler:
    """A scheduler in front of replicas that are averaged at the end of every round. Abstract."""

    optimizer: Optimizer
    last_epoch: int
    """The step that the schedule is at, as torch calls it."""
    _run: Replicas
    _counts: list[int]
    """How many parameter groups of each optimizer are known."""

    def _begin(self, group: Group) -> None:
        """The optimizer and the replicas are known: no step has been made yet."""
        self._counts = group_counts(self.optimizer)
        self._run.begin(self.optimizer)
        if isinstance(group, Torchft):
            group.enrol(self, type(self)._join)

    @property
    def rank_group(self) -> RankGroup:
        """The replicas."""
        return self._run.rank_group

    def observe(self, loss: float | Tensor) -> None:
        """Count a loss of this rank towards the round, for frameworks that call ``step()`` without one.

        The value is copied at once and host and device are not synchronised. ``step(loss)`` is observe and step.
        """
        self._run.losses.add(loss)

    def converge(self) -> None:
        """Average now, and nothing else: the round, its values and its losses go on."""
        self._run.converge(self.optimizer, self.last_epoch)

    def consensus(self) -> AbstractContextManager[None]:
        """What :meth:`converge` averages is averaged inside, and each rank's own afterwards, also after an exception.

        For evaluating and saving inside a round. Holds one copy of the weights meanwhile. A collective.
        """
        return self._run.consensus(self.optimizer, self.last_epoch)

    def _write_again(self) -> None:
        """Write the values of this step into the optimizer, and wherever else they act."""
        raise NotImplementedError

    def _join(self) -> None:
        """For :func:`hdet.torchft`: meet the others, and go on where they are."""
        raise NotImplementedError

    def _tell_another_length(self, theirs: int | None) -> None:
        """Warn if the checkpoint's length differs from the constructor's, which it replaces, as in torch."""
        mine = self._run.total_steps
        if mine is not None and mine != theirs and self._run.replica_index.replica == 0:
            length = "no known length" if theirs is None else f"{theirs} steps"
            warnings.warn(
                f"the checkpoint is of a run of {length}, but this scheduler was built with total_steps={mine}: the "
                "checkpoint's length counts, as in torch; build it with that, or load only the weights and begin a new "
                "run",
                ResumeWarning,
                stacklevel=users_level(),
            )

    def _watch_loading(self) -> None:
        """Write this replica's values again if the optimizer is loaded after the scheduler.

        An optimizer's checkpoint brings rank 0's values. In a framework's wrapper that has no such hooks the next
        ``step()`` writes them.
        """
        if self not in _watching:
            _watching.add(self)
            hook_loading(self.optimizer, self, ReplicaScheduler._after_loading)

    def _after_loading(self, _: Optimizer) -> None:
        if self._run.is_just_loaded:
            self._write_again()
