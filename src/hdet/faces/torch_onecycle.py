"""The private names of torch's OneCycleLR that hdet relies on, in one place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR

from hdet.checks import Rule, check_state, count, flag, number, one_of, rates, some_rates
from hdet.errors import ArgumentError
from hdet.parameters import Rate, copy_rate, put_rate

__all__ = [
    "NEEDED",
    "check_torch_state",
    "in_constructor",
    "last_end",
    "own_rates",
    "peak_step",
    "schedule_values",
    "total_steps_of",
    "up_to_date",
    "warm_up_end",
    "write_rates",
]


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
    """Raise unless torch can go on from a state, which it takes without looking."""
    what, groups = "the checkpoint's schedule", len(optimizer.param_groups)
    check_state(state, {"total_steps": count(1)}, what)
    check_state(
        state,
        {
            "last_epoch": Rule("a step of the schedule", lambda t: number.fits(t) and -1 <= t <= state["total_steps"]),
            "_step_count": count(0),
            "base_lrs": some_rates,  # torch does not add those of groups that come later
            "_last_lr": rates(groups),
        },
        what,
    )
    phases = {"_schedule_phases": Rule("the phases of a OneCycleLR", _are_phases)}
    if "hdet" in state:
        check_state(state, phases, what)
    annealing = {"_anneal_func_type": one_of("cos", "linear")}
    optional = {
        **phases,  # from torch 1.8 on: before, there were no others than the constructor's
        **(annealing if "_anneal_func_type" in state else {"anneal_func": _OLD_FUNCTION}),
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


def _are_phases(phases: Any) -> bool:
    if not isinstance(phases, (list, tuple)) or not phases:
        return False
    if not all(isinstance(phase, Mapping) for phase in phases):
        return False
    named = all(phase.get(name) in allowed for phase in phases for name, allowed in _LEVELS.items())
    ends = [phase.get("end_step") for phase in phases]  # torch's own are in no order
    return named and all(map(number.fits, ends)) and ends[0] != 0


def _is_truth(value: Any) -> bool:
    """torch takes whatever is true or false: what is kept are flags, 0 and 1, and None."""
    return not isinstance(value, Tensor) and getattr(value, "ndim", 0) == 0 and value in (None, False, True)


def _is_old_function(value: Any) -> bool:
    return getattr(value, "__name__", "") in _OLD_ANNEALING


_OLD_FUNCTION = Rule("_annealing_cos or _annealing_linear of torch's OneCycleLR", _is_old_function)


def up_to_date(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state as torch writes it today: before 2.0 it had a function where the annealing's name stands now."""
    old = getattr(state.get("anneal_func"), "__name__", "")
    return {**({"_anneal_func_type": _OLD_ANNEALING[old]} if old in _OLD_ANNEALING else {}), **state}


def in_constructor(scheduler: OneCycleLR) -> bool:
    """Whether this ``step()`` is the one that torch (or SequentialLR) makes to write the first rates."""
    return scheduler._step_count == 0


def total_steps_of(schedule: Mapping[str, Any]) -> int | None:
    """The number of steps as torch derives it from its arguments; None where torch will raise."""
    steps, epochs, per_epoch = schedule["total_steps"], schedule["epochs"], schedule["steps_per_epoch"]
    if steps is None and isinstance(epochs, int) and isinstance(per_epoch, int):
        steps = epochs * per_epoch
    return steps if isinstance(steps, int) and steps > 0 else None


def warm_up_end(total_steps: int, pct_start: float) -> float:
    """The step at which the first phase ends."""
    return float(pct_start * total_steps) - 1


def peak_step(scheduler: OneCycleLR) -> float:
    """The step at which the first phase ends, of a scheduler that is built."""
    return float(scheduler._schedule_phases[0]["end_step"])


def last_end(scheduler: OneCycleLR) -> float:
    """The step at which the last phase ends; torch has no rate past it if the phase has no length."""
    return float(scheduler._schedule_phases[-1]["end_step"])


def schedule_values(scheduler: OneCycleLR, t: float) -> list[Rate]:
    """The plain schedule at step ``t``, without touching the optimizer (torch's ``get_lr`` writes momenta)."""
    phases: list[Any] = scheduler._schedule_phases
    number, start = 0, 0.0
    while number < len(phases) - 1 and t > phases[number]["end_step"]:
        start = phases[number]["end_step"]
        number += 1
    phase = phases[number]
    length = phase["end_step"] - start
    pct = (t - start) / length if length else 0.0  # as hdet's get_lr: past the end of the phase before
    return [
        scheduler._anneal_func(group[phase["start_lr"]], group[phase["end_lr"]], pct)
        for group in scheduler.optimizer.param_groups
    ]


def write_rates(scheduler: OneCycleLR, rates: list[Rate]) -> None:
    """Put rates into the optimizer, each as the type it was, and remember them as torch's ``step()`` does."""
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        put_rate(group, rate)
    scheduler._last_lr = [copy_rate(group["lr"]) for group in scheduler.optimizer.param_groups]


def own_rates(scheduler: OneCycleLR) -> bool:
    """Whether the optimizer's rates are those that this scheduler wrote last (no other scheduler has changed them)."""
    groups = scheduler.optimizer.param_groups
    last = scheduler.get_last_lr()
    return len(last) == len(groups) and all(bool(group["lr"] == rate) for group, rate in zip(groups, last, strict=True))
