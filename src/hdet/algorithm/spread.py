"""Fan-out: how far each replica's value lies from the base value."""

from __future__ import annotations

__all__ = ["levels", "multipliers"]


def multipliers(n: int, alpha: float) -> list[float]:
    r"""The N multipliers of the fan-out, from the lowest to the highest.

    .. math::
        \rho_r = 1 + \alpha \, \frac{r - (N-1)/2}{\delta}, \qquad \delta = \max\big((N-1)/2,\, 1/2\big)

    Their mean is 1, they lie in :math:`[1-\alpha, 1+\alpha]`, and a single replica has exactly 1.

    Args:
        n: number of replicas :math:`N`, at least 1.
        alpha: spread :math:`\alpha`, in [0, 1]; 0 means no fan-out.

    >>> multipliers(5, 0.5)
    [0.5, 0.75, 1.0, 1.25, 1.5]
    >>> multipliers(1, 0.5)
    [1.0]
    """
    return [1.0 + alpha * x for x in levels(n)]


def levels(n: int) -> list[float]:
    """N evenly spaced places from -1 to 1 with mean 0; a single replica stands at 0.

    >>> levels(5)
    [-1.0, -0.5, 0.0, 0.5, 1.0]
    """
    middle = (n - 1) / 2
    delta = max(middle, 0.5)
    return [(r - middle) / delta for r in range(n)]
