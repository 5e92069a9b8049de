"""The arguments of torch's OneCycleLR. What torch would refuse in words that name none of them is refused here.

torch computes with most of them before it looks at them: ``total_steps="100"`` ends in "'<=' not supported". What it
refuses by name is left to it, so that its errors stay what they are, and so is what it does not use.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hdet.checks import shown
from hdet.errors import ArgumentError
from hdet.faces.arguments import LONGEST
from hdet.faces.torch_onecycle import total_steps_of, warm_up_end

__all__ = ["check_levels", "check_steps", "number_of", "take_in"]

_HIGHEST = torch.finfo(torch.float32).max
"""No rate above it can be multiplied with gradients."""
_LEVELS = ("initial_lr", "min_lr")
"""Rates of a group that follow from its ``max_lr``."""


def check_steps(schedule: dict[str, Any], last_epoch: Any) -> None:
    """Raise for steps and phases that torch cannot compute with. What is only true or false becomes a truth value."""
    for name in ("cycle_momentum", "three_phase"):
        schedule[name] = _truth(name, schedule[name])
    by_epochs = schedule["total_steps"] is None
    for name in ("epochs", "steps_per_epoch") if by_epochs else ("total_steps",):
        if not isinstance(schedule[name], (int, float, type(None))):  # of these torch speaks by name
            raise ArgumentError(
                f"{name} must be an integer, at least 1, but got {name}={shown(schedule[name])}; give an int, for "
                f"instance int({name})"
            )
    steps = total_steps_of(schedule)
    if steps is not None and steps > LONGEST:
        raise ArgumentError(
            f"total_steps, or epochs times steps_per_epoch, must be at most {LONGEST}, but got {shown(steps)}; count "
            "optimizer steps"
        )
    _check_phases(schedule["pct_start"], schedule["anneal_strategy"], steps)
    epoch, end = number_of(last_epoch), LONGEST if steps is None else steps
    if epoch is None or not -LONGEST <= epoch < end:
        raise ArgumentError(
            f"last_epoch must be a number below total_steps = {end}, but got last_epoch={shown(last_epoch)}; leave it "
            "out for a new run, and go on with another by load_state_dict()"
        )


def _check_phases(pct_start: Any, strategy: Any, steps: int | None) -> None:
    if not isinstance(pct_start, float) and not (isinstance(pct_start, int) and pct_start in (0, 1)):
        raise ArgumentError(
            f"pct_start must be a float from 0 to 1, but got pct_start={shown(pct_start)}; give float(pct_start), or "
            "leave it out for 0.3"
        )
    if math.isnan(pct_start):
        raise ArgumentError(f"pct_start must not be NaN, but got pct_start={pct_start}; leave it out for 0.3")
    if steps is not None and warm_up_end(steps, pct_start) == 0:
        raise ArgumentError(
            f"pct_start must not end the first phase at step 0, but got pct_start={pct_start} of {steps} steps, which "
            "is one step; give 0.0 for a schedule that begins at its peak, or more"
        )
    if not isinstance(strategy, str):
        raise ArgumentError(
            f'anneal_strategy must be "cos" or "linear", but got anneal_strategy={shown(strategy)}; leave it out for '
            '"cos"'
        )


def check_levels(schedule: Mapping[str, Any], last_epoch: Any) -> None:
    """Raise for rates, factors and momenta that torch cannot compute with, or that give no finite rate."""
    if last_epoch != -1:  # torch takes them from the optimizer, where the run to be resumed has put them
        return
    for name in ("max_lr", "base_momentum", "max_momentum") if schedule["cycle_momentum"] else ("max_lr",):
        _check_numbers(name, schedule[name])
    tops = [number_of(rate) or 0.0 for rate in _items(schedule["max_lr"])]
    if not all(map(_is_rate, tops)):
        raise ArgumentError(
            f"max_lr must be finite and not below 0, but got max_lr={shown(schedule['max_lr'])}; for instance 0.1"
        )
    for name, usual in (("div_factor", 25.0), ("final_div_factor", 1e4)):
        factor = number_of(schedule[name])
        if not factor or math.isnan(factor):
            raise ArgumentError(
                f"{name} must be a number other than 0, but got {name}={shown(schedule[name])}; leave it out for "
                f"{usual:g}"
            )
        tops = [rate / factor for rate in tops]
        if not all(abs(rate) <= _HIGHEST for rate in tops):
            raise ArgumentError(
                f"{name} must leave rates finite, but got {name}={shown(schedule[name])} with "
                f"max_lr={shown(schedule['max_lr'])}; leave it out for {usual:g}"
            )


def take_in(groups: Sequence[dict[str, Any]], *, by_lr: bool, momenta: bool) -> list[bool]:
    """Give groups that were added to the optimizer what torch reads in each of them, and tell which have lacked it.

    Raises before it changes any. Where there are several optimizers, they need not be the last ones.

    Args:
        groups: of the optimizer.
        by_lr: the rate of a group that brings no ``max_lr`` is its peak, as that of the others was.
        momenta: whether they are cycled.
    """
    new = [not all(name in group for name in ("max_lr", *_LEVELS)) for group in groups]
    added = [(g, group) for g, group in enumerate(groups) if new[g]]
    for g, group in added:
        if "max_lr" not in group and not by_lr:
            raise ArgumentError(
                f"param_groups[{g}], which was added to the optimizer, has no max_lr, which must be its rate at the "
                'schedule\'s peak; give it: optimizer.add_param_group({"params": ..., "max_lr": 0.1})'
            )
        peak = number_of(group.get("max_lr", group["lr"]))
        if peak is None or not _is_rate(peak):
            raise ArgumentError(
                f"max_lr of param_groups[{g}] must be finite and not below 0, but got "
                f"max_lr={shown(group.get('max_lr', group['lr']))}; for instance 0.1"
            )
    examples = [group for g, group in enumerate(groups) if not new[g]]
    example = next((group for group in examples if group["max_lr"] > 0), examples[0])
    for _, group in added:
        peak = group.setdefault("max_lr", float(group["lr"]))
        for name in _LEVELS:
            share = float(example[name]) / float(example["max_lr"]) if example["max_lr"] > 0 else 1.0
            group.setdefault(name, peak * share)
        for name in ("base_momentum", "max_momentum") if momenta else ():
            group.setdefault(name, example[name])
    return new


def _is_rate(rate: float) -> bool:
    return 0 <= rate <= _HIGHEST


def _check_numbers(name: str, value: Any) -> None:
    numbers = [number_of(item) for item in _items(value)]
    if None in numbers:
        raise ArgumentError(
            f"{name} must be a number, or a list of one per parameter group, but got {name}={shown(value)}; for "
            f"instance float({name}), or {name}.tolist() of an array"
        )
    if any(map(math.isnan, numbers)):  # type: ignore[arg-type]  # numbers, as was seen
        raise ArgumentError(f"{name} must not be NaN, but got {name}={shown(value)}; give a number")


def _items(value: Any) -> list[Any]:
    """One per parameter group, or one for all."""
    return list(value) if isinstance(value, (list, tuple)) else [value]


def number_of(value: Any) -> float | None:
    """Of anything with which torch can compute as with a number; None: it cannot.

    >>> number_of(3), number_of(True), number_of("3"), number_of(1j), number_of(10**400), number_of([3])
    (3.0, 1.0, None, None, None, None)
    """
    if not isinstance(value, Tensor) and getattr(value, "ndim", 0) != 0:
        return None  # an array of one element would become a rate that is an array
    try:
        return float(value / 1.0)
    except Exception:  # whatever such an object raises
        return None


def _truth(name: str, value: Any) -> bool:
    try:
        return bool(value)
    except Exception:  # an array, whose truth is ambiguous
        raise ArgumentError(
            f"{name} must be True or False, but got {name}={shown(value)}; give bool({name}) of one value"
        ) from None
