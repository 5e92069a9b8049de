"""The scheduler that ``hdet.auto`` makes: a schedule times the factor that the search finds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hdet.checks import is_int, must_be, must_count
from hdet.errors import ArgumentError
from hdet.optimizer import Rate, added_groups, group_counts, hook_before_steps, put_rate, rate_names
from hdet.ranks.agreement import RankGroup
from hdet.rule.found import Found
from hdet.schedulers.given_schedule import GivenSchedule
from hdet.schedulers.schedules import Schedule
from hdet.schedulers.trapezoid import TrapezoidSchedule
from hdet.search.reporting import found_html
from hdet.search.search import Course, Search
from hdet.state import STATE_WORDS, reading, refuse_foreign, refuse_other_groups

AutoSchedule: TypeAlias = TrapezoidSchedule | GivenSchedule
"""A schedule without the factor that is found. It knows the rates of its own step and of the next one."""
_NAME = "hdet.auto"


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
        its device before the round ends. A round's end is a collective.
        """
        if loss is not None and not isinstance(loss, Tensor) and is_int(loss):
            raise ArgumentError(
                f"a loss must be a float or a tensor, but step() got the integer {loss}; give step(float(loss)), or "
                "step() if an epoch was meant"
            )
        before, after = self._t, self._t + 1
        if after > self.total_steps and isinstance(self._schedule, TrapezoidSchedule):
            raise ArgumentError(f"step() was called {after} times, but the run has {self.total_steps} steps; give more")
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
        then, now = (
            {held: [float(rate) for rate in self._schedule.rates(t, held=held)] for held in (True, False)}
            for t in (before, after)
        )
        return Course((then[True], now[True]), (then[False], now[False]), self._schedule.climb_end)

    def _write(self) -> None:
        """Write the rates of this step into the optimizer, each as the type that it was."""
        rates, groups = self.search.rates(self._plain(), self._t), self.optimizer.param_groups
        for group, rate in zip(groups, rates, strict=True):
            put_rate(group, rate)
        self._last_lr = rates
        if self._t < self.total_steps:
            self.search.steps.written.note(groups, rates, self._t)
        else:
            self.search.steps.written.forget()  # the run is over: whoever trains on writes rates of its own

    def _before_step(self, *_: Any) -> None:
        """A group that was added makes its first step at the rate that it will have."""
        self._take_in_new_groups()

    def _take_in_new_groups(self) -> None:
        """Groups that were added to the optimizer follow the schedule from now on."""
        if len(self.optimizer.param_groups) == len(self._last_lr):
            return
        new = added_groups(self.optimizer, self._counts)
        self._counts = group_counts(self.optimizer)
        groups, names = self.optimizer.param_groups, rate_names(self.optimizer)
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
