r"""The estimated rate, at which one step would go as far as all gradients along the path point together. Pure.

This file has the formula and its sums: the code that runs, for torch and for jax. The *path* is the way of the weights
from step to step since the search began or was last rolled back.

Training goes from :math:`x_0` by steps :math:`x_{k+1} = x_k - \eta_k u_k`, where :math:`\eta_k` is the rate,
:math:`g_k` the gradient at :math:`x_k`, and the update :math:`u_k` is whatever the optimizer makes of gradients. The
estimated rate is

.. math:: \hat\eta = \frac{\sum_k w_k \langle g_k, x_0 - x_k \rangle}{\langle s, \bar u \rangle},
    \quad s = \sum_k w_k g_k, \quad \bar u = \frac{x_0 - x_n}{\sum_k \eta_k}.

The numerator says how much further down the gradients still point along the path; the denominator is what the mean
update gains per unit of the rate. While gradients agree, the estimate stays above the rate and grows with it. Once
the rate is high enough for steps to go to and fro, gradients cancel, and it stops growing. The weights :math:`w_k` grow
as :math:`\eta_k^2` while the rate rises and stay the same if it falls, so that the small first steps count little.

If all gradients were equal, the estimate would be the weighted mean of the sums of rates before each step,
:math:`\hat\eta_1 = \sum_k w_k \sum_{j<k} \eta_j / \sum_k w_k`. The *straightness* of the path is :math:`\kappa =
\hat\eta / \hat\eta_1`: 1 as long as no gradient has turned.

The *balance* of the path says how far gradients have turned, whatever their size is: :math:`\beta = \sum_k w_k \langle
g_k, x_0 - x_k \rangle / \sum_k w_k |\langle g_k, x_0 - x_k \rangle|`.

For :math:`u = g` the estimate is D-Adaptation's distance over the gradient's norm, and for updates by the sign it is
Prodigy's. Written with the displacement, it needs no knowledge of the optimizer. In a long round only some gradients
are sampled: then the sums over :math:`k` are over these, and the sums of rates are over all steps.

What the sums are made of differs: tensors on their device (:mod:`hdet.search.measure`), or trees of arrays
(:mod:`hdet.jax.measure`). Both keep :math:`s`, which a step makes :math:`w s + g`, and give the numbers to the
functions below; ``xp`` is their array module.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from hdet.rule.constants import FP32_ROUNDING
from hdet.rule.state import Plain, quotient


class Sums(NamedTuple):
    """What the formula takes, in units of the weight of the step that was sampled last."""

    numerator: float
    """Sum of w <g, x_0 - x>."""
    denominator: float
    """<s, x_0 - x_n>."""
    rates: float
    """Sum of the rates."""
    straight: float = 0.0
    """The estimate that equal gradients would give."""
    absolute: float = 0.0
    """Sum of w |<g, x_0 - x>|."""


class PathSums(NamedTuple):
    """The sums while training goes on, before the displacement is known.

    Three equal steps of rate 1 along a constant gradient:

    >>> sums, s = PathSums(), 0.0
    >>> for x in (0.0, -1.0, -2.0):
    ...     g, w = 1.0, weight_ratio(before=1.0, now=1.0)
    ...     sums, s = sums.with_step(product=g * (0.0 - x), rates=-x, w=w), w * s + g
    >>> totals = sums.over(denominator=s * (0.0 + 3.0), rates=3.0)
    >>> estimate(totals), straightness(totals), balance(totals)
    (1.0, 1.0, 1.0)
    """

    numerator: float = 0.0
    absolute: float = 0.0
    """Sum of w |<g, x_0 - x>|."""
    rates_before: float = 0.0
    """Sum of w times the sum of rates before the step."""
    weight: float = 0.0
    """Sum of w."""

    def with_step(self, product: float, rates: float, w: float) -> PathSums:
        """The sums with one more sampled step. One that is not sampled only adds its rate to those of the path.

        Args:
            product: <g, x_0 - x>.
            rates: the sum of the rates before the step.
            w: :func:`weight_ratio`, what the sums so far count for.
        """
        return PathSums(
            numerator=w * self.numerator + product,
            absolute=w * self.absolute + abs(product),
            rates_before=w * self.rates_before + rates,
            weight=w * self.weight + 1.0,
        )

    def with_steps(self, products: Sequence[float], rates: Iterable[float], ratios: Iterable[float]) -> PathSums:
        """The sums with more steps, in turn."""
        sums = self
        for product, before, w in zip(products, rates, ratios, strict=True):
            sums = sums.with_step(product, before, w)
        return sums

    def over(self, denominator: float, rates: float) -> Sums:
        """What the formula takes. A step must have been sampled."""
        return Sums(self.numerator, denominator, rates, self.rates_before / self.weight, self.absolute)


def weight_ratio(before: Any, now: Any, xp: Any = Plain) -> Any:
    """What earlier sums count for if the rate goes from ``before`` to ``now``: at most as much as until then."""
    return xp.where(now > 0, xp.clip((before / xp.where(now > 0, now, 1.0)) ** 2, 0.0, 1.0), 1.0)


def estimate(sums: Sums, xp: Any = Plain) -> Any:
    """The estimated rate; 0 if gradients have turned against the path, so that a sum is not above 0, or if there are
    none."""
    return quotient(xp.maximum(sums.numerator, 0.0) * sums.rates, sums.denominator, xp)


def straightness(sums: Sums, xp: Any = Plain) -> Any:
    """kappa: 1 along a straight path, 0 if the sums say nothing."""
    return quotient(estimate(sums, xp), sums.straight, xp)


def balance(sums: Sums, xp: Any = Plain) -> Any:
    """beta: 1 if all gradients point on along the path, -1 if all point back; 0 if there are none.

    >>> balance(Sums(numerator=1.0, denominator=1.0, rates=1.0, absolute=4.0))
    0.25
    """
    return quotient(sums.numerator, sums.absolute, xp)


class Measured(NamedTuple):
    """What the steps since the beginning of the path have shown; equal on all ranks."""

    moved: float = 0.0
    """The length of the displacement over the typical norm of the weights (:func:`typical_norm`); infinite if weights
    are NaN or infinite."""
    distance: float = 0.0
    """The length of the displacement."""
    estimated_rate: float = 0.0
    """0 if there were no gradients, if they have turned against the path, or if one was NaN or infinite."""
    straightness: float = 0.0
    """1: no gradient has turned yet."""
    balance: float = 0.0
    """From 1, all gradients point on along the path, to -1, all point back."""
    gradients: tuple[float, ...] = ()
    """The largest absolute value of each gradient that was sampled in the round."""
    rates: float = 0.0
    """The sum of the rates of all steps of the path."""
    path_steps: int = 0
    """The number of steps of the path."""
    is_broken: bool = False
    """Whether some gradient was NaN or infinite, so that a new path must begin."""
    rounding: float = FP32_ROUNDING
    """How much rounding may change a weight, as a part of it: half a unit in its last place."""

    def with_sums(self, path: PathSums, denominator: float) -> Measured:
        """With what the sums say: nothing but that they are broken, if one is NaN or infinite."""
        if not (math.isfinite(path.numerator) and math.isfinite(denominator)):
            return self._replace(is_broken=True)
        sums = path.over(denominator, self.rates)
        return self._replace(estimated_rate=estimate(sums), straightness=straightness(sums), balance=balance(sums))

    @property
    def gradient(self) -> float:
        """The largest absolute value in the round's gradients; 0 if there were none. NaN is not hidden."""
        return _largest(self.gradients)

    @property
    def has_estimate(self) -> bool:
        """Whether the estimated rate says anything: gradients were sampled, on a path of more than one step. If it is 0
        then, they have turned against the path.

        Without gradients the sum of rates has grown all the same, and with it the estimate.
        """
        return (self.gradient != 0) & (self.path_steps != 1)


def largest_sizes(columns: Iterable[Sequence[float]]) -> tuple[float, ...]:
    """The largest size in each column, without hiding NaN."""
    return tuple([_largest(sizes) for sizes in columns])


def _largest(sizes: Sequence[float]) -> float:
    return max(sizes, key=lambda size: math.inf if math.isnan(size) else size, default=0.0)


def typical_norm(sizes: Sequence[int], norms: Sequence[float], moves: Sequence[float]) -> float:
    """The norm of weights in which no minority decides.

    Only tensors that a step has moved count, and the numbers of one tensor count for no more than those of the middle
    one (half of all numbers are in tensors with smaller ones). So neither a large output bias nor an unused table makes
    steps look short.

    Args:
        sizes: how many numbers each tensor has.
        norms: its norm.
        moves: how far it has moved.

    >>> typical_norm([4, 1, 9], norms=[2.0, 1e4, 30.0], moves=[0.1, 0.1, 0.0])
    2.23606797749979
    """
    moved = [(norm / math.sqrt(n), n) for n, norm, move in zip(sizes, norms, moves, strict=True) if n and move > 0]
    half = sum(n for each, n in moved if each > 0) / 2
    middle, counted = 0.0, 0
    for each, n in sorted(moved):
        if each > 0 and counted < half:
            middle, counted = each, counted + n
    return math.sqrt(math.fsum(n * min(each, middle) ** 2 for each, n in moved))
