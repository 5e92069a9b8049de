"""Points on the line that a round's displacement spans: anchor + rho D, one D per parameter group."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from hdet.engine.probes import rng_put_back
from hdet.engine.signals import Probe
from hdet.engine.snapshots import RoundMean, kept, wide, write_
from hdet.engine.weights import grouped_parameters, trained_parameters

__all__ = ["SNAPSHOTS", "Points", "loss_now"]


SNAPSHOTS = 8
"""Of a round, for its mean."""


class Points:
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
            self._mean.add(parameters)

    def reset(self) -> None:
        """A new round begins with the next step."""
        self._anchor, self._parameters = None, []
        self._mean.reset()

    def go_back_to_anchor(self, optimizer: Optimizer) -> None:
        """Undo the round: weights as at its beginning, no optimizer state."""
        write_(trained_parameters(optimizer), self._anchor or [])
        optimizer.state.clear()

    def losses(
        self,
        optimizer: Optimizer,
        rho: Sequence[Sequence[float]],
        mine: Iterable[int],
        probe: Callable[[], Tensor | float],
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
        with kept(parameters) as own:
            known = self.anchor_of(parameters)
            anchor = known if known is not None else own
            end = self._mean.weights if at_mean and known is not None and self._mean.weights is not None else own
            for point in mine:
                _write_point_(parameters, anchor, end, [rho[point][g] for g in groups])
                found[point] = loss_now(probe, parameters)
        return found

    @torch.no_grad()
    def moved(self, optimizer: Optimizer, groups: Container[int]) -> float:
        """||D|| / ||anchor|| of some groups, to the weights as they are; infinite where that is no number."""
        anchor = self.anchor_of(trained_parameters(optimizer))
        if anchor is None:
            return 0.0
        pairs = [(a, p) for a, (p, g) in zip(anchor, grouped_parameters(optimizer), strict=True) if g in groups]
        if not pairs:
            return 0.0
        far = torch.stack([torch.linalg.vector_norm(p.to(a.dtype) - a).double().cpu() for a, p in pairs])
        own = torch.stack([torch.linalg.vector_norm(a).double().cpu() for a, _ in pairs])
        ratio = float(far.norm() / own.norm()) if float(own.norm()) > 0 else float(far.norm())
        return ratio if math.isfinite(ratio) else math.inf


@torch.no_grad()
def loss_now(probe: Callable[[], Tensor | float], parameters: Sequence[Tensor]) -> float:
    """The probe's loss of the weights as they are; random generators stay where they were."""
    with rng_put_back(parameters[0].device if parameters else torch.device("cpu")):
        return float(Probe(probe).value())


@torch.no_grad()
def _write_point_(parameters: list[Tensor], anchor: list[Tensor], end: list[Tensor], rho: list[float]) -> None:
    for p, a, e, r in zip(parameters, anchor, end, rho, strict=True):
        p.copy_(torch.lerp(a, e.to(a.dtype), r))
