"""Signals: the number that is compared across replicas at the end of a round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from hdet.checks import is_one_of, must_be, takes
from hdet.ensemble.probe import ProbeBatch, ProbeFn, probed_loss
from hdet.parameters import put_back, wide, write_
from hdet.ranks.group import ReplicaGroup, arriving
from hdet.ranks.shards import local


class TrainLoss:
    """The mean of the losses that a replica observed in the round. Free, noisy, and short-sighted: it prefers small
    learning rates, which lower the loss now and slow down progress later."""

    kind = "TrainLoss"
    wants_mean = False

    def __repr__(self) -> str:
        return "TrainLoss()"


class ProbeLoss:
    """A loss evaluated at the end of the round.

    Args:
        fn: gives a loss of the current model, without arguments; :class:`hdet.ProbeBatch` shares one batch among all.
        at: "replica": at the replica's own weights; "round_mean": at their mean over the round, which does not prefer
            small learning rates as the last weights do. Costs one fp32 copy of the parameters, two while it runs.
    """

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
        """In words that are equal on all ranks."""
        return f"ProbeLoss at {self.at}"

    @property
    def wants_mean(self) -> bool:
        """Whether the mean of the round's weights is needed."""
        return self.at == "round_mean"

    def value(self, k: int, group: ReplicaGroup, parameters: Sequence[Tensor], mean: Sequence[Tensor] | None) -> Tensor:
        """The loss of round ``k``, at the replica's own weights or at their ``mean`` over the round. Collective."""
        if isinstance(self.fn, ProbeBatch):
            with arriving(f"sharing the probe batch of round {k}"):
                self.fn.prepare(k, group)
        if mean is None:
            return probed_loss(self.fn)
        with put_back(parameters):
            write_(parameters, mean)
            return probed_loss(self.fn)


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
        """One more snapshot. A parameter that was not in the one before stood still until now: a layer may thaw."""
        self._means = {p: self._means[p] if p in self._means else wide(p).copy_(local(p)) for p in parameters}
        self._count += 1
        for p, mean in self._means.items():
            mean.lerp_(local(p).detach().to(mean.dtype), 1.0 / self._count)

    def reset(self) -> None:
        """A new round begins."""
        self._means, self._count = {}, 0

    def of(self, parameters: Sequence[Tensor]) -> list[Tensor] | None:
        """The mean of each so far, or None before the first snapshot."""
        return [self._means[p] for p in parameters] if self._count else None
