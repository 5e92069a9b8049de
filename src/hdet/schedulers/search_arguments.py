"""The arguments of a search, on a OneCycle and on a schedule of the user's: checked, and defaults filled in."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch import optim
from torch.optim import Optimizer

from hdet.checks import is_real, must_be, shown, users_level
from hdet.errors import ArgumentError, SearchWarning
from hdet.journal import open_journal
from hdet.journal.writer import JournalWriter
from hdet.parameters import parts_of, refuse_without_hooks, trained_parameters
from hdet.ranks.arms import Arms
from hdet.ranks.rank_group import RankGroup
from hdet.ranks.shards import is_distributed
from hdet.schedulers.arguments import LONGEST, CommonArguments, check_common, rate_names
from hdet.schedulers.torch_arguments import LENGTHS, alike_of, number_of, rehearsed, told_of
from hdet.search.bounds import NO_BOUNDS, Bounds
from hdet.search.constants import DEFAULT
from hdet.search.rule import Rule
from hdet.search.search import Search

_NO_RATES = frozenset(("initial_lr", "lr_decay", "max_lr", "min_lr"))
"""Options that are named like rates, and are what schedules write or a decay."""
_GUESSES = (1e-14, 1e14)
"""Bounds of a guess: the factor on it that is learned stays between 1e-15 and 1e15."""
_LEAST_PART = 1e-15
"""And so do bounds."""
_NOT_SEARCHED: dict[type[Optimizer], str] = {
    optim.LBFGS: "it searches along its own line, by closures",
    optim.Rprop: "its step sizes grow and shrink by themselves: lr is only where they begin",
}
"""Optimizers whose steps a factor on the learning rate does not lengthen, and why."""
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
    common: CommonArguments,
    auto_lr: Any,
    for_ensemble: Mapping[str, Any],
    *,
    rollback: Any,
    highest: Any,
) -> Search:
    """The search behind an ``hdet.OneCycleLR``. Raises before anything is changed.

    ``schedule`` has torch's other arguments; its ``max_lr`` becomes the optimizer's own rates, the guesses, and a run
    without an end gets a length that torch can compute with.
    """
    _refuse_ensemble(for_ensemble, auto_lr)
    guesses = [float(group["lr"]) for group in optimizer.param_groups]
    check_common(common, optimizer)
    check_search(optimizer, common, guesses, rollback, highest)
    has_end = any(schedule[name] is not None for name in LENGTHS)
    schedule["max_lr"] = guesses
    if not has_end:
        _refuse_parts(schedule)
        schedule.update(total_steps=LONGEST, pct_start=(DEFAULT.min_steps + 1) / LONGEST)  # what falls is taken away
    cycled, schedule["cycle_momentum"] = schedule["cycle_momentum"], False
    steps = rehearsed(optimizer, schedule).total_steps
    if not (auto_lr and steps >= DEFAULT.min_steps) and {"momentum", "betas"} & set(optimizer.defaults):
        schedule["cycle_momentum"] = cycled  # without gain in a search; and torch refuses it for Adagrad
        rehearsed(optimizer, schedule)
    length, more = steps if has_end else None, {"rollback": rollback, "highest": highest}
    known = {name: value for name, value in schedule.items() if has_end or name not in _PARTS}
    told = told_of({**known, "max_lr": "auto", "guess": guesses, "auto_lr": auto_lr, **more}) | {"total_steps": length}
    alike = alike_of({**schedule, "highest": highest})
    alike["max_lr (the optimizer's lr)"] = alike.pop("max_lr")
    return search_of(optimizer, common, guesses, length, told, alike, searches=auto_lr, **more)


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


def check_search(
    optimizer: Optimizer, common: CommonArguments, guesses: Sequence[Any], rollback: Any, highest: Any
) -> None:
    """Raise where the rates of an optimizer cannot be searched."""
    check_guesses(guesses)
    must_be("True or False", isinstance(rollback, bool), "leave it out for True", rollback=rollback)
    bounds_of(highest, guesses)
    if isinstance(common.group, Arms) and not any(map(is_distributed, trained_parameters(optimizer))):
        raise ArgumentError(
            "a search needs shared gradients, but group= is hdet.arms(n), whose weights come apart; leave it out"
        )
    for kind, why in _NOT_SEARCHED.items():
        if any(isinstance(part, kind) for part in parts_of(optimizer)):
            raise ArgumentError(
                f"the rate of {kind.__name__} cannot be found: {why}. Use another optimizer, or torch's own scheduler"
            )
    refuse_without_hooks(optimizer)


def search_of(
    optimizer: Optimizer,
    common: CommonArguments,
    guesses: Sequence[Any],
    total_steps: int | None,
    told: Mapping[str, Any],
    alike: Mapping[str, str],
    *,
    searches: bool = True,
    rollback: Any = True,
    highest: Any = None,
) -> Search:
    """The search for the rates of an optimizer, from guesses that :func:`check_search` has seen.

    A parameter group with the guess 0 is left alone.

    ``told``: arguments for the journal; ``alike``: those that must be equal on all ranks, in words.
    """
    rule, others = Rule(total_steps, searches), _other_rates(optimizer)
    if searches and others:
        _warn(
            f"the optimizer has rates beside lr, {others}: a search finds one factor on lr, and knows nothing of the "
            "others; give all of them in the right ratio"
        )
    if searches and not rule.long_enough:
        _warn(
            f"a run of {total_steps} steps is too short to find its rate, which takes at least {DEFAULT.min_steps}: "
            "the given rate is used; give the right one, or count optimizer steps rather than epochs"
        )
    groups = [g for g, guess in enumerate(guesses) if guess > 0]
    everybody = None if isinstance(common.group, Arms) else common.group  # ranks of one model decide together
    return Search(
        rule,
        rate_names(optimizer),
        groups,
        common.model,
        RankGroup(everybody, alike),
        JournalWriter(open_journal(common.journal), told),
        rollback=rollback,
        bounds=bounds_of(highest, guesses),
    )


def check_guesses(guesses: Sequence[Any]) -> None:
    """Raise for rates from which nothing can be found: what is learned is a factor on them, and has bounds."""
    low, high = _GUESSES
    within = [is_real(guess) and (guess == 0 or low <= guess <= high) for guess in guesses]
    if not (all(within) and any(guesses)):
        raise ArgumentError(
            f"a search begins from the optimizer's own lr: each must be a number from {low:g} to {high:g}, or 0 where "
            f"a group is to be left alone, and one must be above 0, but got {shown(list(guesses))}; any guess will "
            "do, for instance 1e-3"
        )


def bounds_of(highest: Any, guesses: Sequence[float]) -> Bounds:
    """The bounds of the rates. Raises for what cannot be one: it is a factor on the guess that is held."""
    if highest is None:
        return NO_BOUNDS
    several = isinstance(highest, (list, tuple))
    if several and len(highest) != len(guesses):
        raise ArgumentError(
            f"highest must be a number, or a list of {len(guesses)}, one for each parameter group, but got "
            f"highest={shown(highest)}; None in the list leaves a group without a bound"
        )
    for one, guess in zip(highest if several else [highest] * len(guesses), guesses, strict=True):
        fits = (one is None and several) or (is_real(one) and one > 0)
        must_be("a rate above 0, or a list with one for each group", fits, "leave it out for none", highest=highest)
        least = _LEAST_PART * guess
        must_be(f"at least {least:g}, 1e-15 of lr", one is None or one >= least, "give a lower lr", highest=highest)
    if not several:
        return Bounds(float(highest))
    return Bounds(each=tuple(math.inf if one is None else float(one) for one in highest))


def _warn(text: str) -> None:
    warnings.warn(text, SearchWarning, stacklevel=users_level())


def _other_rates(optimizer: Optimizer) -> dict[str, float]:
    """Options of an optimizer that are rates too, by their names: ``lr_1d`` of MARS is built into a ratio to ``lr``."""
    return {
        name: value
        for part in parts_of(optimizer)
        for name, value in part.defaults.items()
        if (name.startswith("lr_") or name.endswith("_lr")) and name not in _NO_RATES and is_real(value) and value > 0
    }
