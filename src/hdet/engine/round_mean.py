"""The round-mean weights: a running mean of a few evenly spaced snapshots of a round, in fp32."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hdet.copies import wide
from hdet.distributed.shards import local

__all__ = ["RoundMean"]


class RoundMean:
    """Takes snapshots of parameters at evenly spaced steps. One fp32 copy of the parameters.

    Args:
        snapshots: at most so many in a round.
    """

    def __init__(self, snapshots: int = 32) -> None:
        self._snapshots = snapshots
        self._means: dict[Tensor, Tensor] = {}
        self._count = 0

    def is_due(self, step: int, length: int) -> bool:
        """Whether step 1..length of a round of ``length`` steps is one of its snapshots; the last one always is.

        >>> mean = RoundMean()
        >>> [s for s in range(1, 101) if mean.is_due(s, 100)][:4], mean.is_due(100, 100)
        ([4, 7, 10, 13], True)
        """
        taken = min(length, self._snapshots)
        return step * taken // length > (step - 1) * taken // length

    @torch.no_grad()
    def add(self, parameters: Sequence[Tensor]) -> None:
        """One more snapshot. A parameter that was not in the one before stood still until now: a layer may thaw."""
        self._means = {p: self._means[p] if p in self._means else wide(p).copy_(local(p)) for p in parameters}
        self._count += 1
        now = [local(p).detach().to(mean.dtype) for p, mean in self._means.items()]
        torch._foreach_lerp_(list(self._means.values()), now, 1.0 / self._count)

    def reset(self) -> None:
        """A new round begins."""
        self._means, self._count = {}, 0

    def of(self, parameters: Sequence[Tensor]) -> list[Tensor] | None:
        """The mean of each so far, or None before the first snapshot."""
        return [self._means[p] for p in parameters] if self._count else None
