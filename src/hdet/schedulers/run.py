"""A run, which is a search for the rate or an ensemble of replicas, and what all schedulers in front of one share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any, Protocol
from weakref import WeakSet, ref

from torch import Tensor
from torch.optim import Optimizer

from hdet.journal.writer import JournalWriter
from hdet.parameters import Rate
from hdet.ranks.group import ReplicaIndex
from hdet.ranks.rank_group import RankGroup
from hdet.rollback.losses import Losses


class Run(Protocol):
    """What a scheduler needs of the run behind it."""

    losses: Losses
    rank_group: RankGroup
    journal_writer: JournalWriter
    is_just_loaded: bool

    @property
    def replica_index(self) -> ReplicaIndex: ...
    @property
    def total_steps(self) -> int | None: ...
    def begin(self, optimizer: Optimizer) -> None: ...
    def observe(self, loss: float | Tensor) -> None: ...
    def step(
        self,
        optimizer: Optimizer,
        before: int,
        after: int,
        loss: float | Tensor | None,
        schedule: Callable[[int], list[float]],
        peak: Callable[[], float],
    ) -> None: ...
    def rates(self, schedule: Sequence[Rate], t: int) -> list[Rate]: ...
    def base(self, schedule: Sequence[Rate], t: int) -> list[Rate]: ...
    def multipliers(self, t: int, replica_index: ReplicaIndex) -> list[float]: ...
    def grow(self, new: Collection[int], knobs: Sequence[str]) -> None: ...
    def converge(self, optimizer: Optimizer, t: int) -> None: ...
    def consensus(self, optimizer: Optimizer, t: int) -> AbstractContextManager[None]: ...
    def state(self) -> dict[str, Any]: ...
    def check(self, state: Mapping[str, Any]) -> None: ...
    def load(self, state: Mapping[str, Any], total_steps: int | None, t: int) -> None: ...
    def adopt(self, total_steps: int, t: int) -> None: ...


_watching: WeakSet[Any] = WeakSet()
"""Schedulers that hear of it when their optimizer is loaded."""


class WithRun:
    """What ``hdet.OneCycleLR``, ``hdet.Ensemble`` and ``hdet.auto(..., schedule=...)`` have in common."""

    optimizer: Optimizer
    last_epoch: int
    """The step that the schedule is at, as torch calls it."""
    _run: Run

    def observe(self, loss: float | Tensor) -> None:
        """Count a loss of this rank towards the round, for frameworks that call ``step()`` without one.

        The value is copied at once and host and device are not synchronised. ``step(loss)`` is observe and step.
        """
        self._run.observe(loss)

    def converge(self) -> None:
        """Average now, and nothing else: the round, its values and its losses go on.

        Replicas average their weights. In a search all ranks hold the same weights, and only buffers are averaged.
        """
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
