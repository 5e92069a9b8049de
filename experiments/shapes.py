"""Schedules as factors on a peak rate, one per step. Pure functions, in numpy; no torch scheduler is stepped."""

from __future__ import annotations

import math

import numpy as np

from hdet.algorithm.auto.pilot import PilotState

__all__ = ["Factors", "held", "onecycle", "risen"]

Factors = np.ndarray
"""Factors at steps 0 ... S, float64. The last one is for the round that ends there."""


def onecycle(steps: int, pct_start: float = 0.3, linear: bool = False) -> Factors:
    """torch's OneCycleLR with its defaults: up from 1/25, down to 1/250000.

    >>> onecycle(10).round(3).tolist()
    [0.04, 0.52, 1.0, 0.95, 0.812, 0.611, 0.389, 0.188, 0.05, 0.0, 0.05]
    """
    t, top = np.arange(steps + 1.0), pct_start * steps - 1
    rise = _between(1 / 25, 1.0, t / top, linear) if top > 0 else np.ones_like(t)
    return np.where(t <= top, rise, _fall(t, top, steps, linear))


def held(steps: int, pct_start: float = 0.3, linear: bool = False) -> Factors:
    """The same with its rise held at 1, which is what ``hdet.OneCycleLR(max_lr="auto")`` multiplies.

    >>> held(10).round(3).tolist()
    [1.0, 1.0, 1.0, 0.95, 0.812, 0.611, 0.389, 0.188, 0.05, 0.0, 0.05]
    """
    t, top = np.arange(steps + 1.0), pct_start * steps - 1
    return _fall(np.maximum(t, top), top, steps, linear)


def risen(state: PilotState, steps: Factors) -> Factors:
    """:meth:`PilotState.rise` for many steps."""
    return np.array([state.rise(t) if t < state.peak else 1.0 for t in steps])


def _fall(t: Factors, top: float, steps: int, linear: bool) -> Factors:
    return _between(1.0, 1 / 25 / 1e4, (t - top) / (steps - 1 - top), linear)


def _between(start: float, end: float, done: Factors, linear: bool) -> Factors:
    if linear:
        return (end - start) * done + start
    return end + (start - end) / 2 * (1 + np.cos(math.pi * done))
