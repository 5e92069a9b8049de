"""The rule behind ``max_lr="auto"`` with its numbers changed, one at a time, and its controls."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from auto_runs import Measured, Run

from hdet.auto.constants import DEFAULT, Constants
from hdet.auto.rule import Decision
from hdet.rollback import ruin
from hdet.rollback.ruin import LIMITS, Limits

AS_IT_IS = "as it is"


def _with_what_it_scales(name: str, value: float) -> dict[str, float]:
    """A number and those that are tied to it. Runs of 1000 steps stay as they are with another ``shrink``."""
    if name == "shrink":
        scale = 1000 ** (value - DEFAULT.shrink)
        return {name: value, **{own: getattr(DEFAULT, own) * scale for own in ("heed", "turn", "ceiling")}}
    if name == "BLOCKS":
        scale = value / ruin.BLOCKS
        return {name: int(value), **{own: int(getattr(ruin, own) * scale) for own in ("FEWEST", "REMEMBERED")}}
    return {name: value}


CHANGES: dict[str, tuple[float, ...]] = {
    "short": (1, 4),
    "growing": (0.1, 0.3),
    "sampled": (4, 16),
    "shortest": (20, 80),
    "begin": (1e-5, 1e-2),
    "relative_step": (2.5e-3, 1e-2),
    "heed": (1.8, 3.5),
    "turn": (1.0, 1.5, 3.0),
    "ceiling": (10.0, 20.0),
    "fastest": (1.5, 3.0),
    "climb": (5.0, 12.0),
    "least_rise": (0.1, 1.0),
    "falling": (0.8, 0.99),
    "slower": (2.0, 10.0),
    "watched": (16, 256),
    "raised": (5.0, 80.0),
    "lags": (0.5, 1.0),
    "wanders": (1.0, 9.0),
    "lost": (0.15, 0.6),
    "noise": (6.0, 24.0),
    "doubted": (2.0, 4.0, 12.0),
    "BLOCKS": (4, 16),
    "shrink": (0.0, 0.2, 0.5),
}
"""Every number of the rule, and what it is changed to, one at a time."""
PARTS: dict[str, dict[str, float]] = {
    "never straight": {"turn": -math.inf},
    "no reach": {"heed": 1e-9},
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
    """Other numbers in ``hdet.rollback.ruin`` inside."""
    was = {name: getattr(ruin, name) for name in numbers}
    vars(ruin).update(numbers)
    try:
        yield
    finally:
        vars(ruin).update(was)


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
