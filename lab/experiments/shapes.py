"""Schedules as factors on a peak rate, one per step. Pure functions, in numpy; no torch scheduler is stepped."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from hdet.rule.constants import DEFAULT, HIGHEST, Constants
from hdet.rule.enums import Phase
from hdet.rule.state import State

Factors = np.ndarray
"""Factors at steps 0 ... S, float64. The last one is for the round that ends there."""
PEAK = 0.3
"""The part of a run in which the schedules rise."""
HOLD = 0.6
"""The part of a run after which a trapezoid falls."""
_START, _END = 1 / 25, 1 / 25 / 1e4


def onecycle(steps: int) -> Factors:
    """torch's OneCycleLR with its defaults: up from 1/25, down to 1/250000.

    >>> onecycle(10).round(3).tolist()
    [0.04, 0.52, 1.0, 0.95, 0.812, 0.611, 0.389, 0.188, 0.05, 0.0, 0.05]
    """
    t, top = np.arange(steps + 1.0), PEAK * steps - 1
    rise = _between(_START, 1.0, t / top) if top > 0 else np.ones_like(t)
    return np.where(t <= top, rise, _between(1.0, _END, (t - top) / (steps - 1 - top)))


def trapezoid(steps: int) -> Factors:
    """The schedule of ``hdet.auto``: up along a line, held until 60 % of the run, down by 1 - sqrt.

    >>> trapezoid(10).round(3).tolist()
    [0.04, 0.52, 1.0, 1.0, 1.0, 1.0, 0.5, 0.293, 0.134, 0.0, 0.0]
    """
    t, top = np.arange(steps + 1.0), PEAK * steps - 1
    rise = _START + (1 - _START) * t / top if top > 0 else np.ones_like(t)
    return np.where(t <= top, rise, held(steps, HOLD * steps - 1))


def held(steps: int, top: float) -> Factors:
    """1 until ``top``, then down as a trapezoid: a run that is finished after that step.

    >>> held(10, top=7).round(3).tolist()
    [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.293, 0.0, 0.0]
    """
    part = np.clip((np.arange(steps + 1.0) - top) / (steps - 1 - top), 0, 1)
    return _END + (1 - _END) * (1 - np.sqrt(part))


def falling(hold: float, until: float = 1.0) -> Callable[[int], Factors]:
    """Held until a share of the run, down by 1 - sqrt until another; then the rate is nearly 0.

    >>> falling(0.6)(10).round(3).tolist() == [1.0] * 6 + trapezoid(10)[6:].round(3).tolist()
    True
    >>> falling(0.4, 0.8)(10).round(3).tolist()
    [1.0, 1.0, 1.0, 1.0, 0.5, 0.293, 0.134, 0.0, 0.0, 0.0, 0.0]
    """

    def shape(steps: int) -> Factors:
        end = round(until * steps)
        return np.append(held(end, hold * steps - 1), np.full(steps - end, 1e-6))

    return shape


def warmed(steps: int, share: float) -> Factors:
    """Linear to 1 over a share of the run, then a cosine to 0: AlgoPerf's schedule.

    >>> warmed(6, 0.34).round(3).tolist()
    [0.5, 1.0, 0.854, 0.5, 0.146, 0.0, 0.0]
    """
    t, rising = np.arange(1.0, steps + 2), max(1, round(share * steps))
    return np.minimum(t / rising, _between(1.0, 0.0, np.clip((t - rising) / (steps - rising), 0, 1)))


def factors(state: State, steps: Factors, constants: Constants = DEFAULT) -> Factors:
    """:meth:`State.factor` at many steps."""
    rises = (state.phase is Phase.SEARCHING) & (steps < state.peak)
    rise = np.where(rises, np.maximum(constants.min_rise, (steps + 1) / (state.peak + 1)), 1.0)
    return np.minimum(math.exp(state.log_factor) * rise, math.exp(min(state.ceiling, HIGHEST)))


def _between(start: float, end: float, done: Factors) -> Factors:
    return end + (start - end) / 2 * (1 + np.cos(math.pi * done))
