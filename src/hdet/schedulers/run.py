"""What schedulers ask of a run, whichever it is: a search for the rate, or replicas that train apart."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer

from hdet.journal.writer import JournalWriter
from hdet.parameters import Rate
from hdet.ranks.group import ReplicaIndex
from hdet.ranks.rank_group import RankGroup
from hdet.rollback.losses import Losses


class Run(Protocol):
    """What :class:`hdet.OneCycleLR` and schedulers on a schedule of the user's have in common behind them."""

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
