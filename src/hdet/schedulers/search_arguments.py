"""A search behind a scheduler: its arguments, on hdet's schedules or the user's, and what the scheduler shows."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch import optim
from torch.optim import Optimizer

from hdet.checks import is_equal, is_real, must_be, shown, users_level
from hdet.errors import ArgumentError, SearchWarning
from hdet.journal import open_journal
from hdet.journal.writer import JournalWriter
from hdet.parameters import parts_of, refuse_without_hooks, trained_parameters
from hdet.ranks.arms import Arms
from hdet.ranks.rank_group import RankGroup
from hdet.ranks.shards import is_distributed
from hdet.ranks.torchft import Torchft
from hdet.schedulers.arguments import (
    LENGTHS,
    CommonArguments,
    alike_of,
    check_common,
    rate_names,
    refuse_given,
    rehearsed,
    told_of,
)
from hdet.schedulers.run import WithRun
from hdet.search.bounds import NO_BOUNDS, Bounds
from hdet.search.constants import DEFAULT
from hdet.search.reporting import Found, found_html
from hdet.search.rule import Rule
from hdet.search.search import Search

_GUESSES = (1e-14, 1e14)
"""The lowest and the highest guess: the factor on it stays between 1e-15 and 1e15."""
_ENDLESS = 2**53
"""The length that torch is told if the length of a run is unknown: floats cannot count further."""
_NOT_SEARCHED: dict[type[Optimizer], str] = {
    optim.LBFGS: "it searches along its own line, by closures",
    optim.Rprop: "its step sizes grow and shrink by themselves: lr is only where they begin",
}
"""Optimizers whose steps do not grow in proportion to the learning rate, and why."""
_PARTS = {"pct_start": 0.3, "three_phase": False}
"""Arguments that divide the length of a run, with their defaults."""
_LEFT_OUT: dict[str, Any] = {"spread": None, "sync_every": None, "auto_lr_start": None, "decay": "schedule", "seed": 0}
"""Arguments of an ensemble, with the values that they have if they are left out."""


class WithSearch(WithRun):
    """What ``hdet.OneCycleLR`` and ``hdet.auto(..., schedule=...)`` have in common."""

    search: Search | None = None
    """The search for the rate; None without one."""

    def _own_again(self, *, is_loaded: bool) -> None:
        """Somebody else has written rates: write those of the search. ``is_loaded``: perhaps a checkpoint has."""
        self._write_again()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """For pickle and deepcopy: the copy's search is written by the copy."""
        vars(self).update(state)
        if self.search is not None:
            self.search.written.begin(self)

    @property
    def found(self) -> Found | None:
        """What a search has found so far: rates, its status, rollbacks; None without a search.

        As of the last round that has ended. The same on every rank, and no collective.
        """
        return None if self.search is None else self.search.memory.told

    def _repr_html_(self) -> str | None:
        """What a notebook shows of a search. None: it shows what it shows of any object."""
        rates = [group["lr"] for group in self.optimizer.param_groups]
        return None if self.found is None else found_html(self.found, self.last_epoch, self._run.total_steps, rates)

    def search_state_dict(self) -> dict[str, Any]:
        """The tensors of a search. With them a resumed run is bit-equal; without them the search makes them again.

        The tensors themselves, not copies: save them at once. Up to twice the weights, gradients and optimizer state.
        Contains this rank's losses of a round that has not ended; :func:`hdet.save` writes those of all ranks.
        """
        return {} if self.search is None else self.search.tensors(self.optimizer, self.last_epoch)

    def load_search_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume a search. Call it after :meth:`load_state_dict` and after the optimizer was loaded."""
        fits, cure = isinstance(state_dict, Mapping), "give what search_state_dict() returned"
        must_be("a dict", fits, cure, state_dict=state_dict)
        if not state_dict:
            return
        if self.search is None:
            raise ArgumentError(
                "the state of a search does not fit this scheduler, which searches nothing; leave the search out"
            )
        self.search.load_tensors(state_dict, self.optimizer, self.last_epoch)


def searched(
    optimizer: Optimizer, schedule: dict[str, Any], common: CommonArguments, given: Mapping[str, Any]
) -> Search:
    """The search behind an ``hdet.OneCycleLR``. Raises before anything is changed.

    Args:
        optimizer: the optimizer that trains.
        schedule: torch's own arguments. ``max_lr`` becomes the optimizer's own rates, the guesses, and a run of unknown
            length gets a length that torch can compute with.
        common: the arguments that all schedulers take.
        given: all arguments, as the user has given them.
    """
    whose = "replicas that train at different rates, not for a search"
    refuse_given(given, _LEFT_OUT, whose, "give a number as max_lr")
    auto_lr, cure = given["auto_lr"], "leave it out to search by hdet's own rule; False uses the given rate"
    must_be('True or False with max_lr="auto"', isinstance(auto_lr, bool), cure, auto_lr=auto_lr)
    guesses = [float(group["lr"]) for group in optimizer.param_groups]
    check_common(common, optimizer)
    check_search(optimizer, common, guesses, given["highest"])
    has_end = any(schedule[name] is not None for name in LENGTHS)
    schedule["max_lr"] = guesses
    if not has_end:
        refuse_given(schedule, _PARTS, "runs of known length, which it divides", "give total_steps with it")
        schedule.update(total_steps=_ENDLESS, pct_start=(DEFAULT.min_steps + 1) / _ENDLESS)  # its fall is removed later
    if is_equal(schedule["anneal_strategy"], "trapezoid"):
        refuse_given(schedule, {"three_phase": False}, "a OneCycle, not for a trapezoid", 'give anneal_strategy="cos"')
        schedule["anneal_strategy"] = "linear"  # torch has no trapezoid: it is made later
    cycled, schedule["cycle_momentum"] = schedule["cycle_momentum"], False
    steps = rehearsed(optimizer, schedule).total_steps
    if not (auto_lr and steps >= DEFAULT.min_steps) and {"momentum", "betas"} & set(optimizer.defaults):
        schedule["cycle_momentum"] = cycled  # a search gains nothing by it, and torch refuses it for Adagrad
    length, more = steps if has_end else None, {name: given[name] for name in ("rollback", "highest")}
    kind = {"anneal_strategy": given["anneal_strategy"]}
    known = {name: value for name, value in schedule.items() if has_end or name not in _PARTS}
    told = told_of({**known, **kind, "max_lr": "auto", "guess": guesses, "auto_lr": auto_lr, **more})
    alike = alike_of({**schedule, **kind, "highest": given["highest"]})
    alike["max_lr (the optimizer's lr)"] = alike.pop("max_lr")
    told["total_steps"] = length
    return search_of(optimizer, common, guesses, length, told, alike, searches=auto_lr, **more)


def check_search(optimizer: Optimizer, common: CommonArguments, guesses: Sequence[float], highest: Any) -> None:
    """Raise if the rates of an optimizer cannot be searched."""
    low, high = _GUESSES
    if not any(guesses) or not all(guess == 0 or low <= guess <= high for guess in guesses):
        raise ArgumentError(
            f"a search begins from the optimizer's own lr: each must be a number from {low:g} to {high:g}, or 0 if "
            f"a group is to be left alone, and one must be above 0, but got {shown(list(guesses))}; any guess will "
            "do, for instance 1e-3"
        )
    bounds_of(highest, guesses)
    if isinstance(common.group, Arms) and not any(map(is_distributed, trained_parameters(optimizer))):
        raise ArgumentError(
            "a search needs shared gradients, but group= is hdet.arms(n), whose weights come apart; leave it out"
        )
    if isinstance(common.group, Torchft) or type(common.model).__module__.partition(".")[0] == "torchft":
        raise ArgumentError(
            "a search needs the same losses and gradients on all ranks at every step, but replicas of torchft come and "
            "go, and each knows its own losses; find the rate without torchft, in a process group that stays together, "
            "then give it as a number: max_lr=scheduler.found.max_lr"
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
    guesses: Sequence[float],
    total_steps: int | None,
    told: Mapping[str, Any],
    alike: Mapping[str, str],
    *,
    rollback: bool,
    highest: Any,
    searches: bool = True,
) -> Search:
    """The search for the rates of an optimizer, from guesses that :func:`check_search` has seen.

    A parameter group with the guess 0 is left alone.

    ``told``: arguments for the journal; ``alike``: those that must be equal on all ranks, in words.
    """
    must_be("True or False", isinstance(rollback, bool), "leave it out for True", rollback=rollback)
    rule = Rule(total_steps, searches)
    if searches and not rule.long_enough:
        warnings.warn(
            f"a run of {total_steps} steps is too short to find its rate, which takes at least {DEFAULT.min_steps}: "
            "the given rate is used; give the right one, or count optimizer steps rather than epochs",
            SearchWarning,
            stacklevel=users_level(),
        )
    groups = [g for g, guess in enumerate(guesses) if guess > 0]
    everybody = None if isinstance(common.group, Arms) else common.group  # all ranks of one model decide together
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


def bounds_of(highest: Any, guesses: Sequence[float]) -> Bounds:
    """The bounds of the rates. Raises for anything that cannot be a bound."""
    if highest is None:
        return NO_BOUNDS
    several = isinstance(highest, (list, tuple))
    each = [math.inf if one is None else one for one in highest] if several else [highest]
    fits = all(is_real(one) and one > 0 for one in each) and len(each) == (len(guesses) if several else 1)
    rule = f"a rate above 0, or a list of {len(guesses)}, one for each parameter group, in which None is no bound"
    must_be(rule, fits, "leave it out for none", highest=highest)
    return Bounds(each=tuple(map(float, each))) if several else Bounds(float(highest))
