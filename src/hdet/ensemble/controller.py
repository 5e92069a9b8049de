"""Controllers: signals of the replicas in, moves of the base values out. Pure functions with explicit state.

A controller sees the replicas that were not excluded:

- ``signals[r]``: the number compared across replicas, lower is better (mean train loss of the round, or a probe);
- ``offsets[r][g]``: replica r's distance from the base value of knob g, in the knob's coordinate;

and returns its new state and ``moves[g]`` in the same coordinate. The coordinate of a learning rate is relative: a
replica at rho times the base has the offset rho - 1, and a move takes the base to base * (1 + move).
:mod:`hdet.ensemble.knob` has the coordinates of other knobs.

Here are the paper's controller, as printed and corrected: a softmax of the losses weighs the replicas, and a velocity
smooths what follows. :mod:`hdet.ensemble.normalised` is another one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import starmap
from operator import mul
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
    """Per knob: the slope that was seen; above 0, more is better (in the paper's rule: Delta)."""


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


class Velocity(NamedTuple):
    """State of :class:`Corrected` and :class:`AsPrinted`: one velocity per knob."""

    velocity: list[float]


@dataclass(frozen=True)
class _Softmax:
    """The arithmetic that the paper's rule and its correction share; they differ in the units of the offsets."""

    sigma: float = 0.1
    meta_momentum: float = 0.9
    meta_lr: float = 0.5

    def __post_init__(self) -> None:
        cure = "the published values are sigma=0.1, meta_momentum=0.9 and meta_lr=0.5"
        must_be("a finite number above 0", is_finite(self.sigma) and self.sigma > 0, cure, sigma=self.sigma)
        fits = is_finite(self.meta_momentum) and 0 <= self.meta_momentum < 1
        must_be("at least 0 and below 1", fits, cure, meta_momentum=self.meta_momentum)
        fits = is_finite(self.meta_lr) and self.meta_lr >= 0
        must_be("a finite number, at least 0", fits, cure, meta_lr=self.meta_lr)

    def init(self, knobs: int) -> Velocity:
        """The state before the first round: no velocity."""
        return Velocity([0.0] * knobs)

    def update(self, state: Velocity, signals: Sequence[float], offsets: Sequence[Sequence[float]]) -> Update:
        """Compute the velocity after one round, and moves of lambda times it."""
        weights = softmax_weights(signals, self.sigma)
        deltas = [dot(weights, centred(column)) for column in zip(*offsets, strict=True)]  # weighted minus plain mean
        beta = self.meta_momentum
        velocity = [beta * v + (1 - beta) * delta for v, delta in zip(state.velocity, deltas, strict=True)]
        return Update(Velocity(velocity), [self.meta_lr * v for v in velocity], weights, deltas)


@dataclass(frozen=True)
class Corrected(_Softmax):
    r"""The paper's rule in relative units, per knob: the base is multiplied by :math:`1 + \lambda v`.

    .. math::
        s_r = (\bar L - L_r)/\sigma, \quad w = \mathrm{softmax}(s), \quad
        \Delta = \sum_r w_r \rho_r - \bar\rho, \quad v \leftarrow \beta v + (1-\beta)\Delta, \quad move = \lambda v

    A velocity that is relative to the rate shrinks with it, so the base never falls below 0. :class:`AsPrinted` is the
    paper to the letter.

    Args:
        sigma: temperature :math:`\sigma > 0` of the softmax, in units of the loss.
        meta_momentum: :math:`\beta` in [0, 1).
        meta_lr: :math:`\lambda \ge 0`.

    References:
        [HDET](https://arxiv.org/abs/2604.24708), Cheng, Huang, Zhu, Alonso, 2026.

    >>> rule = Corrected(sigma=0.1, meta_momentum=0.0, meta_lr=0.5)
    >>> better_above = rule.update(rule.init(1), signals=[1.0, 0.9], offsets=[[-0.1], [0.1]])
    >>> better_above.moves[0] > 0
    True
    >>> rule.update(rule.init(1), signals=[1.0, 1.0], offsets=[[-0.1], [0.1]]).moves
    [0.0]
    """


@dataclass(frozen=True)
class AsPrinted(_Softmax):
    r"""The paper's rule to the letter, for ``hdet.OneCycleLR(..., auto_lr=hdet.AsPrinted())``.

    .. math::
        \Delta = \sum_r w_r \eta_r - \bar\eta, \quad v \leftarrow \beta v + (1-\beta)\Delta, \quad
        \bar\eta \leftarrow \bar\eta (1-\gamma) + \lambda v, \quad
        \gamma = 1 - \exp\left(-\frac{\log(f_{div}/f_{final})}{K}\right)

    Its offsets, velocity and moves are in units of the rate. The base follows OneCycleLR until S_warm, and is constant
    within a round from there on. It does not end at OneCycleLR's floor: past velocities leave a residual rate, and can
    take the base below 0, where training goes uphill. :class:`Corrected` cannot do either.

    Args:
        sigma: temperature :math:`\sigma > 0` of the softmax, in units of the loss.
        meta_momentum: :math:`\beta` in [0, 1).
        meta_lr: :math:`\lambda \ge 0`.
        mend_gamma: take the logarithm in gamma by its size, so that the rate falls. False: as printed; with torch's
            factors of 25 and 1e4 gamma is negative, and the rate grows 400 times.

    References:
        [HDET](https://arxiv.org/abs/2604.24708), Cheng, Huang, Zhu, Alonso, 2026.

    >>> [round(AsPrinted(mend_gamma=mended).gamma(ratio=25 / 1e4, rounds=10), 2) for mended in (True, False)]
    [0.45, -0.82]
    """

    mend_gamma: bool = True

    def gamma(self, ratio: float, rounds: float) -> float:
        """The decay per round.

        Args:
            ratio: f_div / f_final, which are OneCycleLR's ``div_factor`` and ``final_div_factor``.
            rounds: K = (S - S_warm) / T, which need not be whole; 0 if no step is left to decay in.
        """
        if rounds <= 0:
            return 0.0
        exponent = math.log(ratio) / rounds
        return -math.expm1(min(-abs(exponent) if self.mend_gamma else -exponent, 700.0))  # e^709 is the largest float


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


def dot(a: Sequence[float], b: Sequence[float]) -> float:
    """The sum of products. It is exact, so that it does not depend on the order of the replicas, to the last bit."""
    return math.fsum(starmap(mul, zip(a, b, strict=True)))


def centred(values: Sequence[float]) -> list[float]:
    """Values minus their mean."""
    mean = math.fsum(values) / len(values)
    return [v - mean for v in values]
