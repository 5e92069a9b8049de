"""The schedule that a user gives to ``hdet.auto``: what may be given, and where its peak is.

A schedule is looked at before the first step, on a stand-in for the optimizer: nothing of the user's is copied, stepped
or written to, and no clock is asked, so that all ranks find the same peak.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from hdet.checks import is_int, is_real, must_be, must_count, shown
from hdet.errors import ArgumentError, HdetError
from hdet.optimizer import Rate, as_type_of, copy_rate, parts_of, put_rate, unwrapped, with_added
from hdet.rule.constants import CLIMB
from hdet.schedulers.schedules import PlainRates, Schedule, check_schedule_of, emptied, number_of_its_own
from hdet.schedulers.trapezoid import check_rates, guess_of, refuse_length

_LONGEST = 2**17
"""A schedule is stepped so far at most: 131,072 steps, some seconds with 50 groups."""
_PATIENCE = 500_000
"""It is stepped on until so many rates were no higher than one before: 50,000 steps of one group, 8,500 of 50."""
_OVERHEAD = 9
"""A step of a scheduler takes as long as this many of its rates."""
_EQUAL = 1e-9
"""A later rate must be higher by this part, or else the first one counts: rates computed step by step are rounded."""
_KINDS = (
    "a function from an optimizer to its scheduler, a function from a step to a factor on the rate, or a scheduler of "
    "torch or transformers on the one optimizer"
)
_CURE = "for instance schedule=lambda optimizer: CosineAnnealingLR(optimizer, T_max=1000)"


class Peak(NamedTuple):
    """Where a schedule's rising phase ends."""

    step: int
    rates: list[float | None]
    """The rate of each parameter group at that step; None for a group that was added since."""


class GivenSchedule:
    """A schedule of the user's, whose rising phase may be held at its peak.

    Raises before anything of the user's is changed.

    Args:
        optimizer: one, or several seen as one.
        schedule: as the user has given it.
        total_steps: of the run.
        every: the schedule is stepped once in so many steps.
    """

    def __init__(self, optimizer: Optimizer, schedule: Any, total_steps: Any, every: Any) -> None:
        self.total_steps: int = must_count(1, "count optimizer steps", total_steps=total_steps)
        self._every = must_count(1, "leave it out for 1", high=self.total_steps, schedule_every=every)
        peak, make = planned(optimizer, schedule, -(-self.total_steps // self._every))
        self._peak = peak._replace(step=peak.step * self._every)
        self.schedule = make()
        self.guesses = guesses_of(optimizer)
        """The rate of each parameter group before the schedule, which may have brought its own."""
        self._plain = PlainRates(optimizer, self.schedule)
        self._t = 0
        """The step that the plain rates are of."""

    @property
    def climb_end(self) -> float:
        return max(float(self._peak.step), CLIMB * self.total_steps)

    def rates(self, t: int, *, held: bool) -> list[Rate]:
        plain = self._plain.now if t <= self._t or t % self._every else self._plain.ahead()
        if not held or t >= self._peak.step:
            return list(plain)
        return [own if peak is None else peak for own, peak in zip(plain, self._peak.rates, strict=True)]

    def step(self, t: int) -> None:
        if t % self._every == 0:
            self._plain.step()
        self._t = t

    def grow(self, added: Mapping[int, Mapping[str, Any]], rates: Sequence[Rate]) -> None:
        plain = self._plain.now
        self._plain.grow({g: as_type_of(row["lr"], guess_of(row["lr"], plain, rates)) for g, row in added.items()})
        self._peak = self._peak._replace(rates=with_added(self._peak.rates, dict.fromkeys(added)))

    def arguments(self) -> dict[str, Any]:
        name = type(self.schedule).__name__
        return {"guess": self.guesses, "schedule": name, "schedule_every": self._every, "peak": repr(tuple(self._peak))}

    def state_dict(self) -> dict[str, Any]:
        peak = {"peak": self._peak.step, "peak_lrs": list(self._peak.rates)}
        return {"total_steps": self.total_steps, **peak, **self._plain.saved()}

    def check(self, state: Mapping[str, Any], t: int, found: str) -> None:
        self._plain.check(state["schedule"])
        check_rates(state["plain_lrs"], len(self._plain.now))
        check_rates([0.0 if rate is None else rate for rate in state["peak_lrs"]], len(self._plain.now))
        if not is_int(state["peak"]):
            raise ValueError(f"the step of its peak is {shown(state['peak'])}")
        saved = state["total_steps"]
        if saved != self.total_steps:  # the schedule's own length is somewhere in its own state
            refuse_length(saved, self.total_steps, "its schedule ends there", found)

    def load(self, state: Mapping[str, Any], t: int) -> bool:
        self._plain.load(state)
        self._peak = Peak(state["peak"], list(state["peak_lrs"]))
        self._t = t
        return False


def guesses_of(optimizer: Optimizer) -> list[float]:
    """The rates that a schedule was built on, or will be built on."""
    return [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]


def planned(optimizer: Optimizer, schedule: Any, steps: int) -> tuple[Peak, Callable[[], Schedule]]:
    """Where a schedule is highest, in steps of its own, and how to make it. Nothing of the user's is changed yet.

    Args:
        optimizer: one, or several seen as one.
        schedule: as the user has given it.
        steps: of the schedule.
    """
    parts, whole = parts_of(optimizer), emptied(optimizer)
    is_made = _is_scheduler(schedule)
    must_be(_KINDS, len(parts) == 1 if is_made else callable(schedule), _CURE, schedule=schedule)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no optimizer steps; what else a schedule tells, it will tell again
        if is_made:
            moved = _moved(_checked(optimizer, schedule), optimizer, whole)
            return _peak_of([whole], moved, steps), lambda: schedule
        stand_ins = [emptied(part) for part in parts]
        first = _answer(schedule, stand_ins[0])
        if not _is_scheduler(first):
            function = StepFunction(whole, schedule, steps)
            return _peak_of([whole], function, steps), lambda: StepFunction(optimizer, schedule, steps)
        made = [first, *(_answer(schedule, stand_in) for stand_in in stand_ins[1:])]
        peak = _peak_of(stand_ins, _together(stand_ins, made), steps)
        return peak, lambda: _together(parts, [schedule(part) for part in parts])


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


def _together(optimizers: Sequence[Optimizer], schedules: Sequence[Any]) -> Schedule:
    """The schedules of all optimizers as one."""
    made = [_checked(optimizer, one) for optimizer, one in zip(optimizers, schedules, strict=True)]
    return made[0] if len(made) == 1 else AllSchedules(made)


def _answer(function: Callable[[Any], Any], stand_in: Optimizer) -> Any:
    """A scheduler on the stand-in, or a number if the function is one of the step. Raises if it is neither."""
    answer = _answer_of(function, stand_in)
    if _number_of(answer) is not None or _is_scheduler(answer):
        return answer
    first = _answer_of(function, 0)
    if _number_of(first) is not None:
        return first
    raise ArgumentError(
        f"schedule must be {_KINDS}, but for an optimizer it {_in_words(answer)}, and for step 0 it {_in_words(first)}"
        f"; {_CURE}"
    ) from (answer if isinstance(answer, Exception) else None)


def _moved(schedule: Any, optimizer: Optimizer, stand_in: Optimizer) -> Any:
    """A scheduler of torch on a stand-in: another object with the same values, none of which is copied.

    torch's schedulers put new values in the place of old ones, and change none, so that the user's stays as it is.
    """
    methods = [getattr(type(schedule), name, None) for name in ("step", "get_lr")]
    is_torchs = all(getattr(method, "__module__", "").partition(".")[0] == "torch" for method in methods)
    if not isinstance(schedule, LRScheduler) or not is_torchs or {"step", "get_lr"} & set(vars(schedule)):
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


class StepFunction:
    """A scheduler that multiplies an optimizer's own rates by a function of the step.

    Args:
        optimizer: one, or several seen as one.
        function: from a step to a factor. It is called once for each step, and never for one after the last.
        steps: of the run.
    """

    def __init__(self, optimizer: Optimizer, function: Callable[[int], Any], steps: int) -> None:
        self.optimizer, self.function, self.steps, self.last_epoch = optimizer, function, steps, 0
        self._write()

    def step(self) -> None:
        """Go to the next step."""
        self.last_epoch += 1
        self._write()

    def _write(self) -> None:
        factor = self._factor(min(self.last_epoch, self.steps - 1))
        for group in self.optimizer.param_groups:
            if "initial_lr" not in group:
                group["initial_lr"] = copy_rate(group["lr"])
            put_rate(group, group["initial_lr"] * factor)

    def _factor(self, t: int) -> float:
        """What the function says. Raises unless rates can be multiplied by it."""
        answer = _answer_of(self.function, t)
        number = _number_of(answer)
        if number is not None and 0 <= number < math.inf:
            return number
        raise ArgumentError(
            f"schedule must give a finite number, not below 0, for each step from 0 to {self.steps - 1}, but at step "
            f"{t} it {_in_words(answer)}; for instance schedule=lambda t: 1 - t / {self.steps}"
        ) from (answer if isinstance(answer, Exception) else None)

    def state_dict(self) -> dict[str, Any]:
        """The step. The function is not saved, and rates are the optimizer's."""
        return {"last_epoch": self.last_epoch}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`."""
        self.last_epoch = int(state_dict["last_epoch"])


class AllSchedules:
    """The schedules of several optimizers as one."""

    def __init__(self, schedules: Sequence[Any]) -> None:
        self.schedules = list(schedules)

    def step(self) -> None:
        for schedule in self.schedules:
            schedule.step()

    def state_dict(self) -> dict[str, Any]:
        return {"schedules": [schedule.state_dict() for schedule in self.schedules]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        for schedule, state in zip(self.schedules, state_dict["schedules"], strict=True):
            schedule.load_state_dict(state)


def _answer_of(function: Callable[[Any], Any], given: Any) -> Any:
    """What a function of the user's returns, or the exception that it raises."""
    try:
        return function(given)
    except Exception as error:
        return error


def _in_words(answer: Any) -> str:
    """An answer, for messages."""
    if isinstance(answer, Exception):
        return f"raised {type(answer).__name__}: {shown(str(answer))}"
    return f"returned {shown(answer)}"


def _number_of(value: Any) -> float | None:
    """A number, also in an array without dimensions; None if it is no number."""
    value = value.item() if getattr(value, "shape", None) == () else value
    return float(value) if is_real(value) else None


# -- where it is highest ----------------------------------------------------------------------------------------------


def _peak_of(stand_ins: Sequence[Optimizer], schedule: Schedule, steps: int) -> Peak:
    """The first step at which the leading group, the first that is searched, is highest; and the rates of all there."""
    groups = [group for stand_in in stand_ins for group in stand_in.param_groups]
    guesses = [guess for stand_in in stand_ins for guess in guesses_of(stand_in)]
    lead = next((g for g, guess in enumerate(guesses) if guess > 0), 0)
    patience = _PATIENCE // (len(groups) + _OVERHEAD)
    t = step = 0
    rates = [_checked_rate(group, 0, steps) for group in groups]
    highest = rates[lead]
    while t + 1 < min(steps, _LONGEST) and t - step < patience:
        t += 1
        try:
            schedule.step()
        except HdetError:
            raise
        except Exception as error:
            raise ArgumentError(
                f"schedule must have rates for the {steps} steps of the run, but its step {t} {_in_words(error)}; "
                "build it for as many steps"
            ) from error
        rate = _checked_rate(groups[lead], t, steps)
        if rate > highest * (1 + _EQUAL):
            step, highest, rates = t, rate, [_checked_rate(group, t, steps) for group in groups]
    rule, cure = "above 0 at some step", "give one that has a peak, or leave it out for a trapezoid"
    must_be(rule, highest > 0, cure, schedule=highest)
    return Peak(step, [*rates])


def _checked_rate(group: Mapping[str, Any], t: int, steps: int) -> float:
    rate = float(group["lr"])
    if 0 <= rate < math.inf:
        return rate
    raise ArgumentError(
        f"schedule must give rates that are finite and not below 0, but got {rate} at step {t}; build it for the "
        f"{steps} steps of the run"
    )
