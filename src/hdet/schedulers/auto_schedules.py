"""The two kinds of schedule behind ``hdet.auto``: the trapezoid, and a schedule of the user's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch.optim import Optimizer

from hdet.checks import is_int, must_count, shown
from hdet.optimizer.groups import with_added
from hdet.optimizer.rates import Rate
from hdet.rule.constants import CLIMB
from hdet.schedulers import loading
from hdet.schedulers.given_schedule import AllSchedules, guesses_of, planned
from hdet.schedulers.peak import Peak
from hdet.schedulers.plain_rates import PlainRates, Schedule
from hdet.schedulers.trapezoid import Trapezoid, refuse_length


def _check_rates(rates: Sequence[Any], groups: int) -> None:
    """Raise unless these are finite rates, one for each parameter group."""
    if [math.isfinite(rate) for rate in rates] != [True] * groups:
        raise ValueError(f"its rates of {groups} parameter groups are {shown(rates)}")


class AutoSchedule(Protocol):
    """A schedule without the factor that is found. It knows the rates of its own step and of the next one."""

    guesses: list[float]
    """The rate of each parameter group that the search begins from."""

    @property
    def total_steps(self) -> int | None:
        """The length of the run; None: unknown."""
        ...

    @property
    def schedule(self) -> Schedule | None:
        """The user's own; None: there is none."""
        ...

    @property
    def climb_end(self) -> float:
        """The step at which the search's own climb ends."""
        ...

    def rates(self, t: int, *, held: bool) -> list[Rate]:
        """The rate of each parameter group at step ``t``; ``held``: its peak in place of its rising phase."""
        ...

    def step(self, t: int) -> None:
        """Go to step ``t``, the next one."""
        ...

    def grow(self, added: Mapping[int, Mapping[str, Any]]) -> None:
        """Groups were added to the optimizer; by their numbers among all groups."""
        ...

    def arguments(self) -> dict[str, Any]:
        """What the journal's first line says of it, and what all ranks must have alike."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def check(self, state: Mapping[str, Any], t: int, found: str) -> None:
        """Raise unless :meth:`load` can go on from it at step ``t``; ``found``: the peak rates found, in words."""
        ...

    def load(self, state: Mapping[str, Any], t: int) -> bool:
        """Go on from it, and say whether the run has another length than it had."""
        ...


class TrapezoidSchedule:
    """The schedule of a run that was given none.

    Args:
        total_steps: of the run; None: unknown.
        guesses: the rate of each parameter group at the peak.
    """

    def __init__(self, total_steps: int | None, guesses: Sequence[float]) -> None:
        self.guesses = list(guesses)
        self._planned = self.shape = Trapezoid.of(total_steps)
        """What the constructor's length gives; :meth:`finish` changes the shape."""

    schedule = None

    @property
    def total_steps(self) -> int | None:
        return self.shape.total_steps

    @property
    def climb_end(self) -> float:
        return self.shape.rise

    def rates(self, t: float, *, held: bool) -> list[Rate]:
        t = max(t, self.shape.rise) if held else t
        return [self.shape.at(t, peak) for peak in self.guesses]

    def step(self, t: int) -> None:
        """There is nothing to do: the shape is a function of the step."""

    def finish(self, now: int, steps: int) -> None:
        """Fall over ``steps`` steps from ``now`` on."""
        self.shape = self.shape.finished(now, steps)

    def grow(self, added: Mapping[int, Mapping[str, Any]]) -> None:
        # a group that is a copy of another one brings the guess of that: its rate has the factor in it
        guesses = {g: float(group.get("initial_lr", group["lr"])) for g, group in added.items()}
        self.guesses = with_added(self.guesses, guesses)

    def arguments(self) -> dict[str, Any]:
        return {"guess": self.guesses, "schedule": "trapezoid"}

    def state_dict(self) -> dict[str, Any]:
        return {"planned": self._planned.total_steps, "guesses": self.guesses, **self.shape._asdict()}

    def check(self, state: Mapping[str, Any], t: int, found: str) -> None:
        _check_rates(state["guesses"], len(self.guesses))
        self._resumed(state, t, found)

    def load(self, state: Mapping[str, Any], t: int) -> bool:
        self.guesses = [float(peak) for peak in state["guesses"]]
        self.shape = self._resumed(state, t, "")
        return self.shape != Trapezoid.loaded(state)

    def _resumed(self, state: Mapping[str, Any], t: int, found: str) -> Trapezoid:
        """That of the run that was saved, unless this scheduler was built with another length.

        A run that was finished has two lengths, which both will do: the planned one, and that since :meth:`finish`.
        """
        saved = Trapezoid.loaded(state)
        is_same = self._planned.total_steps in (state["planned"], saved.total_steps)
        return saved if is_same else self._planned.going_on(saved, t, found)


class UsersSchedule:
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
        self._peak, made = peak._replace(step=peak.step * self._every), make()
        self.guesses = guesses_of(optimizer)  # the schedule may have brought its own
        self._plain = PlainRates(optimizer, made[0] if len(made) == 1 else AllSchedules(made))
        self._t = 0
        """The step that the plain rates are of."""

    @property
    def schedule(self) -> Schedule | None:
        return self._plain.schedule

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

    def grow(self, added: Mapping[int, Mapping[str, Any]]) -> None:
        self._plain.grow(added)
        self._peak = self._peak._replace(rates=with_added(self._peak.rates, dict.fromkeys(added)))

    def arguments(self) -> dict[str, Any]:
        name = type(self._plain.schedule).__name__
        return {"guess": self.guesses, "schedule": name, "schedule_every": self._every, "peak": repr(tuple(self._peak))}

    def state_dict(self) -> dict[str, Any]:
        return {
            "total_steps": self.total_steps,
            "peak": self._peak.step,
            "peak_lrs": list(self._peak.rates),
            **self._plain.saved(),
        }

    def check(self, state: Mapping[str, Any], t: int, found: str) -> None:
        loading.check_schedule(self._plain.schedule, state["schedule"])
        _check_rates(state["plain_lrs"], len(self._plain.now))
        _check_rates([0.0 if rate is None else rate for rate in state["peak_lrs"]], len(self._plain.now))
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
