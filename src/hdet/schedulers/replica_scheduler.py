"""What the schedulers in front of replicas share: ``hdet.OneCycleLR`` and ``hdet.Ensemble``."""

from __future__ import annotations

from contextlib import AbstractContextManager, suppress
from typing import Any
from weakref import WeakSet, ref

from torch import Tensor
from torch.optim import Optimizer

from hdet.ensemble.replicas import Replicas
from hdet.ranks.agreement import RankGroup

_watching: WeakSet[Any] = WeakSet()
"""Schedulers that hear of it when their optimizer is loaded."""


class ReplicaScheduler:
    """A scheduler in front of replicas that are averaged at the end of every round. Abstract."""

    optimizer: Optimizer
    last_epoch: int
    """The step that the schedule is at, as torch calls it."""
    _run: Replicas

    @property
    def rank_group(self) -> RankGroup:
        """The replicas."""
        return self._run.rank_group

    def observe(self, loss: float | Tensor) -> None:
        """Count a loss of this rank towards the round, for frameworks that call ``step()`` without one.

        The value is copied at once and host and device are not synchronised. ``step(loss)`` is observe and step.
        """
        self._run.observe(loss)

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

    def _watch_loading(self) -> None:
        """Write this replica's values again if the optimizer is loaded after the scheduler.

        An optimizer's checkpoint brings rank 0's values. The hook holds the scheduler weakly: no reference cycle.
        """
        held = ref(self)

        def after_load(_: Optimizer) -> None:
            found = held()
            if found is not None and found._run.is_just_loaded:
                found._write_again()

        if self not in _watching:
            with suppress(AttributeError):  # a framework's wrapper that has no hooks: the next step() writes the values
                self.optimizer.register_load_state_dict_post_hook(after_load)
                _watching.add(self)
