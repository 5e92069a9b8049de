"""The reach of real training: inner products of gradients with the way gone since the origin."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from hdet.algorithm.auto.reach import Tally, forgetting
from hdet.auto.pieces import Vectors
from hdet.distributed.shards import local_gradient
from hdet.engine.probed.evaluated import parts_of
from hdet.engine.probed.origin import Origin
from hdet.rates import Rate, copy_rate

__all__ = ["PLAIN", "Gradients", "Reading"]


class Reading(NamedTuple):
    """What an optimizer makes of the gradients that its parameters hold, before it uses them."""

    turned: frozenset[int] = frozenset()
    """Ids of the parameters that are to go up along them: ``maximize=True``."""

    scale: Tensor | None = None
    """What a GradScaler has multiplied them by: torch hands it to fused optimizers, which divide by themselves."""
    left_out: Tensor | None = None
    """Above 0 where the optimizer will find some that are not finite, and make no step."""

    @classmethod
    def of(cls, optimizer: Optimizer) -> Reading:
        ascending = (group["params"] for group in optimizer.param_groups if group.get("maximize", False))
        turned = frozenset(id(p) for parameters in ascending for p in parameters)
        scaled = parts_of(optimizer)[0]
        return cls(turned, getattr(scaled, "grad_scale", None), getattr(scaled, "found_inf", None))

    def read(self, gradient: Tensor) -> Tensor:
        """Without the scale, and zero where there will be no step. Does not synchronise."""
        if self.scale is not None:
            gradient = gradient / self.scale.to(gradient.device, non_blocking=True)
        if self.left_out is not None:
            gradient = torch.where(self.left_out.to(gradient.device, non_blocking=True) > 0, 0.0, gradient)
        return gradient


PLAIN = Reading()


class Gradients:
    """Two sums over the steps that were heard, on the device: one number, and one fp32 copy of the gradients.

    The formula is :mod:`hdet.algorithm.auto.reach`'s. The caller passes the origin.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin anew."""
        self._pull: Vectors = []
        self._asked: list[Tensor] = []
        self._rates: Rate = 0.0
        self.stretch = 0
        """How many steps there were, heard or not."""
        self._ahead: Rate = 0.0
        self._weight: Rate = 0.0
        self._rate: Rate | None = None
        self.begin_round()

    def begin_round(self) -> None:
        """Sums go on; how large gradients are is asked of each round."""
        self._largest: list[Tensor] = []

    def pass_by(self, rate: Rate) -> None:
        """A step at ``rate`` is made that is not listened to."""
        self._rates, self.stretch = self._rates + rate, self.stretch + 1

    @torch.no_grad()
    def add(
        self,
        origin: Origin,
        weights: Sequence[Tensor],
        parameters: Sequence[Tensor | None],
        rate: Rate,
        reading: Reading = PLAIN,
    ) -> None:
        """One step at ``rate``. Does not synchronise, also where the rate is a tensor on a device.

        Args:
            origin: the weights from which the way is measured.
            weights: those at which the gradients were taken.
            parameters: they hold the gradients; None: it is no part of what steps now.
            rate: of the step that follows.
            reading: how the gradients are to be read.
        """
        discount = _discount(self._rate, rate)
        self._hear(origin, weights, parameters, discount, reading)
        self._ahead, self._weight = self._ahead * discount + self._rates, self._weight * discount + 1.0
        self.pass_by(rate)
        self._rate = rate

    @torch.no_grad()
    def add_part(
        self, origin: Origin, weights: Sequence[Tensor], parameters: Sequence[Tensor | None], reading: Reading
    ) -> None:
        """A further part of the step that was added last, whose parameters stood as None there."""
        self._hear(origin, weights, parameters, 1.0, reading)

    @torch.no_grad()
    def notice(self, origin: Origin, parameters: Sequence[Tensor | None], reading: Reading) -> None:
        """How large the gradients of a step are, and nothing else."""
        self._measure(origin, [_size(gradient) for gradient in _gathered(origin, parameters, reading)])

    def _measure(self, origin: Origin, sizes: Sequence[Tensor]) -> None:
        """The largest number of a round's gradients. Unlike a sum of squares it neither vanishes nor overflows."""
        largest = [_folded(torch.maximum, own) for own in origin.pieces.by_place(sizes)]
        if self._largest:
            largest = [torch.maximum(old, new) for old, new in zip(self._largest, largest, strict=True)]
        self._largest = largest

    def _hear(
        self,
        origin: Origin,
        weights: Sequence[Tensor],
        parameters: Sequence[Tensor | None],
        discount: Rate,
        reading: Reading,
    ) -> None:
        """Earlier sums times ``discount``, and the gradients of now."""
        if not self._pull:
            self._pull = origin.pieces.zeros()
        products, sizes = [], []
        gradients = _gathered(origin, parameters, reading)
        for pull, way, gradient in zip(self._pull, origin.way(weights), gradients, strict=True):
            products.append(torch.dot(gradient, way))
            sizes.append(_size(gradient))
            if isinstance(discount, Tensor):
                pull.mul_(discount.to(pull.device)).add_(gradient)
            else:
                torch.add(gradient, pull, alpha=discount, out=pull)
        self._measure(origin, sizes)
        asked = _sums(origin, products)
        if self._asked:
            asked = [old * discount + new for old, new in zip(self._asked, asked, strict=True)]
        self._asked = asked

    @torch.no_grad()
    def sums(self, origin: Origin, weights: Sequence[Tensor]) -> list[Tensor]:
        """What was asked, and what the way has gained, on the device: for each of the pieces' places."""
        if not self._asked:
            return []
        products = [torch.dot(pull, way) for pull, way in zip(self._pull, origin.way(weights), strict=True)]
        return [*self._asked, *_sums(origin, products)]

    def sizes(self, origin: Origin) -> list[Tensor]:
        """The largest number of the round's gradients, on the device: for each of the pieces' places."""
        return self._largest or [torch.zeros(()) for _ in origin.pieces.places]

    @property
    def rates(self) -> float:
        """The sum of the rates of all steps, heard or not. Synchronises where they are on a device."""
        return float(self._rates)

    def tally(self, sums: Sequence[float]) -> Tally:
        """From what was asked and gained: the values of :meth:`sums`, added up over all places."""
        if not (self._asked and sums):
            return Tally(0.0, 0.0, 0.0)
        asked, gained = sums
        return Tally(asked, gained, self.rates, float(self._ahead / self._weight))

    def saved(self, origin: Origin, weights: Sequence[Tensor]) -> dict[str, Any]:
        """The sums, for a checkpoint."""
        return {
            "pull": origin.pieces.as_tensors(self._pull, weights) if self._pull else [],
            "asked": self._asked,
            "rates": self._rates,
            "stretch": self.stretch,
            "ahead": self._ahead,
            "weight": self._weight,
            "rate": self._rate,
            "largest": self._largest,
        }

    @classmethod
    def loaded(cls, saved: Mapping[str, Any], origin: Origin) -> Gradients:
        """From :meth:`saved`."""
        found = cls()
        found._pull = origin.pieces.copied(saved["pull"]) if saved["pull"] else []
        found._asked = [asked.to(found._pull[0].device, copy=True) for asked in saved["asked"]]
        found._rates, found._ahead, found._weight = (copy_rate(saved[name]) for name in ("rates", "ahead", "weight"))
        found._rate, found.stretch = copy_rate(saved["rate"]), int(saved["stretch"])
        found._largest = [largest.clone() for largest in saved["largest"]]
        return found


def _discount(before: Rate | None, now: Rate) -> Rate:
    """What earlier sums count for: the ratio of the squared rates, at most 1. Tensors stay on their device."""
    if before is None:
        return 1.0
    if isinstance(now, Tensor) or isinstance(before, Tensor):
        ratio = torch.as_tensor(before / now).square().clamp(max=1.0)
        return torch.where(torch.as_tensor(now) > 0, ratio, torch.ones_like(ratio))
    return forgetting(before, now)


def _sums(origin: Origin, products: Sequence[Tensor]) -> list[Tensor]:
    """Of one product for each piece: a scalar for each place, on its first piece's device."""
    return [_folded(torch.add, own) for own in origin.pieces.by_place(products)]


def _folded(fold: Callable[[Tensor, Tensor], Tensor], values: Sequence[Tensor]) -> Tensor:
    """Scalars as one, on the first one's device."""
    total, *more = values
    for value in more:
        total = fold(total, value.to(total.device))
    return total


def _gathered(origin: Origin, parameters: Sequence[Tensor | None], reading: Reading) -> Iterator[Tensor]:
    """The gradients that parameters hold, piece by piece; each valid until the next one."""
    held = [_gradient(p, id(p) in reading.turned) if p is not None else None for p in parameters]
    return map(reading.read, origin.pieces.gathered(held, 1))


def _size(gradient: Tensor) -> Tensor:
    """The largest of its numbers; a rank may hold none of a sharded one."""
    largest: Tensor = torch.linalg.vector_norm(gradient, math.inf) if gradient.numel() else gradient.new_zeros(())
    return largest


def _gradient(p: Tensor, turned: bool) -> Tensor | None:
    gradient = local_gradient(p)
    if gradient is None:
        return None
    dense = gradient.to_dense() if gradient.is_sparse else gradient
    return -dense if turned else dense
