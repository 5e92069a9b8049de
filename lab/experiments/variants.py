"""The rule behind ``max_lr="auto"`` with its numbers changed, one at a time, and its controls."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from auto_runs import Measured, Run

import hdet.rollback.judge as judging
from hdet.rollback.judge import LIMITS, Limits
from hdet.search.constants import DEFAULT, Constants
from hdet.search.rule import Decision

AS_IT_IS = "as it is"


def _with_what_it_scales(name: str, value: float) -> dict[str, float]:
    """A number and those that are tied to it. Runs of 1000 steps stay as they are with another ``shrink``."""
    if name == "length_exponent":
        scale = 1000 ** (value - DEFAULT.length_exponent)
        return {
            name: value,
            **{own: getattr(DEFAULT, own) * scale for own in ("estimate_fraction", "straight_tolerance", "ceiling")},
        }
    if name == "BLOCKS":
        scale = value / judging.BLOCKS
        return {name: int(value), **{own: int(getattr(judging, own) * scale) for own in ("FEWEST", "REMEMBERED")}}
    return {name: value}


CHANGES: dict[str, tuple[float, ...]] = {
    "min_round": (1, 4),
    "round_growth": (0.1, 0.3),
    "max_samples": (4, 16),
    "min_steps": (20, 80),
    "initial_factor": (1e-5, 1e-2),
    "relative_step": (2.5e-3, 1e-2),
    "estimate_fraction": (1.8, 3.5),
    "straight_tolerance": (1.0, 1.5, 3.0),
    "ceiling": (10.0, 20.0),
    "max_growth": (1.5, 3.0),
    "max_climb": (5.0, 12.0),
    "min_rise": (0.1, 1.0),
    "fall_start": (0.8, 0.99),
    "backoff": (2.0, 10.0),
    "lag_window": (16, 256),
    "lag_min_raise": (5.0, 80.0),
    "lag_exponent": (0.5, 1.0),
    "lag_wander": (1.0, 9.0),
    "lost": (0.15, 0.6),
    "noise": (6.0, 24.0),
    "doubted": (2.0, 4.0, 12.0),
    "BLOCKS": (4, 16),
    "length_exponent": (0.0, 0.2, 0.5),
}
"""Every number of the rule, and what it is changed to, one at a time."""
PARTS: dict[str, dict[str, float]] = {
    "never straight": {"straight_tolerance": -math.inf},
    "no estimate": {"estimate_fraction": 1e-9},
    "no ceiling": {"ceiling": math.inf},
    "never ruined": {"lost": math.inf, "noise": math.inf, "doubted": math.inf},
}
"""The rule without a part."""
ALONE, PLACEBO = "step() alone", "placebo"
VARIANTS: dict[str, dict[str, float]] = {
    AS_IT_IS: {},
    **{f"{name}={value:g}": _with_what_it_scales(name, value) for name, values in CHANGES.items() for value in values},
    **PARTS,
    ALONE: {},
    PLACEBO: {},
}


class Judged(Run):
    """A run whose judge of losses has other numbers of its module."""

    def __init__(self, *words: Any, numbers: Mapping[str, float], **options: Any) -> None:
        super().__init__(*words, **options)
        self._numbers = numbers

    def after_round(self, measured: Measured) -> Decision:
        with changed(self._numbers):
            return super().after_round(measured)


@contextmanager
def changed(numbers: Mapping[str, float]) -> Iterator[None]:
    """Other numbers in ``hdet.rollback.judge`` inside."""
    was = {name: getattr(judging, name) for name in numbers}
    vars(judging).update(numbers)
    try:
        yield
    finally:
        vars(judging).update(was)


def run_of(variant: str, steps: int, guess: float, seed: int) -> Run:
    """A run of a variant."""
    values = VARIANTS[variant]
    own = {name: value for name, value in values.items() if name in Constants._fields}
    limits = {name: value for name, value in values.items() if name in Limits._fields}
    return Judged(
        steps,
        guess,
        losses=variant != ALONE,
        placebo=str(seed) if variant == PLACEBO else None,
        constants=DEFAULT._replace(**own),
        limits=LIMITS._replace(**limits),
        numbers={name: value for name, value in values.items() if name not in {*own, *limits}},
    )
