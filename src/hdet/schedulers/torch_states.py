"""States of torch's OneCycleLR, which hdet's schedulers take too: torch itself loads them without a look."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from hdet.checks import Rule, check_state, count, flag, number, one_of, rates, some_rates
from hdet.errors import ArgumentError

NEEDED = {"total_steps", "last_epoch", "base_lrs", "_last_lr", "_step_count"}
"""Keys of a state of torch's OneCycleLR, in every version."""
_OLD_ANNEALING = {"_annealing_cos": "cos", "_annealing_linear": "linear"}
"""Functions that stand in states of torch before 2.0, and what later ones call them."""
_LEVELS = {
    **dict.fromkeys(("start_lr", "end_lr"), ("initial_lr", "max_lr", "min_lr")),
    **dict.fromkeys(("start_momentum", "end_momentum"), ("base_momentum", "max_momentum")),
}
"""What a phase names, and what it may name."""


def check_torch_state(state: Mapping[str, Any], optimizer: Optimizer) -> None:
    """Raise unless a scheduler can go on from a state of torch's, or from torch's part of one of hdet's."""
    what, groups = "the checkpoint's schedule", len(optimizer.param_groups)
    check_state(state, {"total_steps": Rule("an integer, at least 1, or infinite", _is_length)}, what)
    needed = {
        "last_epoch": Rule("a step of the schedule", lambda t: number.fits(t) and -1 <= t <= state["total_steps"]),
        "_step_count": count(0),
        "base_lrs": some_rates,  # torch does not add those of groups that come later
        "_last_lr": rates(groups),
    }
    check_state(state, needed, what)
    phases = {"_schedule_phases": Rule("the phases of a OneCycleLR", lambda some: _are_phases(some, state))}
    if "hdet" in state:
        check_state(state, phases, what)
    is_old = "_anneal_func_type" not in state
    optional = {
        **phases,  # from torch 1.8 on: before, there were no others than the constructor's
        **({"anneal_func": _OLD_FUNCTION} if is_old else {"_anneal_func_type": one_of("cos", "linear")}),
        "cycle_momentum": Rule("True or False", _is_truth),
        **dict.fromkeys(("use_beta1", "_get_lr_called_within_step", "_is_initial"), flag),
    }
    check_state(state, {name: rule for name, rule in optional.items() if name in state}, what)
    cycled = "betas" if state.get("use_beta1") else "momentum"
    if state.get("cycle_momentum") and not all(cycled in group for group in optimizer.param_groups):
        raise ArgumentError(
            f"{what} cycles {cycled!r}, which {type(optimizer).__name__} does not have; build the optimizer as it was "
            "when it was saved, or load the right checkpoint"
        )


def up_to_date(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state as torch writes it today: before 2.0 it had a function where the annealing's name stands now."""
    old = getattr(state.get("anneal_func"), "__name__", "")
    return {**({"_anneal_func_type": _OLD_ANNEALING[old]} if old in _OLD_ANNEALING else {}), **state}


def _is_length(steps: Any) -> bool:
    return count(1).fits(steps) or (isinstance(steps, float) and steps == math.inf)


def _are_phases(phases: Any, state: Mapping[str, Any]) -> bool:
    if not isinstance(phases, (list, tuple)) or not phases:
        return False
    if not all(isinstance(phase, Mapping) for phase in phases):
        return False
    named = all(phase.get(name) in allowed for phase in phases for name, allowed in _LEVELS.items())
    ends = [phase.get("end_step") for phase in phases]  # torch's own are in no order
    if ends[-1] == state["total_steps"] == math.inf:
        ends.pop()
    return named and all(map(number.fits, ends)) and bool(ends) and (ends[0] != 0 or state["last_epoch"] > 0)


def _is_truth(value: Any) -> bool:
    """torch takes whatever is true or false: what is kept are flags, 0 and 1, and None."""
    return not isinstance(value, Tensor) and getattr(value, "ndim", 0) == 0 and value in (None, False, True)


_OLD_FUNCTION = Rule(
    "_annealing_cos or _annealing_linear of torch's OneCycleLR",
    lambda value: getattr(value, "__name__", "") in _OLD_ANNEALING,
)
