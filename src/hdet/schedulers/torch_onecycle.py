"""What must be known of torch's OneCycleLR: its arguments, its phases and the rates in them, and its states.

A phase is a dict, as in torch: the step at which it ends, and the levels between which it goes, by their names in a
parameter group ("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum").
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR

from hdet.checks import is_int, is_real, must_be
from hdet.errors import ArgumentError
from hdet.schedulers.schedules import emptied

LENGTHS = ("total_steps", "epochs", "steps_per_epoch")
NEEDED = {"total_steps", "last_epoch", "base_lrs", "_last_lr", "_step_count"}
"""Keys of a state, in every version of torch."""
_HIGHEST = torch.finfo(torch.float32).max
"""The highest rate that gradients can be multiplied by."""
Phase = Mapping[str, Any]
"""As in torch's states; see above."""


def rehearsed(optimizer: Optimizer, arguments: dict[str, Any]) -> OneCycleLR:
    """torch's scheduler on an optimizer without weights: what torch refuses, it refuses before anything is changed."""
    made = OneCycleLR(emptied(optimizer), **arguments)
    for group in made.optimizer.param_groups:
        _check_peak(group["max_lr"], max_lr=arguments["max_lr"])
    return made


def _check_peak(rate: Any, /, **given: Any) -> None:
    """Raise unless weights can be trained at a rate, the highest of the schedule; ``given``: the argument for it."""
    is_number = is_real(rate) or (isinstance(rate, Tensor) and not rate.is_complex())
    must_be("finite and not below 0", is_number and 0 <= rate <= _HIGHEST, "for instance 0.1", **given)


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
"""The value between two levels, numbers or tensors of one element, when ``part`` of a phase is over."""


def annealing_in(state: Mapping[str, Any]) -> dict[str, str]:
    """The kind of annealing in a state of torch before 2.0, which has a function in place of its name."""
    kind = getattr(state.get("anneal_func"), "__name__", "").rpartition("_")[2]
    return {"_anneal_func_type": kind} if kind in ANNEALINGS else {}


def check_state(state: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise unless a state gives rates to these groups: torch would load it, and fail at a later step.

    Raises:
        KeyError, TypeError, ValueError: it does not.
    """
    phases = state["_schedule_phases"]
    steps = [state[name] for name in ("last_epoch", "_step_count", "total_steps")]
    numbers = [*state["_last_lr"], *state["base_lrs"], *(phase["end_step"] for phase in phases)]
    if not phases or not all(map(is_int, steps)) or not all(math.isfinite(float(number)) for number in numbers):
        raise ValueError("its steps, rates or phases are no numbers")
    levels = {phase[end] for phase in phases for end in ("start_lr", "end_lr")}
    _ = ANNEALINGS[state["_anneal_func_type"]], [group[level] for group in groups for level in levels]


def take_in(groups: Sequence[dict[str, Any]], new: Collection[int], *, momenta: bool) -> None:
    """Give groups that were added to the optimizer the levels of the schedule. Raises before it changes any.

    Args:
        groups: of the optimizer.
        new: the numbers of those that were added.
        momenta: whether they are cycled.
    """
    added = [(g, groups[g]) for g in new]
    for g, group in added:
        if "max_lr" not in group:
            raise ArgumentError(
                f"param_groups[{g}], which was added to the optimizer, has no max_lr, which must be its rate at the "
                'schedule\'s peak; give it: optimizer.add_param_group({"params": ..., "max_lr": 0.1})'
            )
        _check_peak(group["max_lr"], **{f"max_lr of param_groups[{g}]": group["max_lr"]})
    known = [group for g, group in enumerate(groups) if g not in new]
    example = next((group for group in known if group["max_lr"] > 0), known[0])
    for _, group in added:
        for name in ("initial_lr", "min_lr"):
            group.setdefault(name, group["max_lr"] * (float(example[name]) / (float(example["max_lr"]) or 1.0)))
        for name in ("base_momentum", "max_momentum") if momenta else ():
            group.setdefault(name, example[name])
