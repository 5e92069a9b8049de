"""A probe without data of its own: batches of the training are set aside for it."""

from __future__ import annotations

from collections import deque
from typing import Any, Literal

import torch
from torch import nn

from hdet.checks import shown
from hdet.distributed.group import ReplicaGroup
from hdet.engine.probe import LossFn, ProbeBatch, copied
from hdet.errors import ArgumentError

__all__ = ["TrainProbe"]

_MOST = 1000
"""Batches that may be kept: older ones tell nothing more."""


class TrainProbe(ProbeBatch):
    """A probe for those who have no data beside: it judges by batches of the training itself.

    .. code-block:: python

        probe = hdet.TrainProbe(model, loss_fn)
        scheduler = hdet.OneCycleLR(optimizer, max_lr="auto", total_steps=10_000, probe=probe)
        for batch in loader:
            loss = train_step(batch)
            optimizer.step()
            scheduler.observe(loss, batch=batch)
            scheduler.step()

    The first batch of each round is copied when it is observed. A round is judged by one from ``keep - 1`` rounds ago:
    both weights that are compared were trained on it, equally often and long before. One of this round would flatter
    the newer weights, one of the round before the older ones; docs/finding-the-rate.md has the figures.

    Memory: ``keep`` batches where they lie, on every rank, and one more on the model's device. Rank 0's are shared, so
    that all ranks decide alike. They are not saved: a resumed run sets others aside.

    Args:
        model, loss_fn, mode, autocast: as in :class:`hdet.ProbeBatch`.
        keep: how many batches are kept, 2 to 1000.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        keep: int = 4,
        mode: Literal["probe", "eval"] = "probe",
        autocast: torch.dtype | Literal["inherit"] | None = "inherit",
    ) -> None:
        if isinstance(keep, bool) or not isinstance(keep, int) or not 2 <= keep <= _MOST:
            raise ArgumentError(
                f"keep must be a whole number of batches, at least 2 and at most {_MOST}, but got keep={shown(keep)}; "
                "leave it out for 4"
            )
        self._aside = _Aside(keep)
        super().__init__(model, loss_fn, self._aside, mode, autocast)

    def set_aside(self, batch: Any) -> None:
        """Keep a copy of the batch, if it is the first of its round."""
        self._aside.add(batch)

    def prepare(self, k: int, group: ReplicaGroup) -> None:
        """Share rank 0's oldest batch. Collective. The next batch is the first of a new round."""
        super().prepare(k, group)
        self._aside.begin_round()

    def begin_anew(self) -> None:
        """Another run begins: what was set aside was trained on by the one before."""
        self._aside.clear()


class _Aside:
    """The first batches of the last rounds, oldest first."""

    def __init__(self, keep: int) -> None:
        self._batches: deque[Any] = deque(maxlen=keep)
        self._round_has_one = False

    def __call__(self, k: int) -> Any:
        """The oldest, whichever round ``k`` is."""
        if not self._batches:
            raise ArgumentError(
                f"hdet.TrainProbe has no batch to judge round {k} by: call scheduler.observe(loss, batch=batch) before "
                "scheduler.step(), at every step, or give hdet.ProbeBatch(model, loss_fn, loader)"
            )
        return self._batches[0]

    def add(self, batch: Any) -> None:
        if not self._round_has_one:
            self._batches.append(copied(batch))
            self._round_has_one = True

    def begin_round(self) -> None:
        self._round_has_one = False

    def clear(self) -> None:
        self._batches.clear()
        self._round_has_one = False
