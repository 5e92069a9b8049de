"""The multipliers of the fan-out, as the library makes them."""

from __future__ import annotations

from hdet.ensemble.design import levels
from hdet.ensemble.knob import rate_knobs

__all__ = ["multipliers"]


def multipliers(n: int, alpha: float) -> list[float]:
    """rho of N replicas, from the lowest to the highest."""
    (spec,) = rate_knobs(["lr"], alpha)
    return [spec.factor(x) for x in levels(n)]
