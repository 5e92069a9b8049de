"""The schedule that a user gives to a search: what may be given, and where its peak is.

A schedule is looked at before the first step, on a stand-in for the optimizer: nothing of the user's is copied, stepped
or written to. A function of the step, and a LambdaLR, are asked at a few steps; every other scheduler is stepped.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from hdet.checks import must_be
from hdet.errors import ArgumentError, HdetError
from hdet.optimizer.groups import parts_of, unwrapped
from hdet.schedulers.arguments import emptied, number_of_its_own
from hdet.schedulers.peak import EQUAL, Peak, first_highest
from hdet.schedulers.plain_rates import Schedule, check_schedule_of
from hdet.schedulers.step_function import StepFunction, factor_of, in_words, number_of

_LONGEST = 2**17
"""A scheduler is stepped so far at most: 131,072 steps, some seconds with 50 groups."""
_PATIENCE = 500_000
"""It is stepped on until so many rates were no higher than one before: 50,000 steps of one group, 8,500 of 50."""
_OVERHEAD = 9
"""A step of a scheduler takes as long as this many of its rates."""
_KINDS = (
    "a function from an optimizer to its scheduler, a function from a step to a factor on the rate, or a scheduler of "
    "torch or transformers on the one optimizer"
)
_CURE = "for instance schedule=lambda optimizer: CosineAnnealingLR(optimizer, T_max=1000)"
Maker: TypeAlias = Callable[[], list[Schedule]]
"""Makes the schedules of all optimizers, or one schedule that serves them all, on the user's own."""


def guesses_of(optimizer: Optimizer) -> list[float]:
    """The rates that a schedule was built on, or will be built on."""
    return [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]


def planned(optimizer: Optimizer, schedule: Any, steps: int) -> tuple[Peak, Maker]:
    """Where a schedule is highest, in steps of its own, and how to make it. Nothing of the user's is changed yet.

    Args:
        optimizer: one, or several seen as one.
        schedule: as the user has given it.
        steps: of the schedule.
    """
    parts = parts_of(optimizer)
    is_made = _is_scheduler(schedule)
    must_be(_KINDS, len(parts) == 1 if is_made else callable(schedule), _CURE, schedule=schedule)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no optimizer steps; what else a schedule tells, it will tell again
        stand_ins = [emptied(part) for part in parts]
        if is_made:
            view = _view(stand_ins[0], _moved(_checked(parts[0], schedule), parts[0], stand_ins[0]), steps)
            return _peak_of([view], guesses_of(optimizer)), lambda: [schedule]
        first = _answer(schedule, stand_ins[0])
        if not _is_scheduler(first):
            guesses = guesses_of(optimizer)
            functions = _Functions(guesses, [schedule] * len(guesses), range(steps))
            return _peak_of([functions], guesses), lambda: [StepFunction(optimizer, schedule, steps)]
        made = [first, *(_answer(schedule, stand_in) for stand_in in stand_ins[1:])]
        views = [_view(one, _checked(one, own), steps) for one, own in zip(stand_ins, made, strict=True)]
        guesses = [guess for stand_in in stand_ins for guess in guesses_of(stand_in)]
        return _peak_of(views, guesses), lambda: [_checked(part, schedule(part)) for part in parts]


# -- what was given ---------------------------------------------------------------------------------------------------


def _is_scheduler(value: Any) -> bool:
    return callable(getattr(value, "step", None)) and not isinstance(value, (type, Optimizer))


def _checked(optimizer: Optimizer, schedule: Any) -> Any:
    """The schedule. Raises unless it belongs to the optimizer, and depends on the step alone."""
    check_schedule_of(optimizer, schedule)
    if isinstance(schedule, ReduceLROnPlateau):
        raise ArgumentError(
            "ReduceLROnPlateau depends on a metric, not on the step, so that nothing can know where it falls; give "
            "a schedule whose rates are known in advance, for instance CosineAnnealingLR"
        )
    return schedule


def _answer(function: Callable[[Any], Any], stand_in: Optimizer) -> Any:
    """A scheduler on the stand-in, or a number if the function is one of the step. Raises if it is neither."""
    wants_optimizer = _wants_optimizer(function)
    answers: list[Any] = []
    for given in (stand_in, 0) if wants_optimizer else (0, stand_in):
        try:
            answer = function(given)
        except Exception as error:
            answer = error
        if number_of(answer) is not None or (given is stand_in and _is_scheduler(answer)):
            return answer
        answers.append(answer)
    if isinstance(answers[0], HdetError):
        raise answers[0]
    what = "an optimizer" if wants_optimizer else "step 0"
    raise ArgumentError(f"schedule must be {_KINDS}, but for {what} it {in_words(answers[0])}; {_CURE}") from (
        answers[0] if isinstance(answers[0], Exception) else None
    )


def _wants_optimizer(function: Callable[[Any], Any]) -> bool:
    """What to try first, so that most functions are never called with what they do not expect."""
    try:
        first = next(iter(inspect.signature(function).parameters.values()))
    except (StopIteration, TypeError, ValueError):  # none, or unknown since it is written in C
        return False
    return first.name.startswith("o") or "Optimizer" in str(first.annotation)


# -- where it is highest ----------------------------------------------------------------------------------------------


class _View(Protocol):
    """A schedule, seen without a change to anything of the user's."""

    groups: int

    def highest(self, g: int) -> int:
        """The first step at which the rate of a group is highest."""
        ...

    def rates_at(self, t: int) -> list[float]:
        """The rates of all groups, at the step that :meth:`highest` has found or at a later one."""
        ...


def _peak_of(views: Sequence[_View], guesses: Sequence[float]) -> Peak:
    """The peak of the leading group, the first that is searched, and the rates of all groups there."""
    lead, which = next((g for g, guess in enumerate(guesses) if guess > 0), 0), 0
    while lead >= views[which].groups:
        lead, which = lead - views[which].groups, which + 1
    t = views[which].highest(lead)
    rates = [view.rates_at(t) for view in views]
    rule, cure = "above 0 at some step", "give one that has a peak, or leave it out for a trapezoid"
    must_be(rule, rates[which][lead] > 0, cure, schedule=rates[which][lead])
    return Peak(t, [rate for own in rates for rate in own])


class _Functions:
    """Each group's rate is a number times a function of the step."""

    def __init__(self, bases: Sequence[float], functions: Sequence[Callable[[int], Any]], steps: range) -> None:
        self.groups = len(bases)
        self._bases, self._functions, self._steps = bases, functions, steps

    def highest(self, g: int) -> int:
        return first_highest(lambda t: factor_of(self._functions[g], self._steps[t], self._steps), len(self._steps))

    def rates_at(self, t: int) -> list[float]:
        one_each = {id(function): function for function in self._functions}
        factors = {key: factor_of(function, self._steps[t], self._steps) for key, function in one_each.items()}
        return [base * factors[id(function)] for base, function in zip(self._bases, self._functions, strict=True)]


class _Stepped:
    """A scheduler on a stand-in for the optimizer."""

    def __init__(self, stand_in: Optimizer, schedule: Schedule, steps: int) -> None:
        self.groups = len(stand_in.param_groups)
        self._stand_in, self._schedule, self._steps, self._t = stand_in, schedule, steps, 0
        self._found: dict[int, list[float]] = {}

    def highest(self, g: int) -> int:
        group, patience = self._stand_in.param_groups[g], _PATIENCE // (self.groups + _OVERHEAD)
        peak, highest = 0, self._checked(group)
        self._found = {0: self._rates()}
        while self._t + 1 < min(self._steps, _LONGEST) and self._t - peak < patience:
            self._step()
            rate = self._checked(group)
            if rate > highest * (1 + EQUAL):
                peak, highest, self._found = self._t, rate, {self._t: self._rates()}
        return peak

    def rates_at(self, t: int) -> list[float]:
        if t not in self._found:
            while self._t < min(t, _LONGEST):
                self._step()
            self._found = {t: self._rates()}
        return self._found[t]

    def _rates(self) -> list[float]:
        return [float(group["lr"]) for group in self._stand_in.param_groups]

    def _checked(self, group: Mapping[str, Any]) -> float:
        rate = float(group["lr"])
        if 0 <= rate < math.inf:
            return rate
        raise ArgumentError(
            f"schedule must give rates that are finite and not below 0, but got {rate} at step {self._t}; build it for "
            f"the {self._steps} steps of the run"
        )

    def _step(self) -> None:
        self._t += 1
        try:
            self._schedule.step()
        except Exception as error:
            raise ArgumentError(
                f"schedule must have rates for the {self._steps} steps of the run, but its step {self._t} "
                f"{in_words(error)}; build it for as many steps"
            ) from error


def _view(stand_in: Optimizer, schedule: Any, steps: int) -> _View:
    """A scheduler on a stand-in. The functions of a LambdaLR are asked at a few steps instead of at all."""
    if isinstance(schedule, LambdaLR) and _is_torchs(schedule):
        bases, begin = [float(base) for base in schedule.base_lrs], schedule.last_epoch
        if len(bases) == len(stand_in.param_groups):  # else a group was added since, and torch will say so
            return _Functions(bases, schedule.lr_lambdas, range(begin, begin + steps))
    return _Stepped(stand_in, schedule, steps)


def _moved(schedule: Any, optimizer: Optimizer, stand_in: Optimizer) -> Any:
    """A scheduler of torch on a stand-in: another object with the same values, none of which is copied.

    torch's schedulers put new values in the place of old ones, and change none, so that the user's stays as it is.
    """
    if not _is_torchs(schedule):
        name = type(schedule).__name__
        raise ArgumentError(
            f"schedule is a {name} that was made already: to look ahead, hdet would have to copy it and all that it "
            f"refers to; give a function that makes it, for instance schedule=lambda optimizer: {name}(optimizer, ...)"
        )

    groups = len(stand_in.param_groups)

    def moved(value: Any) -> Any:
        if isinstance(value, Optimizer) and unwrapped(value) is optimizer:
            return stand_in
        if isinstance(value, LRScheduler):
            return _moved(value, optimizer, stand_in)
        if type(value) is list and (len(value) == groups or any(isinstance(one, LRScheduler) for one in value[:1])):
            return [*map(moved, value)]
        return number_of_its_own(value)

    made = object.__new__(type(schedule))
    vars(made).update({name: moved(value) for name, value in vars(schedule).items()})
    return made


def _is_torchs(schedule: Any) -> bool:
    """Whether a scheduler steps as one of torch's does, and calls nobody else's code but functions of the step."""
    methods = [getattr(type(schedule), name, None) for name in ("step", "get_lr")]
    is_torchs = all(getattr(method, "__module__", "").partition(".")[0] == "torch" for method in methods)
    return isinstance(schedule, LRScheduler) and is_torchs and not {"step", "get_lr"} & set(vars(schedule))


# -- schedules of our own ---------------------------------------------------------------------------------------------


class AllSchedules:
    """The schedules of several optimizers as one."""

    def __init__(self, schedules: Sequence[Any]) -> None:
        self.schedules = list(schedules)

    def step(self) -> None:
        for schedule in self.schedules:
            schedule.step()

    def state_dict(self) -> dict[str, Any]:
        return {str(i): schedule.state_dict() for i, schedule in enumerate(self.schedules)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        for i, schedule in enumerate(self.schedules):
            schedule.load_state_dict(state_dict[str(i)])
