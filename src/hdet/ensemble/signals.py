"""Signals: the number that is compared across replicas at the end of a round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from hdet.checks import is_one_of, must_be, takes
from hdet.copies import put_back, wide, write_
from hdet.ensemble.probe import ProbeBatch, ProbeFn, probed_loss
from hdet.ranks.group import ReplicaGroup, arriving
from hdet.ranks.shards import local


class TrainLoss:
    """Compare replicas by the mean of the losses that they observed in the round.

    It costs nothing. It is noisy, and it prefers small learning rates, which lower the loss now and slow down progress
    later.

    >>> TrainLoss()
    TrainLoss()
    """

    kind = "TrainLoss"
    is_probe = wants_mean = False

    def __repr__(self) -> str:
        return "TrainLoss()"

    def value(self, *_: object) -> None:
        """Nothing is measured: the losses that were observed are compared."""


class ProbeLoss:
    """Compare replicas by a loss that is evaluated at the end of the round.

    Args:
        fn: gives a loss of the current model, without arguments; :class:`hdet.ProbeBatch` shares one batch among all.
        at: "replica": at the replica's own weights; "round_mean": at their mean over the round, which does not prefer
            small learning rates as the last weights do. Costs one fp32 copy of the parameters, two while it runs.

    >>> ProbeLoss(lambda: 0.5, at="round_mean").wants_mean
    True
    """

    is_probe = True

    def __init__(self, fn: ProbeFn, at: Literal["replica", "round_mean"] = "replica") -> None:
        must_be("a function without arguments that returns a loss", takes(fn), "for instance a ProbeBatch", fn=fn)
        fits = is_one_of(at, ("replica", "round_mean"))
        must_be('"replica" or "round_mean"', fits, 'leave it out for "replica"', at=at)
        self.fn = fn
        self.at = at

    def __repr__(self) -> str:
        return f"ProbeLoss({self.fn!r}, at={self.at!r})"

    @property
    def kind(self) -> str:
        """The signal in words, which must be equal on all ranks."""
        return f"ProbeLoss at {self.at}"

    @property
    def wants_mean(self) -> bool:
        """Whether the mean of the round's weights is needed."""
        return self.at == "round_mean"

    def value(self, k: int, group: ReplicaGroup, parameters: Sequence[Tensor], mean: Sequence[Tensor] | None) -> float:
        """The loss of round ``k``, at the replica's own weights or at their ``mean`` over the round. Collective."""
        if isinstance(self.fn, ProbeBatch):
            with arriving(f"sharing the probe batch of round {k}"):
                self.fn.prepare(k, group)
        if mean is None:
            return float(probed_loss(self.fn))
        with put_back(parameters):
            write_(parameters, mean)
            return float(probed_loss(self.fn))


Signal = TrainLoss | ProbeLoss
_SNAPSHOTS = 32


class RoundMean:
    """The mean of parameters at evenly spaced steps, at most 32 in a round. One fp32 copy of the parameters."""

    def __init__(self) -> None:
        self._means: dict[Tensor, Tensor] = {}
        self._count = 0

    def is_due(self, step: int, length: int) -> bool:
        """Whether step 1..length of a round of ``length`` steps is one of its snapshots; the last one always is.

        >>> mean = RoundMean()
        >>> [s for s in range(1, 101) if mean.is_due(s, 100)][:4], mean.is_due(100, 100)
        ([4, 7, 10, 13], True)
        """
        taken = min(length, _SNAPSHOTS)
        return step * taken // length > (step - 1) * taken // length

    @torch.no_grad()
    def add(self, parameters: Sequence[Tensor]) -> None:
        """Add a snapshot. A parameter that was not in the one before, since it was frozen, has not moved until now."""
        self._means = {p: self._means[p] if p in self._means else wide(p).copy_(local(p)) for p in parameters}
        self._count += 1
        for p, mean in self._means.items():
            mean.lerp_(local(p).detach().to(mean.dtype), 1.0 / self._count)

    def reset(self) -> None:
        """Forget all snapshots: a new round begins."""
        self._means, self._count = {}, 0

    def of(self, parameters: Sequence[Tensor]) -> list[Tensor] | None:
        """The mean of each parameter so far; None before the first snapshot."""
        return [self._means[p] for p in parameters] if self._count else None
