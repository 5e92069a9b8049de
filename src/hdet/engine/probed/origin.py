"""The origin: the weights from which a search began, and how far training has come since."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hdet.auto.pieces import Pieces, Vectors

__all__ = ["Origin", "relative"]


class Origin:
    """One copy of the weights, at least fp32: a bf16 copy would destroy a small displacement.

    Args:
        weights: where the search begins.
        values: where it began, if not there: saved by :meth:`tensors`.
    """

    def __init__(self, weights: Sequence[Tensor], values: Sequence[Tensor] | None = None) -> None:
        self.pieces = Pieces(weights)
        self._vectors: Vectors = self.pieces.copied(weights if values is None else values)
        self._norms: list[Tensor] | None = None

    def write_(self, weights: Sequence[Tensor]) -> None:
        """Weights as at the origin, in place."""
        self.pieces.write_(weights, self._vectors)

    def tensors(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """The weights at the origin, in the shapes of ``weights`` and at least fp32."""
        return self.pieces.as_tensors(self._vectors, weights)

    @torch.no_grad()
    def way(self, weights: Sequence[Tensor]) -> Iterator[Tensor]:
        """x_0 - x, piece by piece; each valid until the next one."""
        for origin, now, way in zip(self._vectors, self.pieces.gathered(weights, 0), self.pieces.scratch, strict=True):
            yield torch.sub(origin, now, out=way)

    @torch.no_grad()
    def norms(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """Of the way, piece by piece, and then of the origin. Does not synchronise."""
        if self._norms is None:
            self._norms = [torch.linalg.vector_norm(vector) for vector in self._vectors]
        return [*(torch.linalg.vector_norm(way) for way in self.way(weights)), *self._norms]

    @property
    def number_of_norms(self) -> int:
        return 2 * len(self._vectors)

    def lengths(self, norms: Sequence[float]) -> list[list[float]]:
        """From the values of :meth:`norms`: those of the way and of the origin, for each of the pieces' places."""
        half = len(self._vectors)
        ways, origins = self.pieces.by_place(norms[:half]), self.pieces.by_place(norms[half:])
        return [[math.hypot(*way), math.hypot(*origin)] for way, origin in zip(ways, origins, strict=True)]


def relative(ways: Sequence[float], origins: Sequence[float]) -> float:
    """The length of the way over that of the origin, from :meth:`Origin.lengths`; infinite where it is no number.

    >>> relative([3.0, 4.0], [6.0, 8.0])
    0.5
    """
    moved, size = math.hypot(*ways), math.hypot(*origins)
    ratio = moved / size if size > 0 else moved
    return ratio if math.isfinite(ratio) else math.inf
