"""Controllers: signals of the replicas in, moves of the base values out. Pure functions with explicit state.

A controller sees the replicas that were not excluded:

- ``signals[r]``: the number compared across replicas, lower is better (mean train loss of the round, or a probe);
- ``offsets[r][g]``: replica r's distance from the base value of knob g, in the knob's coordinate;

and returns its new state and ``moves[g]`` in the same coordinate. The coordinate of a learning rate is relative: a
replica at rho times the base has the offset rho - 1, and a move takes the base to base * (1 + move).
:mod:`hdet.ensemble.knob` has the coordinates of other knobs.

The published controller is here: a softmax of the losses weighs the replicas, a velocity smooths what follows.
:mod:`hdet.ensemble.normalised` is the other one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

from hdet.checks import is_finite, must_be


class Update(NamedTuple):
    """What a controller decided in one round."""

    state: Any
    """New state: a NamedTuple of lists of numbers, one entry per knob."""
    moves: list[float]
    """Per knob: how far the base moves, in the knob's coordinate."""
    weights: list[float]
    """Per replica: how much it counted (for people; need not sum to one)."""
    deltas: list[float]
    """Per knob: the slope that was seen; above 0, more is better (:class:`Published`: Delta before smoothing)."""


@runtime_checkable
class Controller(Protocol):
    """Anything that can be given as ``auto_lr=``."""

    def init(self, knobs: int) -> Any:
        """State before the first round, for that many knobs: a NamedTuple of lists of numbers."""

    def update(self, state: Any, signals: Sequence[float], offsets: Sequence[Sequence[float]]) -> Update:
        """One round. Must not change its arguments."""


def comparable(signals: Sequence[float]) -> list[float] | None:
    """Signals in which what is not finite is replaced by the worst plus the range.

    It then says which side is bad without setting the scale. None if fewer than two are finite.

    >>> comparable([1.0, 3.0, math.nan, math.inf])
    [1.0, 3.0, 5.0, 5.0]
    >>> comparable([1.0, 1.0, math.nan])
    [1.0, 1.0, 2.0]
    >>> comparable([1.0, math.nan]) is None
    True
    """
    finite = [s for s in signals if math.isfinite(s)]
    if len(finite) < 2:
        return None
    best, worst = min(finite), max(finite)
    bad = worst + ((worst - best) or max(1.0, abs(worst)))
    return [s if math.isfinite(s) else bad for s in signals]


class PublishedState(NamedTuple):
    """State of :class:`Published`: one velocity per knob."""

    velocity: list[float]


@dataclass(frozen=True)
class Published:
    r"""The published rule, per knob, in relative units.

    .. math::
        s_r = (\bar L - L_r)/\sigma, \quad w = \mathrm{softmax}(s), \quad
        \Delta = \sum_r w_r \rho_r - \bar\rho, \quad v \leftarrow \beta v + (1-\beta)\Delta, \quad move = \lambda v

    Args:
        sigma: temperature :math:`\sigma > 0` of the softmax, in units of the loss.
        meta_momentum: :math:`\beta` in [0, 1).
        meta_lr: :math:`\lambda \ge 0`.

    >>> rule = Published(sigma=0.1, meta_momentum=0.0, meta_lr=0.5)
    >>> better_above = rule.update(rule.init(1), signals=[1.0, 0.9], offsets=[[-0.1], [0.1]])
    >>> better_above.moves[0] > 0
    True
    >>> rule.update(rule.init(1), signals=[1.0, 1.0], offsets=[[-0.1], [0.1]]).moves
    [0.0]
    """

    sigma: float = 0.1
    meta_momentum: float = 0.9
    meta_lr: float = 0.5

    def __post_init__(self) -> None:
        fits = is_finite(self.sigma) and self.sigma > 0
        must_be("a finite number above 0", fits, "the published value is 0.1", sigma=self.sigma)
        fits = is_finite(self.meta_momentum) and 0 <= self.meta_momentum < 1
        cure = "the published value is 0.9, and 0 means no smoothing"
        must_be("at least 0 and below 1", fits, cure, meta_momentum=self.meta_momentum)
        fits = is_finite(self.meta_lr) and self.meta_lr >= 0
        cure = "the published value is 0.5, and auto_lr=False switches the controller off"
        must_be("a finite number, at least 0", fits, cure, meta_lr=self.meta_lr)

    def init(self, knobs: int) -> PublishedState:
        """No velocity yet."""
        return PublishedState(velocity=[0.0] * knobs)

    def update(self, state: PublishedState, signals: Sequence[float], offsets: Sequence[Sequence[float]]) -> Update:
        """One round of the published rule."""
        weights = softmax_weights(signals, self.sigma)
        deltas = [_weighted_minus_mean(weights, column) for column in zip(*offsets, strict=True)]
        beta = self.meta_momentum
        velocity = [beta * v + (1 - beta) * delta for v, delta in zip(state.velocity, deltas, strict=True)]
        return Update(PublishedState(velocity), [self.meta_lr * v for v in velocity], weights, deltas)


def softmax_weights(losses: Sequence[float], sigma: float) -> list[float]:
    r"""softmax of :math:`(\bar L - L_r)/\sigma`, shifted by its largest entry so that no finite loss overflows.

    >>> softmax_weights([2.0, 2.0], sigma=0.1)
    [0.5, 0.5]
    >>> softmax_weights([-1e308, 1e308], sigma=0.1)
    [1.0, 0.0]
    """
    best = min(losses)
    unnormalised = [math.exp((best - loss) / sigma) for loss in losses]
    total = math.fsum(unnormalised)
    return [u / total for u in unnormalised]


def _weighted_minus_mean(weights: Sequence[float], column: Sequence[float]) -> float:
    """Weighted mean minus plain mean; ``fsum`` makes it independent of the replicas' order, to the last bit."""
    mean = math.fsum(column) / len(column)
    return math.fsum(w * (x - mean) for w, x in zip(weights, column, strict=True))
