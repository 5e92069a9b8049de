"""The arguments that several faces take beside a schedule: checked, and defaults filled in."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import optim
from torch.optim import Optimizer

from hdet.auto.bounds import NO_BOUNDS, Bounds
from hdet.auto.constants import DEFAULT
from hdet.auto.rule import Rule
from hdet.auto.search import Search
from hdet.checks import is_int, is_real, must_be, shown, users_level
from hdet.distributed.arms import Arms
from hdet.distributed.group import check_group
from hdet.distributed.meeting import Meeting
from hdet.distributed.shards import is_distributed, refuse_flat
from hdet.ensemble.knob import KnobSpec, scale_named
from hdet.errors import ArgumentError, SearchWarning
from hdet.journal import open_journal
from hdet.journal.chronicle import Chronicle
from hdet.parameters import check_model, group_counts, parts_of, refuse_without_hooks, trained_parameters

PUBLISHED_SPREAD = 1 / 9
LONGEST = 2**53
"""Steps that a run may have: integers above are no floats, and the schedule computes with those."""
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


class Ours(NamedTuple):
    """What the faces take beside a schedule, as the user has given it."""

    group: Any
    model: Any
    journal: Any


def check_common(ours: Ours, optimizer: Optimizer) -> None:
    """Raise for arguments that are of the wrong kind."""
    check_group(ours.group)
    check_model(ours.model)
    refuse_flat(p for group in getattr(optimizer, "param_groups", ()) for p in group["params"])  # torch checks its kind


def check_length(total_steps: Any) -> None:
    """Raise for what cannot be the length of a run; None: nobody knows it."""
    fits = total_steps is None or (is_int(total_steps) and 1 <= total_steps <= LONGEST)
    must_be(f"an integer from 1 to {LONGEST}, or None", fits, "leave it out if nobody knows", total_steps=total_steps)


def checked_length(sync_every: Any, default: int) -> int:
    """T of replicas that train."""
    if sync_every is None:
        return default
    fits = is_int(sync_every) and 1 <= sync_every <= LONGEST
    must_be(f"an integer, at least 1 and at most {LONGEST}", fits, f"leave it out for {default}", sync_every=sync_every)
    return int(sync_every)


def rate_names(optimizer: Optimizer) -> list[str]:
    """Of the learning rates of all parameter groups. No name changes when a group is added.

    ``lr[2]`` is that of the third group; ``lr[0.2]``, where several optimizers are seen as one, of the first one's.
    """
    counts = group_counts(optimizer)
    if len(counts) == 1:
        return [f"lr[{g}]" for g in range(counts[0])]
    return [f"lr[{part}.{g}]" for part, count in enumerate(counts) for g in range(count)]


def rate_knobs(names: Sequence[str], spread: float) -> list[KnobSpec]:
    """Learning rates as knobs."""
    scale = scale_named("relative")
    return [KnobSpec(name, scale, float(spread), scheduled=True) for name in names]


def check_search(optimizer: Optimizer, ours: Ours, guesses: Sequence[Any], go_back: Any, highest: Any) -> None:
    """Raise where the rates of an optimizer cannot be searched."""
    check_guesses(guesses)
    must_be("True or False", isinstance(go_back, bool), "leave it out for True", go_back=go_back)
    bounds_of(highest, guesses)
    if isinstance(ours.group, Arms) and not any(map(is_distributed, trained_parameters(optimizer))):
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
    ours: Ours,
    guesses: Sequence[Any],
    total_steps: int | None,
    told: Mapping[str, Any],
    alike: Mapping[str, str],
    *,
    searches: bool = True,
    go_back: Any = True,
    highest: Any = None,
) -> Search:
    """The search for the rates of an optimizer, from a guess for each parameter group. Groups at 0 are left alone.

    ``told``: arguments for the journal; ``alike``: those that must be equal on all ranks, in words.
    """
    check_search(optimizer, ours, guesses, go_back, highest)
    rule, others = Rule(total_steps, searches), _other_rates(optimizer)
    if searches and others:
        _warn(
            f"the optimizer has rates beside lr, {others}: a search finds one factor on lr, and knows nothing of the "
            "others; give all of them in the right ratio"
        )
    if searches and not rule.long_enough:
        _warn(
            f"a run of {total_steps} steps is too short to find its rate, which takes at least {DEFAULT.shortest}: the "
            "guess is kept to; give the rate, or count optimizer steps rather than epochs"
        )
    groups = [g for g, guess in enumerate(guesses) if guess > 0]
    everybody = None if isinstance(ours.group, Arms) else ours.group  # ranks of one model decide together
    return Search(
        rule,
        rate_names(optimizer),
        groups,
        ours.model,
        Meeting(everybody, alike),
        Chronicle(open_journal(ours.journal), told),
        go_back=go_back,
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
