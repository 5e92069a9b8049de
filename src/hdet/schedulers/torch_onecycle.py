"""torch's OneCycleLR from inside: its arguments, its state and its values."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR, _enable_get_lr_call

from hdet.checks import Rule, check_state, count, flag, must_be, number, one_of, rates, shown, some_rates
from hdet.errors import ArgumentError
from hdet.parameters import Rate, copy_rate, put_rate
from hdet.schedulers.arguments import LONGEST

NEEDED = {"total_steps", "last_epoch", "base_lrs", "_last_lr", "_step_count"}
"""Keys of a state of torch's OneCycleLR, in every version."""
_OLD_ANNEALING = {"_annealing_cos": "cos", "_annealing_linear": "linear"}
"""Functions that stand in states of torch before 2.0, and what later ones call them."""
_LEVELS = {
    **dict.fromkeys(("start_lr", "end_lr"), ("initial_lr", "max_lr", "min_lr")),
    **dict.fromkeys(("start_momentum", "end_momentum"), ("base_momentum", "max_momentum")),
}
"""What a phase names, and what it may name."""
_HIGHEST = torch.finfo(torch.float32).max
"""No rate above it can be multiplied with gradients."""
_DERIVED = ("initial_lr", "min_lr")
"""Rates of a group that follow from its ``max_lr``."""


def check_torch_state(state: Mapping[str, Any], optimizer: Optimizer) -> None:
    """Raise unless torch can go on from a state, which it takes without looking."""
    what, groups = "the checkpoint's schedule", len(optimizer.param_groups)
    check_state(state, {"total_steps": Rule("an integer, at least 1, or infinite", _is_length)}, what)
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
    phases = {"_schedule_phases": Rule("the phases of a OneCycleLR", lambda some: _are_phases(some, state))}
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


def rates_now(scheduler: OneCycleLR) -> list[Rate]:
    """The rates of this step, computed again; writes momenta, as torch's ``get_lr`` does."""
    with _enable_get_lr_call(scheduler):
        return scheduler.get_lr()


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


def check_steps(schedule: dict[str, Any], last_epoch: Any) -> None:
    """Raise for steps and phases that torch cannot compute with. What is only true or false becomes a truth value."""
    for name in ("cycle_momentum", "three_phase"):
        schedule[name] = _truth(name, schedule[name])
    by_epochs = schedule["total_steps"] is None
    for name in ("epochs", "steps_per_epoch") if by_epochs else ("total_steps",):
        fits = isinstance(schedule[name], (int, float, type(None)))  # of these torch speaks by name
        must_be("an integer, at least 1", fits, f"give an int, for instance int({name})", **{name: schedule[name]})
    steps = total_steps_of(schedule)
    if steps is not None and steps > LONGEST:
        raise ArgumentError(
            f"total_steps, or epochs times steps_per_epoch, must be at most {LONGEST}, but got {shown(steps)}; count "
            "optimizer steps"
        )
    _check_phases(schedule["pct_start"], schedule["anneal_strategy"], steps)
    epoch, end = number_of(last_epoch), LONGEST if steps is None else steps
    fits = epoch is not None and -LONGEST <= epoch < end
    cure = "leave it out for a new run, and go on with another by load_state_dict()"
    must_be(f"a number below total_steps = {end}", fits, cure, last_epoch=last_epoch)


def _check_phases(pct_start: Any, strategy: Any, steps: int | None) -> None:
    fits = isinstance(pct_start, float) or (isinstance(pct_start, int) and pct_start in (0, 1))
    must_be("a float from 0 to 1", fits, "give float(pct_start), or leave it out for 0.3", pct_start=pct_start)
    if math.isnan(pct_start):
        raise ArgumentError(f"pct_start must not be NaN, but got pct_start={pct_start}; leave it out for 0.3")
    if steps is not None and warm_up_end(steps, pct_start) == 0:
        raise ArgumentError(
            f"pct_start must not end the first phase at step 0, but got pct_start={pct_start} of {steps} steps, which "
            "is one step; give 0.0 for a schedule that begins at its peak, or more"
        )
    must_be('"cos" or "linear"', isinstance(strategy, str), 'leave it out for "cos"', anneal_strategy=strategy)


def check_levels(schedule: Mapping[str, Any], last_epoch: Any) -> None:
    """Raise for rates, factors and momenta that torch cannot compute with, or that give no finite rate."""
    if last_epoch != -1:  # torch takes them from the optimizer, where the run to be resumed has put them
        return
    for name in ("max_lr", "base_momentum", "max_momentum") if schedule["cycle_momentum"] else ("max_lr",):
        _check_numbers(name, schedule[name])
    tops = [number_of(rate) or 0.0 for rate in _items(schedule["max_lr"])]
    must_be("finite and not below 0", all(map(_is_rate, tops)), "for instance 0.1", max_lr=schedule["max_lr"])
    for name, usual in (("div_factor", 25.0), ("final_div_factor", 1e4)):
        factor = number_of(schedule[name]) or math.nan
        must_be(
            "a number other than 0", not math.isnan(factor), f"leave it out for {usual:g}", **{name: schedule[name]}
        )
        tops = [rate / factor for rate in tops]
        if not all(abs(rate) <= _HIGHEST for rate in tops):
            raise ArgumentError(
                f"{name} must leave rates finite, but got {name}={shown(schedule[name])} with "
                f"max_lr={shown(schedule['max_lr'])}; leave it out for {usual:g}"
            )


def take_in(groups: Sequence[dict[str, Any]], new: Collection[int], *, by_lr: bool, momenta: bool) -> None:
    """Give groups that were added to the optimizer what torch reads in each of them. Raises before it changes any.

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
        if peak is None or not _is_rate(peak):
            raise ArgumentError(
                f"max_lr of param_groups[{g}] must be finite and not below 0, but got "
                f"max_lr={shown(group.get('max_lr', group['lr']))}; for instance 0.1"
            )
    examples = [group for g, group in enumerate(groups) if g not in new]
    example = next((group for group in examples if group["max_lr"] > 0), examples[0])
    for _, group in added:
        peak = group.setdefault("max_lr", float(group["lr"]))
        for name in _DERIVED:
            share = float(example[name]) / float(example["max_lr"]) if example["max_lr"] > 0 else 1.0
            group.setdefault(name, peak * share)
        for name in ("base_momentum", "max_momentum") if momenta else ():
            group.setdefault(name, example[name])


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
