"""``hdet.OneCycleLR(..., max_lr="auto")``: its arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from hdet.auto.constants import DEFAULT
from hdet.auto.saving import ResumableSearch
from hdet.checks import shown
from hdet.errors import ArgumentError
from hdet.schedulers.arguments import LONGEST, Ours, bounds_of, check_common, check_guesses, search_of
from hdet.schedulers.torch_arguments import LENGTHS, alike_of, number_of, rehearsed, told_of

_PARTS = {"pct_start": 0.3, "three_phase": False}
"""What is said in parts of a length, and what it is where nobody says it."""
_LEFT_OUT: dict[str, Any] = {"spread": None, "sync_every": None, "auto_lr_start": None, "decay": "schedule", "seed": 0}
"""Arguments of an ensemble, and their values where nobody gives them."""


def is_auto(max_lr: object) -> bool:
    """Whether the rate is to be found. Raises for other texts."""
    if isinstance(max_lr, str) and max_lr != "auto":
        raise ArgumentError(
            f'max_lr must be a number, a list of numbers or "auto", but got max_lr={shown(max_lr)}; with "auto" the '
            "optimizer's lr is the guess"
        )
    return isinstance(max_lr, str)


def searched(
    optimizer: Optimizer,
    schedule: dict[str, Any],
    ours: Ours,
    auto_lr: Any,
    for_ensemble: Mapping[str, Any],
    *,
    go_back: Any,
    highest: Any,
) -> ResumableSearch:
    """The search behind an ``hdet.OneCycleLR``. Raises before anything is changed.

    ``schedule`` has torch's other arguments; its ``max_lr`` becomes the optimizer's own rates, the guesses, and a run
    without an end gets a length that torch can compute with.
    """
    _refuse_ensemble(for_ensemble, auto_lr)
    guesses = [float(group["lr"]) for group in optimizer.param_groups]
    check_guesses(guesses)  # torch would speak of a max_lr that nobody gave
    bounds_of(highest, guesses)
    has_end = any(schedule[name] is not None for name in LENGTHS)
    schedule["max_lr"] = guesses
    if not has_end:
        _refuse_parts(schedule)
        schedule.update(total_steps=LONGEST, pct_start=(DEFAULT.shortest + 1) / LONGEST)  # what falls is taken away
    cycled, schedule["cycle_momentum"] = schedule["cycle_momentum"], False
    steps = rehearsed(optimizer, schedule).total_steps
    if not (auto_lr and steps >= DEFAULT.shortest) and {"momentum", "betas"} & set(optimizer.defaults):
        schedule["cycle_momentum"] = cycled  # without gain in a search; and torch refuses it for Adagrad
        rehearsed(optimizer, schedule)
    check_common(ours, optimizer)
    length, more = steps if has_end else None, {"go_back": go_back, "highest": highest}
    known = {name: value for name, value in schedule.items() if has_end or name not in _PARTS}
    told = told_of({**known, "max_lr": "auto", "guess": guesses, "auto_lr": auto_lr, **more}) | {"total_steps": length}
    alike = alike_of({**schedule, "highest": highest})
    alike["max_lr (the optimizer's lr)"] = alike.pop("max_lr")
    return search_of(optimizer, ours, guesses, length, told, alike, searches=auto_lr, **more)


def _refuse_ensemble(given: Mapping[str, Any], auto_lr: Any) -> None:
    """Raise for arguments of replicas that train apart: a search is for one model."""
    for name, value in given.items():
        if type(value) is not type(_LEFT_OUT[name]) or value != _LEFT_OUT[name]:
            raise ArgumentError(
                f'max_lr="auto" searches the rate of one model, in rounds of its own: {name} is for replicas that '
                f"train at different rates, but got {name}={shown(value)}; leave it out, or give a number as max_lr"
            )
    if not isinstance(auto_lr, bool):
        raise ArgumentError(
            f'auto_lr must be True or False with max_lr="auto", but got auto_lr={shown(auto_lr)}; a search goes by a '
            "rule of its own: True, or False to keep to the guess"
        )


def _refuse_parts(schedule: Mapping[str, Any]) -> None:
    """Raise for parts of a length that nobody knows."""
    for name, usual in _PARTS.items():
        if number_of(schedule[name]) != usual:
            raise ArgumentError(
                f"{name} must be left out of a run without an end, which it cannot divide, but got "
                f"{name}={shown(schedule[name])}; give total_steps with it, or leave it out"
            )
