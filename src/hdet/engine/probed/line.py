"""The line that a round's displacement spans, and points on it: anchor + rho D, one D per parameter group."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from hdet.algorithm.auto.constants import SNAPSHOTS
from hdet.comm.host import to_host
from hdet.engine.copies import put_back, wide, write_
from hdet.engine.probe import ProbeFn, probed_loss, rng_put_back
from hdet.engine.probed.evaluated import evaluated
from hdet.engine.round_mean import RoundMean
from hdet.engine.weights import grouped_parameters, trained_parameters

__all__ = ["Line", "loss_now"]


class Line:
    """Anchor and mean of one round, both at least fp32: a bf16 anchor would destroy a small displacement."""

    def __init__(self) -> None:
        self._anchor: list[Tensor] | None = None
        self._parameters: list[int] = []
        self._mean = RoundMean(SNAPSHOTS)

    def anchor_of(self, parameters: Sequence[Tensor]) -> list[Tensor] | None:
        """The anchor, if there is one of these parameters."""
        return self._anchor if self._parameters == [id(p) for p in parameters] else None

    @torch.no_grad()
    def anchor_at(self, optimizer: Optimizer) -> None:
        """The round begins here, unless it has begun."""
        if self._anchor is None:
            parameters = trained_parameters(optimizer)
            with evaluated(optimizer):
                self._anchor = [wide(p).copy_(p) for p in parameters]
            self._parameters = [id(p) for p in parameters]

    def add(self, optimizer: Optimizer, step: int, length: int) -> None:
        """Step 1..length of the round has been made."""
        if not self._mean.is_due(step, length):
            return
        parameters = trained_parameters(optimizer)
        if self.anchor_of(parameters) is None:  # frozen or thawed: begin anew
            self.reset()
            self.anchor_at(optimizer)
        else:
            with evaluated(optimizer):
                self._mean.add(parameters)

    def reset(self) -> None:
        """A new round begins with the next step."""
        self._anchor, self._parameters = None, []
        self._mean.reset()

    def back_to_anchor_(self, optimizer: Optimizer) -> None:
        """Undo the round: weights as at its beginning."""
        if self._anchor is not None:
            write_(trained_parameters(optimizer), self._anchor)

    def losses(
        self,
        optimizer: Optimizer,
        rho: Sequence[Sequence[float]],
        mine: Iterable[int],
        probe: ProbeFn,
        *,
        at_mean: bool,
    ) -> list[float]:
        """Losses of the points ``mine``, NaN for the others. The weights stay as they are.

        Args:
            optimizer: whose parameters move.
            rho: ``rho[point][group]``.
            mine: which points are evaluated here.
            probe: gives a loss of the current model.
            at_mean: whether D ends at the round's mean, or at the weights as they are.
        """
        found = [math.nan] * len(rho)
        parameters = trained_parameters(optimizer)
        groups = [g for _, g in grouped_parameters(optimizer)]
        with evaluated(optimizer), put_back(parameters) as own:
            known = self.anchor_of(parameters)
            anchor = known if known is not None else own
            end = self._mean.weights if at_mean and known is not None and self._mean.weights is not None else own
            for point in mine:
                multiples = [rho[point][g] for g in groups]
                rows = zip(anchor, end, multiples, strict=True)
                write_(parameters, (torch.lerp(a, e.to(a.dtype), r) for a, e, r in rows))  # one at a time
                found[point] = loss_now(probe, parameters)
        return found

    @torch.no_grad()
    def displacement(self, optimizer: Optimizer, groups: Container[int]) -> float:
        """||D|| / ||anchor|| of some groups, to the weights as they are; infinite where that is no number."""
        anchor = self.anchor_of(trained_parameters(optimizer))
        if anchor is None:
            return 0.0
        with evaluated(optimizer):
            pairs = [(a, p) for a, (p, g) in zip(anchor, grouped_parameters(optimizer), strict=True) if g in groups]
            far = [torch.linalg.vector_norm(p.to(a.dtype) - a) for a, p in pairs]
        own = [torch.linalg.vector_norm(a) for a, _ in pairs]
        norms = to_host([*far, *own])
        moved, size = math.hypot(*norms[: len(pairs)]), math.hypot(*norms[len(pairs) :])
        ratio = moved / size if size > 0 else moved
        return ratio if math.isfinite(ratio) else math.inf


@torch.no_grad()
def loss_now(probe: ProbeFn, parameters: Sequence[Tensor]) -> float:
    """The probe's loss of the weights as they are; random generators stay where they were."""
    with rng_put_back(parameters[0].device if parameters else torch.device("cpu")):
        return float(probed_loss(probe))
