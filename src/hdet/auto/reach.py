r"""The reach: at which rate would one step go as far as all steps so far, together, ask for? Pure arithmetic.

Train from :math:`x_0` by steps :math:`x_{k+1} = x_k - \eta_k u_k` with gradients :math:`g_k`; the update :math:`u_k` is
whatever the optimizer makes of them. With weights :math:`w_k`, which grow as :math:`\eta_k^2` while the rate rises and
stay where it falls, so that the small first steps count little,

.. math:: \hat\eta = \frac{\sum_k w_k \langle g_k, x_0 - x_k \rangle}{\langle s, \bar u \rangle},
    \quad s = \sum_k w_k g_k, \quad \bar u = \frac{x_0 - x_n}{\sum_k \eta_k}.

The numerator is the descent that gradients still ask for along the way already gone; the denominator is what the mean
update of length one gains against the mean gradient. While gradients agree, the estimate stays ahead of the rate and
grows with it; once training goes to and fro they cancel, and it stops.

In a long round only some gradients are sampled: the sums over :math:`k` are over these, the sums of rates over all
steps.

If all gradients were equal, the estimate would be the mean over the steps, by the same weights, of the sum of rates
before each: :math:`\hat\eta_1 = \sum_k w_k \sum_{j<k} \eta_j / \sum_k w_k`. The ratio :math:`\kappa = \hat\eta /
\hat\eta_1` says how straight the way was: 1 as long as nothing has turned yet.

For :math:`u = g` this is the distance estimate of D-Adaptation over the gradient's norm, and for updates by the sign it
is Prodigy's; written with the displacement it needs no knowledge of the optimizer.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Sums", "estimate", "straightness", "weight_ratio"]


class Sums(NamedTuple):
    """The sums over the steps so far, with the weight of the last step that was sampled as their unit."""

    asked: float
    """Sum of w <g, x_0 - x>."""
    gained: float
    """<s, x_0 - x_n>."""
    rates: float
    """Sum of the rates."""
    straight: float = 0.0
    """The estimate that equal gradients would give."""


def estimate(sums: Sums) -> float:
    """The rate; 0 where the sums say nothing.

    Three equal steps of rate 1 along a constant gradient, :math:`x_0 - x_k = 0, 1, 2` and then 3.

    >>> estimate(Sums(asked=0.0 + 1.0 + 2.0, gained=3 * 3.0, rates=3.0))
    1.0
    """
    if not (sums.asked > 0 and sums.gained > 0):
        return 0.0
    return sums.asked * sums.rates / sums.gained


def straightness(sums: Sums) -> float:
    """kappa: 1 along a straight way, 0 where the sums say nothing.

    >>> straightness(Sums(asked=0.0 + 1.0 + 2.0, gained=3 * 3.0, rates=3.0, straight=(0.0 + 1.0 + 2.0) / 3))
    1.0
    """
    return estimate(sums) / sums.straight if sums.straight > 0 else 0.0


def weight_ratio(before: float, now: float) -> float:
    """What earlier sums count for when the rate goes from ``before`` to ``now``: at most as much as until then."""
    return min((before / now) ** 2, 1.0) if now > 0 else 1.0
