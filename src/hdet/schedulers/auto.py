"""``hdet.auto``: the scheduler that finds the learning rate in the run."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn, optim
from torch.optim import Optimizer

from hdet.checks import is_real, must_be, must_count, shown, users_level
from hdet.errors import ArgumentError, SearchWarning
from hdet.journal import Journals, open_journal
from hdet.journal.file import mapped
from hdet.journal.writer import JournalWriter
from hdet.optimizer import check_model, parts_of, rate_names, refuse_beside, refuse_without_hooks, trained_parameters
from hdet.ranks.agreement import RankGroup
from hdet.ranks.arms import Arms
from hdet.ranks.group import Group, check_group
from hdet.ranks.shards import is_distributed, refuse_flat
from hdet.ranks.torchft import Torchft
from hdet.rule.constants import DEFAULT
from hdet.rule.decision import Rule
from hdet.schedulers.auto_scheduler import AutoSchedule, AutoScheduler
from hdet.schedulers.combined_optimizer import as_one
from hdet.schedulers.given_schedule import GivenSchedule, guesses_of
from hdet.schedulers.schedules import Schedule
from hdet.schedulers.trapezoid import TrapezoidSchedule
from hdet.search.bounds import Bounds
from hdet.search.search import Search

_GUESSES = (1e-14, 1e14)
"""The lowest and the highest guess: the factor on it stays between 1e-15 and 1e15."""
_NOT_SEARCHED: dict[type[Optimizer], str] = {
    optim.LBFGS: "it searches along its own line, by closures",
    optim.Rprop: "its step sizes grow and shrink by themselves: lr is only where they begin",
}
"""Optimizers whose steps do not grow in proportion to the learning rate, and why."""


def auto(
    optimizers: Optimizer | Iterable[Optimizer],
    total_steps: int | None = None,
    schedule: Callable[[Optimizer], Schedule] | Callable[[int], float] | Schedule | None = None,
    *,
    schedule_every: int = 1,
    group: Group = None,
    model: nn.Module | None = None,
    journal: Journals = None,
    rollback: bool = True,
    highest: float | Sequence[float | None] | None = None,
) -> AutoScheduler:
    """The scheduler that finds the learning rate of one optimizer, or one common factor on the rates of several.

    .. code-block:: python

        scheduler = hdet.auto(optimizer, total_steps=10_000)
        for batch in loader:
            loss = train_step(batch)
            optimizer.step()
            scheduler.step(loss)

    The optimizer's own rate is a guess, which may be wrong by many orders of magnitude. Training begins far below it,
    and the rate is raised while the gradients of all steps so far, together, still point along the path taken, because
    longer steps would have helped. If the loss shows that training has diverged, it is rolled back to earlier weights.
    Momenta are left alone. The ``lr`` of a parameter group that is added during the run is a guess like the others, or
    a rate like those of now, whichever it is nearer to; its ratio to them stays.

    With several optimizers, the guesses keep their ratios. Step all optimizers, then the scheduler:

    .. code-block:: python

        scheduler = hdet.auto([muon, adamw], total_steps=10_000)
        ...
        muon.step()
        adamw.step()
        scheduler.step(loss)

    They may be stepped in any order. The gradients of all optimizers are sampled before the first one of a step is
    stepped. With a GradScaler, call ``scaler.unscale_`` on every optimizer before the first ``scaler.step``.

    The schedule is a *trapezoid*, unless you give one: in a run of S steps the rate rises until step 0.3 S - 1, is held
    until 0.6 S - 1, and falls as 1 - sqrt((t - 0.6 S + 1) / 0.4 S) to 1/250,000 of its peak in the last step.
    Without a length it is held until ``scheduler.finish(steps)`` is called, and falls in the same way. Until the hold
    ends a run can have another length: load its checkpoint into a scheduler with another ``total_steps``.

    The rising phase of a schedule of your own is held at its peak, and the search climbs in its place. From the peak on
    the rate is the schedule times the factor that was found:

    .. code-block:: python

        scheduler = hdet.auto(adamw, schedule=lambda o: CosineAnnealingLR(o, 10_000), total_steps=10_000)

    Args:
        optimizers: one, or several with different parameters.
        total_steps: calls of ``step`` in the run, S; None, without ``schedule``: it is unknown.
        schedule: a function from an optimizer to its scheduler; or a function from a step to a factor on the rates; or,
            for one optimizer, a scheduler of torch or transformers on it. None: the trapezoid. The peak is found in
            advance, by stepping the schedule on a stand-in, 131,072 steps at most. Nothing of yours is copied.
        schedule_every: n: the schedule is stepped once in n steps.
        group: the process group of the ranks that train one model; None: the default group, once there is one.
        model: its float buffers (BatchNorm) are averaged over the ranks, and rolled back with the weights.
        journal: a path, an object with ``write(record)``, a SummaryWriter or another tracker, or a list of these; one
            record per round.
        rollback: whether snapshots of weights and optimizer state are kept for rollbacks, one on the device and one on
            the host. On the device the search takes twice the memory of the weights while it measures, and a snapshot
            as much as weights and optimizer state: five times the weights with Adam. False saves the snapshots' part;
            weights that are NaN or infinite then raise a :class:`hdet.DivergedError`.
        highest: a rate that is never exceeded; or a list with one for each parameter group, in which None is no bound.
            All groups share one factor: it rises until the first group is at its bound.
    """
    optimizer = as_one(optimizers)
    must_be("True or False", isinstance(rollback, bool), "leave it out for True", rollback=rollback)
    check_group(group)
    check_model(model)
    refuse_flat(p for row in optimizer.param_groups for p in row["params"])
    guesses = [float(row["lr"]) for row in optimizer.param_groups] if schedule is None else guesses_of(optimizer)
    _check_search(optimizer, guesses, group, model)
    bounds = _bounds_of(highest, len(guesses))
    own: AutoSchedule
    if schedule is None:
        is_one = isinstance(schedule_every, int) and schedule_every == 1
        must_be("1 without schedule=", is_one, "leave it out", schedule_every=schedule_every)
        if total_steps is not None:
            total_steps = must_count(1, "count optimizer steps", total_steps=total_steps)
        own = TrapezoidSchedule(total_steps, guesses)
        for row, guess in zip(optimizer.param_groups, guesses, strict=True):
            row["initial_lr"] = guess  # as torch's schedulers do
    else:
        own = GivenSchedule(optimizer, schedule, total_steps, schedule_every)
    given = {**own.arguments(), "highest": mapped(highest, lambda one: None if one is None else float(one))}
    rule = Rule(own.total_steps)
    if not rule.long_enough:
        warnings.warn(
            f"a run of {rule.total_steps} steps is too short to find its rate, which takes at least "
            f"{DEFAULT.min_steps}: the given rate is used; give the right one, or count optimizer steps rather than "
            "epochs",
            SearchWarning,
            stacklevel=users_level(),
        )
    everybody = None if isinstance(group, Arms) else group  # all ranks of one model decide together
    header = {"max_lr": "auto", **given, "rollback": rollback, "total_steps": rule.total_steps}
    search = Search(
        rule,
        rate_names(optimizer),
        [g for g, guess in enumerate(own.guesses) if guess > 0],
        model,
        RankGroup(everybody, {name: repr(value) for name, value in given.items()}),
        JournalWriter(open_journal(journal), header),
        rollback=rollback,
        bounds=bounds,
    )
    return AutoScheduler(optimizer, own, search)


def _check_search(optimizer: Optimizer, guesses: Sequence[float], group: Any, model: Any) -> None:
    """Raise if the rates of an optimizer cannot be searched."""
    low, high = _GUESSES
    if not any(guesses) or not all(guess == 0 or low <= guess <= high for guess in guesses):
        raise ArgumentError(
            f"a search begins from the optimizer's own lr: each must be a number from {low:g} to {high:g}, or 0 if "
            f"a group is to be left alone, and one must be above 0, but got {shown(list(guesses))}; any guess will "
            "do, for instance 1e-3"
        )
    if isinstance(group, Arms) and not any(map(is_distributed, trained_parameters(optimizer))):
        raise ArgumentError(
            "a search needs shared gradients, but group= is hdet.arms(n), whose weights come apart; leave it out"
        )
    if isinstance(group, Torchft) or type(model).__module__.partition(".")[0] == "torchft":
        raise ArgumentError(
            "a search needs the same losses and gradients on all ranks at every step, but replicas of torchft come and "
            "go, and each knows its own losses; find the rate without torchft, in a process group that stays together, "
            "then give it as a number: hdet.OneCycleLR(optimizer, max_lr=...)"
        )
    for part in parts_of(optimizer):
        for kind, why in _NOT_SEARCHED.items():
            if isinstance(part, kind):
                raise ArgumentError(
                    f"the rate of {kind.__name__} cannot be found: {why}. Use another optimizer, or torch's scheduler"
                )
    refuse_without_hooks(optimizer)
    refuse_beside(optimizer, "hdet.Guard")


def _bounds_of(highest: Any, groups: int) -> Bounds | None:
    """The bounds of the rates, if there are any. Raises for anything that cannot be a bound."""
    if highest is None:
        return None
    several = isinstance(highest, (list, tuple))
    each = [math.inf if one is None else one for one in highest] if several else [highest]
    fits = all(is_real(one) and one > 0 for one in each) and len(each) == (groups if several else 1)
    rule = f"a rate above 0, or a list of {groups}, one for each parameter group, in which None is no bound"
    must_be(rule, fits, "leave it out for none", highest=highest)
    return Bounds(tuple(map(float, each))) if several else Bounds((float(highest),) * groups, added=float(highest))
