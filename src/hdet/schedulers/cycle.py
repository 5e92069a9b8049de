"""The OneCycle itself: the rates and momenta of torch's OneCycleLR, number for number, from the same phases."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from hdet.checks import shown
from hdet.errors import ArgumentError
from hdet.schedulers.torch_arguments import is_rate, number_of

Phase = Mapping[str, Any]
"""As in torch's states: it has the step at which it ends, and names the levels of a group between which it goes."""


def phase_at(phases: Sequence[Phase], t: float) -> tuple[Phase, float]:
    """The phase that step ``t`` is in, which may be a fraction of a step, and which part of it is over.

    >>> phase_at([{"end_step": 4, "start_lr": "max_lr", "end_lr": "min_lr"}], 3)[1]
    0.75
    """
    start = end = 0.0
    for phase in phases:
        start, end = end, phase["end_step"]
        if t <= end:
            break
    if start == end and len(phases) > 1 and phase is phases[-1]:
        return phases[-2], 1.0  # pct_start leaves no step to the last phase: torch divides by zero
    return phase, (t - start) / (end - start)


def _cosine(start: Any, end: Any, part: float) -> Any:
    return end + (start - end) / 2.0 * (math.cos(math.pi * part) + 1)


def _linear(start: Any, end: Any, part: float) -> Any:
    return (end - start) * part + start


ANNEALINGS: dict[str, Callable[[Any, Any, float], Any]] = {"cos": _cosine, "linear": _linear}
"""From one level to another, of which ``part`` of the way is made: numbers, or tensors of one."""


def take_in(groups: Sequence[dict[str, Any]], new: Collection[int], *, by_lr: bool, momenta: bool) -> None:
    """Give groups that were added to the optimizer the levels of the schedule. Raises before it changes any.

    Args:
        groups: of the optimizer.
        new: the numbers of those that were added.
        by_lr: the rate of a group that brings no ``max_lr`` is its peak, as that of the others was.
        momenta: whether they are cycled.
    """
    added = [(g, groups[g]) for g in new]
    for g, group in added:
        if "max_lr" not in group and not by_lr:
            raise ArgumentError(
                f"param_groups[{g}], which was added to the optimizer, has no max_lr, which must be its rate at the "
                'schedule\'s peak; give it: optimizer.add_param_group({"params": ..., "max_lr": 0.1})'
            )
        peak = number_of(group.get("max_lr", group["lr"]))
        if peak is None or not is_rate(peak):
            raise ArgumentError(
                f"max_lr of param_groups[{g}] must be finite and not below 0, but got "
                f"max_lr={shown(group.get('max_lr', group['lr']))}; for instance 0.1"
            )
    examples = [group for g, group in enumerate(groups) if g not in new]
    example = next((group for group in examples if group["max_lr"] > 0), examples[0])
    for _, group in added:
        peak = group.setdefault("max_lr", float(group["lr"]))
        for name in ("initial_lr", "min_lr"):
            share = float(example[name]) / float(example["max_lr"]) if example["max_lr"] > 0 else 1.0
            group.setdefault(name, peak * share)
        for name in ("base_momentum", "max_momentum") if momenta else ():
            group.setdefault(name, example[name])
