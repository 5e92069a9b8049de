"""The origin: the weights from which a search began, and how far training has come since."""

from __future__ import annotations

import math
from collections.abc import Container, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from hdet.comm.host import to_host
from hdet.engine.copies import wide, write_
from hdet.engine.probed.evaluated import evaluated
from hdet.engine.weights import grouped_parameters, trained_parameters

__all__ = ["Origin"]


class Origin:
    """One copy of the weights, at least fp32: a bf16 copy would destroy a small displacement."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """The next step has an origin of its own."""
        self._weights: list[Tensor] | None = None
        self._parameters: list[int] = []

    def of(self, parameters: Sequence[Tensor]) -> list[Tensor] | None:
        """The weights, if they are of these parameters."""
        return self._weights if self._parameters == [id(p) for p in parameters] else None

    @torch.no_grad()
    def set(self, optimizer: Optimizer) -> None:
        """It is here, unless it is somewhere already."""
        if self._weights is None:
            parameters = trained_parameters(optimizer)
            with evaluated(optimizer):
                self._weights = [wide(p).copy_(p) for p in parameters]
            self._parameters = [id(p) for p in parameters]

    def go_back_(self, optimizer: Optimizer) -> None:
        """Weights as at the origin."""
        if self._weights is not None:
            write_(trained_parameters(optimizer), self._weights)

    @torch.no_grad()
    def distance(self, optimizer: Optimizer, groups: Container[int]) -> float:
        """How far the weights of some groups are from it, over its norm; infinite where that is no number."""
        origin = self.of(trained_parameters(optimizer))
        if origin is None:
            return 0.0
        with evaluated(optimizer):
            pairs = [(a, p) for a, (p, g) in zip(origin, grouped_parameters(optimizer), strict=True) if g in groups]
            far = [torch.linalg.vector_norm(p.to(a.dtype) - a) for a, p in pairs]
        own = [torch.linalg.vector_norm(a) for a, _ in pairs]
        norms = to_host([*far, *own])
        moved, size = math.hypot(*norms[: len(pairs)]), math.hypot(*norms[len(pairs) :])
        ratio = moved / size if size > 0 else moved
        return ratio if math.isfinite(ratio) else math.inf
