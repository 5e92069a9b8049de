"""The path and its sums, measured on the device: what the estimated rate is made of.

This is what :mod:`hdet.rule.estimate` needs of tensors: products with the displacement, and the sum of gradients.
Everything stays on the device until a round ends. Memory: the weights at the beginning of the path, and the sum of
gradients, both at least in fp32.

The letters are those of :mod:`hdet.rule.estimate`: x_0 is the beginning of the path, g a gradient, w its weight in
the sums. A *place* is which part of sharded tensors a rank holds. An optimizer may make a step in *parts*, as ZeRO
does: :func:`stepping_now` says which parameters hold gradients of the part to come.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hdet.copies import refuse_other_shapes
from hdet.optimizer import Rate, copy_rate, grouped_parameters, parameters_at, places_of
from hdet.ranks.shards import counted_once, stepping_now
from hdet.rule.estimate import Measured, PathSums, largest_sizes, typical_norm, weight_ratio
from hdet.search.pieces import Pieces, Vectors

__all__ = ["Measure"]


_NUMBERS = ("rates", "path_steps", "rate", "typical")
"""Attributes of a Measure that a checkpoint has as they are."""


class Measure:
    """The path since the origin, and the sums along it.

    Args:
        groups: numbers of the parameter groups whose rate is searched, the leading one first. Other groups are not
            measured.
    """

    def __init__(self, groups: Sequence[int]) -> None:
        self.groups = list(groups)
        self._typical = 1.0
        """The typical norm of the weights over their norm, by the first step."""
        self.has_other_parameters = False
        """Whether some were frozen, thawed or added since the run's first path: it cannot be compared with this one."""
        self.begin_path()

    def begin_path(self) -> None:
        """A new path begins with the next step."""
        self._pieces: Pieces | None = None
        """The weights at its beginning, x_0."""
        self._sum: Vectors = []
        """s, the weighted sum of gradients."""
        self._known = self._now = PathSums()
        """The other sums: before the round, and as last measured."""
        self._rates: Rate = 0.0
        """The sum of the rates of all steps."""
        self._path_steps = 0
        """The number of those steps."""
        self._rate: Rate = 0.0
        """The rate of the step that was sampled last."""
        self.begin_round()

    def begin_round(self) -> None:
        """Sums go on; what is kept of each sampled step, for each of the pieces' places, is of one round."""
        self._known = self._now
        self._sizes: list[list[Tensor]] = []
        self._products: list[list[Tensor]] = []
        """<g, x_0 - x>."""
        self._decays: list[Rate] = []
        """What the sums before the step count for."""
        self._rates_before: list[Rate] = []
        """The sum of the rates before the step."""

    # -- steps --------------------------------------------------------------------------------------------------------

    def set_origin(self, optimizer: Optimizer) -> None:
        """The path begins here, unless it has begun with these parameters: layers may be frozen and thawed."""
        own = self.searched(optimizer)
        if self._pieces is None or self._pieces.ids != [id(p) for p in own]:
            self.has_other_parameters |= self._pieces is not None
            self.begin_path()
            self._pieces = Pieces(own)

    def searched(self, optimizer: Optimizer) -> list[Tensor]:
        """The parameters that train and whose rate is searched."""
        return [p for p, group in grouped_parameters(optimizer) if group in self.groups]

    def pass_by(self, optimizer: Optimizer) -> None:
        """A step is made whose gradients are not measured."""
        self._rates, self._path_steps = self._rates + optimizer.param_groups[self.groups[0]]["lr"], self._path_steps + 1

    @torch.no_grad()
    def sample(self, optimizer: Optimizer, weights: Sequence[Tensor] = (), *, continued: bool = False) -> None:
        """Add the gradients of the step to come. Does not synchronise, even if the rate is a tensor on a device.

        Args:
            optimizer: its parameters hold the gradients.
            weights: those at which the gradients were taken, if not those of now.
            continued: whether the optimizer makes its step in parts, as ZeRO does, and these gradients are of a further
                part of the step that was sampled last: its weights have not moved yet.
        """
        own, rate = self.searched(optimizer), copy_rate(optimizer.param_groups[self.groups[0]]["lr"])
        decay = 1.0 if continued else _weight_ratio(self._rate, rate)
        products = self._add(optimizer, own if weights else stepping_now(optimizer, own), weights or own, decay)
        if continued:
            self._products[-1] = [old + new for old, new in zip(self._products[-1], products, strict=True)]
        else:
            self._products.append(products)
            self._decays.append(decay)
            self._rates_before.append(self._rates)
            self._rate = rate
            self.pass_by(optimizer)

    @torch.no_grad()
    def sample_sizes(self, optimizer: Optimizer, *, continued: bool = False) -> None:
        """Measure how large the gradients of the step to come are, and nothing else."""
        assert self._pieces is not None  # the caller has set it
        gradients = self._pieces.gradients(optimizer, stepping_now(optimizer, self.searched(optimizer)))
        self._sizes.append(self._pieces.folded([_size(gradient) for gradient in gradients], torch.max))
        if not continued:
            self.pass_by(optimizer)

    def _add(
        self, optimizer: Optimizer, holding: Sequence[Tensor | None], weights: Sequence[Tensor], decay: Rate
    ) -> list[Tensor]:
        """Add the gradients that parameters hold now to their sum, which counts ``decay``.

        Returns:
            their <g, x_0 - x>, for each of the pieces' places.
        """
        assert self._pieces is not None  # the caller has set it
        pieces = self._pieces
        self._sum = self._sum or pieces.zeros()
        products, sizes = [], []
        gradients = pieces.gradients(optimizer, holding)
        for total, displaced, gradient in zip(self._sum, pieces.displacement(weights), gradients, strict=True):
            products.append(torch.dot(gradient, displaced))
            sizes.append(_size(gradient))
            if isinstance(decay, Tensor):
                total.mul_(decay.to(total.device)).add_(gradient)
            else:
                torch.add(gradient, total, alpha=decay, out=total)
        self._sizes.append(pieces.folded(sizes, torch.max))
        return pieces.folded(products, torch.sum)

    # -- the end of a round -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def scalars(self, optimizer: Optimizer) -> list[Tensor]:
        """What the steps since the origin have shown, on the device; :meth:`row` takes their values."""
        pieces, weights = self._pieces, self.searched(optimizer)
        if pieces is None or pieces.ids != [id(p) for p in weights]:
            return []
        products, lengths = [], []
        for number, displaced in enumerate(pieces.displacement(weights)):
            lengths.append(torch.linalg.vector_norm(displaced))
            products += [torch.dot(self._sum[number], displaced)] if self._sum else []
        sums = pieces.folded(products, torch.sum) if self._sum else pieces.norms_of_tensors(weights)
        of_steps = (number for numbers in (*self._sizes, *self._products) for number in numbers)
        return [*lengths, *pieces.norms, *of_steps, *sums]

    def row(self, values: Sequence[float]) -> list[float]:
        """What this rank shows the others, from the values of :meth:`scalars`: a block of numbers for each place.

        A block has: which place, the norms of displacement and origin, the sizes of gradients and, if these were
        sampled, the products with the displacement and the denominator; if not, the norms of origin and displacement of
        each tensor. Ranks hold different pieces, but their blocks are of the same length.
        """
        if self._pieces is None or not values:
            return []
        places, count = self._pieces.fingerprints, len(self._pieces.norms)
        norms = self._pieces.by_place(zip(values[:count], values[count : 2 * count], strict=True))
        row: list[float] = []
        for i, place in enumerate(places):
            moves, origins = zip(*norms[i], strict=True)
            row += [place, math.hypot(*moves), math.hypot(*origins), *values[2 * count + i :: len(places)]]
        return row

    def measured(self, rows: Sequence[Sequence[float]]) -> Measured:
        """From every rank's :meth:`row`: what several ranks hold counts once."""
        if self._pieces is None or not rows[0]:
            return Measured()
        width = len(rows[0]) // len(self._pieces.places)
        moves, origins, *more = counted_once(rows, width)
        distance, length, count = math.hypot(*moves), math.hypot(*origins), len(self._sizes)
        if not self._sum:
            norms = [math.hypot(*column) for column in more[count:]]
            self._learn_norm(self._pieces.sizes, norms, length)
        size = length * self._typical
        moved = distance / size if size > 0 else distance
        measured = Measured(
            moved=moved if math.isfinite(moved) else math.inf,
            distance=distance,
            gradients=largest_sizes(more[:count]),
            rates=float(self._rates),
            path_steps=self._path_steps,
            rounding=self._pieces.rounding,
        )
        if not self._sum:
            return measured
        *products, denominator = map(sum, more[count:])
        self._now = self._known.with_steps(products, map(float, self._rates_before), map(float, self._decays))
        return measured.with_sums(self._now, denominator)

    def _learn_norm(self, sizes: Sequence[int], norms: Sequence[float], whole: float) -> None:
        """``norms``: of each tensor, first at the origin, then of its displacement; ``whole``: of all at the origin."""
        typical = typical_norm(sizes, norms[: len(sizes)], norms[len(sizes) :]) if norms else 0.0
        if 0 < typical < math.inf and whole > 0:
            self._typical = typical / whole

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def saved(self, optimizer: Optimizer) -> dict[str, Any] | None:
        """Origin and sums: the tensors themselves. None if there is no path yet."""
        pieces = self._pieces
        places = places_of(pieces.ids, optimizer) if pieces is not None else None
        if pieces is None or places is None:
            return None
        parameters = parameters_at(places, optimizer)
        return {
            "places": places,
            "origin": pieces.as_tensors(pieces.origin, parameters),
            "sum": pieces.as_tensors(self._sum, parameters) if self._sum else [],
            "known": list(self._known),
            "sizes": self._sizes,
            "products": self._products,
            "decays": self._decays,
            "rates_before": self._rates_before,
            **{name: getattr(self, f"_{name}") for name in _NUMBERS},
        }

    @classmethod
    def loaded(cls, saved: Mapping[str, Any] | None, groups: Sequence[int], optimizer: Optimizer) -> Measure:
        """A new one from :meth:`saved`. What does not fit raises."""
        found = cls(groups)
        if saved is None:
            return found
        parameters = parameters_at(saved["places"], optimizer)
        refuse_other_shapes(parameters, saved["origin"])
        found._pieces = Pieces(parameters, saved["origin"])
        found._sum = found._pieces.copied(saved["sum"]) if saved["sum"] else []
        device = found._pieces.norms[0].device if found._pieces.norms else torch.device("cpu")
        vars(found).update({f"_{name}": copy_rate(saved[name]) for name in _NUMBERS})
        found._path_steps = int(saved["path_steps"])
        found._known = found._now = PathSums(*saved["known"])
        found._decays = [copy_rate(decay) for decay in saved["decays"]]
        found._rates_before = [copy_rate(rates) for rates in saved["rates_before"]]
        for name in ("sizes", "products"):
            setattr(found, f"_{name}", [[one.to(device, copy=True) for one in each] for each in saved[name]])
        return found


def _weight_ratio(before: Rate, now: Rate) -> Any:
    """:func:`weight_ratio`; tensors stay on their device."""
    if isinstance(now, Tensor) or isinstance(before, Tensor):
        return weight_ratio(before, torch.as_tensor(now), torch)
    return weight_ratio(before, now)


def _size(gradient: Tensor) -> Tensor:
    """The largest absolute value: unlike a sum of squares it neither vanishes nor overflows. A rank may hold none."""
    largest: Tensor = torch.linalg.vector_norm(gradient, math.inf) if gradient.numel() else gradient.new_zeros(())
    return largest
