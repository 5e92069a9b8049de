"""``hdet.auto``, and the scheduler that it makes: a schedule times the factor that is found in the run."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

from torch import Tensor, nn, optim
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hdet.checks import is_int, is_real, must_be, must_count, shown, users_level
from hdet.errors import ArgumentError, SearchWarning
from hdet.journal import Journals, open_journal
from hdet.journal.file import mapped
from hdet.journal.writer import JournalWriter
from hdet.optimizer import (
    Rate,
    added_groups,
    as_one,
    check_training,
    group_counts,
    has_claim,
    hook_before_steps,
    parts_of,
    put_rates,
    rate_names,
    refuse_beside,
    refuse_without_hooks,
    trained_parameters,
)
from hdet.ranks.agreement import RankGroup
from hdet.ranks.arms import Arms
from hdet.ranks.group import Group
from hdet.ranks.shards import is_distributed
from hdet.ranks.torchft import Torchft
from hdet.rule.constants import DEFAULT
from hdet.rule.decision import Rule
from hdet.rule.found import Found
from hdet.schedulers.given_schedule import GivenSchedule, guesses_of
from hdet.schedulers.schedules import Schedule
from hdet.schedulers.trapezoid import TrapezoidSchedule
from hdet.search.bounds import Bounds
from hdet.search.reporting import found_html
from hdet.search.search import Course, Search
from hdet.state import STATE_WORDS, reading, refuse_foreign, refuse_other_groups

AutoSchedule: TypeAlias = TrapezoidSchedule | GivenSchedule
"""A schedule without the factor that is found. It knows the rates of its own step and of the next one."""
_NAME = "hdet.auto"
_GUESSES = (1e-14, 1e14)
"""The lowest and the highest guess: the factor on it stays between 1e-15 and 1e15."""
_A_GUESS = f"a number from {_GUESSES[0]:g} to {_GUESSES[1]:g}, or 0 if a group is to be left alone"
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

    The rising phase of a schedule of your own is held at its peak, and the search climbs in its place, for a tenth of
    the run at least. From then on the rate is the schedule times the factor that was found:

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
            record per round, which is some steps between two decisions of the search.
        rollback: whether snapshots of weights and optimizer state are kept for rollbacks, one on the device and one on
            the host. On the device the search takes twice the memory of the weights while it measures, and a snapshot
            as much as weights and optimizer state: five times the weights with Adam. False saves the snapshots' part;
            while the search runs, weights that are NaN or infinite then raise a :class:`hdet.DivergedError`.
        highest: a rate that is never exceeded; or a list with one for each parameter group, in which None is no bound.
            All groups share one factor: it rises until the first group is at its bound.
    """
    optimizer = as_one(optimizers)
    must_be("True or False", isinstance(rollback, bool), "leave it out for True", rollback=rollback)
    check_training(optimizer, group, model)
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
    header = {**given, "rollback": rollback, "total_steps": rule.total_steps}
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
    if not any(guesses) or not all(map(_is_guess, guesses)):
        raise ArgumentError(
            f"a search begins from the optimizer's own lr: each must be {_A_GUESS}, and one must be above 0, but got "
            f"{shown(list(guesses))}; any guess will do, for instance 1e-3"
        )
    if isinstance(group, Arms) and not any(map(is_distributed, trained_parameters(optimizer))):
        raise ArgumentError(
            "a search needs shared gradients, but group= is hdet.arms(n), whose replicas train different weights; "
            "leave it out"
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


def _is_guess(rate: float) -> bool:
    return rate == 0 or _GUESSES[0] <= rate <= _GUESSES[1]


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


class AutoScheduler(LRScheduler):
    """The rate of a whole run, which is found in the run. Made by :func:`hdet.auto`.

    A scheduler of torch by its methods, so that loops and frameworks take it as one. It can follow any scheduler of
    torch (``schedule=``), but cannot be a part of one, because it owns the rate from the first step to the last.
    """

    search: Search
    """The search for the factor."""

    def __init__(self, optimizer: Optimizer, schedule: AutoSchedule, search: Search) -> None:  # not torch's: see above
        self.optimizer = optimizer
        self.search = search
        self._schedule = schedule
        self._t = 0
        self._counts = group_counts(optimizer)
        """How many parameter groups of each optimizer are known."""
        hook_before_steps(optimizer, self, AutoScheduler._before_step)
        search.begin(optimizer)
        self.base_lrs = [*self.guesses]
        self._write()

    # -- the loop -----------------------------------------------------------------------------------------------------

    def step(self, loss: float | Tensor | None = None) -> None:
        """Observe a loss if one is given, end the round if one ends here, and go to the next step of the schedule.

        Call it after every step of the optimizer. A loss is a float or a tensor of one element, and is not read from
        its device before the round ends. A round's end is a collective. Raises if a later ``hdet.auto`` has the
        optimizer now.
        """
        self._check_claim()
        if loss is not None and not isinstance(loss, Tensor) and is_int(loss):
            raise ArgumentError(
                f"a loss must be a float or a tensor, but step() got the integer {loss}; give step(float(loss)), or "
                "step() if an epoch was meant"
            )
        before, after = self._t, self._t + 1
        if after > self.total_steps and isinstance(self._schedule, TrapezoidSchedule):
            raise ArgumentError(
                f"step() was called {after} times, but the run has {self.total_steps} steps; give a larger total_steps"
            )
        self._take_in_new_groups()
        if self.search.step(self.optimizer, before, after, loss):
            self.search.end_round(self.optimizer, after, self._course(before, after))
        self._schedule.step(after)
        self._t = after
        self._write()

    def observe(self, loss: float | Tensor) -> None:
        """Count a loss of this rank towards the round, for frameworks that call ``step()`` without one.

        The value is copied at once and host and device are not synchronised. ``step(loss)`` is observe and step.
        """
        self.search.observe(loss)

    def finish(self, steps: int) -> None:
        """End the run after ``steps`` more steps: the rate falls from here on as at the end of the schedule.

        At any step, whether the run has an end or none. A rate that falls already falls on from there, faster or
        slower. A collective: all ranks call it at the same step. A checkpoint that was saved before the call resumes
        as if there had been no call.

        Args:
            steps: steps that training still makes; ``total_steps`` is known from now on.
        """
        schedule, now = self._schedule, self._t
        if not isinstance(schedule, TrapezoidSchedule):
            raise ArgumentError(
                f"finish() is for runs without schedule=, but this one follows a schedule of {self.total_steps} steps; "
                "leave schedule= out of hdet.auto, or begin a new run with the weights and a schedule of the steps "
                "that are left"
            )
        if now >= self.total_steps - 1:
            raise ArgumentError(
                f"finish() is for a run before its end, but this scheduler is at step {now} of {self.total_steps}; "
                "give hdet.auto more steps, or go on from a checkpoint of an earlier step"
            )
        steps = must_count(1, "give the steps that training is still to make", steps=steps)
        self._check_claim()
        self._take_in_new_groups()
        share = 1.0 if schedule.shape.has_fallen(now) else sum(map(float, self._plain())) / sum(schedule.guesses)
        self.search.finish(self.optimizer, now, steps, share)
        schedule.finish(now, steps)
        self._write()

    # -- values -------------------------------------------------------------------------------------------------------

    @property
    def last_epoch(self) -> int:
        """The step that the schedule is at, as torch calls it."""
        return self._t

    @last_epoch.setter
    def last_epoch(self, t: int) -> None:
        if t < 0:  # SequentialLR takes the first step of its parts back
            raise ArgumentError(
                f"the scheduler of {_NAME} owns the rate of the whole run, and cannot be a part of a SequentialLR; "
                "give the others to it: hdet.auto(optimizer, schedule=lambda o: SequentialLR(o, [...], [...]), "
                "total_steps=...)"
            )
        self._t = t

    @property
    def _step_count(self) -> int:
        """torch's count of calls."""
        return self._t + 1

    @_step_count.setter
    def _step_count(self, count: int) -> None:
        """A wrapper that steps schedulers less often adds to it; steps are counted here."""

    @property
    def total_steps(self) -> float:
        """The length of the run; infinite while it is unknown."""
        known = self._schedule.total_steps
        return math.inf if known is None else known

    @property
    def guesses(self) -> list[float]:
        """The rate of each parameter group that the search began from."""
        return list(self._schedule.guesses)

    @property
    def schedule(self) -> Schedule | None:
        """The schedule of the user's that it follows; None: the trapezoid."""
        return self._schedule.schedule

    @property
    def can_finish(self) -> bool:
        """Whether :meth:`finish` can be called: not on a schedule of the user's."""
        return self.schedule is None

    @property
    def is_finished(self) -> bool:
        """Whether :meth:`finish` was called."""
        return isinstance(self._schedule, TrapezoidSchedule) and self._schedule.shape.is_finished

    @property
    def found(self) -> Found:
        """What has been found so far: rates, the search's status, rollbacks.

        As of the last round that has ended. The same on every rank, and no collective.
        """
        return self.search.memory.told

    def get_last_lr(self) -> list[Rate]:
        """The rates of the parameter groups."""
        return list(self._last_lr)

    def get_lr(self) -> list[Rate]:
        """The same: rates are written as soon as they are known."""
        return list(self._last_lr)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return found_html(self.found, self._t, self._schedule.total_steps, self._last_lr)

    def _plain(self) -> list[Rate]:
        """The schedule at this step, without the factor."""
        return self._schedule.rates(self._t, held=self.search.holds_rise)

    def _course(self, before: int, after: int) -> Course:
        """The schedule at both steps, with its rise held at the peak and as it is."""
        then, now = (
            {held: [float(rate) for rate in self._schedule.rates(t, held=held)] for held in (True, False)}
            for t in (before, after)
        )
        return Course((then[True], now[True]), (then[False], now[False]), self._schedule.climb_end)

    def _write(self) -> None:
        """Write the rates of this step into the optimizer, each as the type that it was."""
        self._last_lr = rates = self.search.rates(self._plain(), self._t)
        put_rates(self.optimizer, rates)
        if self._t < self.total_steps:
            self.search.steps.written.note(self.optimizer.param_groups, rates, self._t)
        else:
            self.search.steps.written.forget()  # the run is over: whoever trains on writes rates of its own

    def _check_claim(self) -> None:
        """Raise if a later scheduler of ``hdet.auto`` has the optimizer."""
        if not has_claim(self.optimizer, self.search.steps):
            raise ArgumentError(
                f"a scheduler of {_NAME} must be the last one that was built on its optimizer, but this "
                f"{type(self.optimizer).__name__} has got another one since; step that one, or build this one again"
            )

    def _before_step(self, *_: Any) -> None:
        """A group that was added makes its first step at the rate that it will have."""
        self._take_in_new_groups()

    def _take_in_new_groups(self) -> None:
        """Groups that were added to the optimizer follow the schedule from now on."""
        if len(self.optimizer.param_groups) == len(self._last_lr) or not has_claim(self.optimizer, self.search.steps):
            return
        new = added_groups(self.optimizer, self._counts)
        groups, names = self.optimizer.param_groups, rate_names(self.optimizer)
        for g in new:
            rate = float(groups[g].get("initial_lr", groups[g]["lr"]))
            must_be(_A_GUESS, _is_guess(rate), "any guess will do", **{f"lr of the added param_groups[{g}]": rate})
        self._counts = group_counts(self.optimizer)
        self._schedule.grow({g: groups[g] for g in new}, self._last_lr)
        self.search.grow(new, names)
        self.search.journal_writer.add([names[g] for g in new], self._t)
        self._write()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """For pickle and deepcopy: the copy of the optimizer has no hooks."""
        vars(self).update(state)
        hook_before_steps(self.optimizer, self, AutoScheduler._before_step)

    # -- the ranks ----------------------------------------------------------------------------------------------------

    @property
    def rank_group(self) -> RankGroup:
        """The ranks that train the model."""
        return self.search.rank_group

    def converge(self) -> None:
        """Average the model's buffers over the ranks now, and nothing else: weights are equal already. Collective."""
        self.search.ranks.converge(self.optimizer, self._t)

    def consensus(self) -> AbstractContextManager[None]:
        """Inside, buffers are averaged; afterwards they are each rank's own, also after an exception. Collective."""
        return self.search.ranks.consensus(self.optimizer, self._t)

    # -- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The same on every rank, and no collective. Save the optimizer and the model as usual."""
        self._take_in_new_groups()
        return {
            "last_epoch": self._t,
            "total_steps": self._schedule.total_steps,
            "_last_lr": [float(rate) for rate in self._last_lr],
            "schedule": self._schedule.state_dict(),
            "hdet": self.search.state(),
        }

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Raise an :class:`hdet.ArgumentError` unless :meth:`load_state_dict` can go on from it. Changes nothing."""
        own = self.state_dict()  # takes in new groups, as the next step would: the checkpoint may have them
        refuse_foreign(state_dict, set(own), _NAME, f"a state of the scheduler of {_NAME}")
        with reading(STATE_WORDS):
            t, schedule, ours = state_dict["last_epoch"], state_dict["schedule"], state_dict["hdet"]
            refuse_other_groups(len(state_dict["_last_lr"]), len(self.optimizer.param_groups))
            found = self.search.check(ours)
            if set(schedule) != set(own["schedule"]):
                is_given = isinstance(self._schedule, GivenSchedule)
                raise ArgumentError(
                    f"schedule= is {'given' if is_given else 'left out'} here, but it was not so in the run that was "
                    "saved; build the scheduler as it was"
                )
            if not is_int(t) or t < 0:
                raise ValueError(f"its step is {t!r}")
            self._schedule.check(schedule, t, found.max_lr)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a checkpoint of any rank, at any number of ranks; its values replace the constructor's.

        One exception: the length of a run without ``schedule=`` is this scheduler's. Another length needs a rate that
        does not fall yet. Writes the rates at once, and again if the optimizer is loaded afterwards.
        """
        self.check_state_dict(state_dict)
        is_other = self._schedule.load(state_dict["schedule"], state_dict["last_epoch"])  # the user's own may raise
        self._t = state_dict["last_epoch"]
        self.search.load(state_dict["hdet"], self._schedule.total_steps, self._t)
        if is_other:
            self.search.replan(self._schedule.total_steps, self._schedule.climb_end)
        self._write()

    def search_state_dict(self) -> dict[str, Any]:
        """The tensors of the search. With them a resumed run is bit-equal; without them the search makes them again.

        The tensors themselves, not copies: save them at once. Up to twice the weights, gradients and optimizer state.
        Contains this rank's losses of a round that has not ended; :func:`hdet.save` writes those of all ranks.
        """
        return self.search.tensors(self.optimizer, self._t)

    def load_search_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume the search. Call it after :meth:`load_state_dict` and after the optimizer was loaded."""
        fits, cure = isinstance(state_dict, Mapping), "give what search_state_dict() returned"
        must_be("a dict", fits, cure, state_dict=state_dict)
        if state_dict:
            self.search.load_tensors(state_dict, self.optimizer, self._t)
