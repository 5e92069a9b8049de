"""``hdet.auto(..., schedule=...)``: the rate is found on any schedule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from hdet.checks import check_state, count, fields, number, some_rates
from hdet.errors import ArgumentError
from hdet.parameters import Rate, parts_of, put_rate
from hdet.schedulers.arguments import Ours, rate_names, search_of
from hdet.schedulers.loading import check_schedule, refuse_foreign, tell_another_length, watch_loading
from hdet.schedulers.plain_rates import Peak, PlainRates, Schedule, peak_of

__all__ = ["AllSchedules", "ScheduledSearch", "guesses_of"]

_RISE = 0.1
"""The search climbs for this part of the run at least, also on a schedule that falls from its first step on (LOG, any
schedule)."""


def guesses_of(optimizer: Optimizer) -> list[float]:
    """The rates that a schedule was built on, or is to be."""
    return [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]


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


class ScheduledSearch:
    """A schedule times a factor that is found in the run. Made by :func:`hdet.auto`.

    The schedule's rising phase is held at its peak: the search climbs by itself. From there on the rate is the schedule
    times the factor.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        schedule: Schedule,
        *,
        total_steps: int,
        every: int,
        ours: Ours,
        go_back: bool,
    ) -> None:
        guesses = guesses_of(optimizer)
        lead = min(g for g, guess in enumerate(guesses) if guess > 0)
        schedules = schedule.schedules if isinstance(schedule, AllSchedules) else [schedule]
        kind = type(schedules[0]).__name__
        alike = {"lr": repr(guesses), "schedule": kind, "schedule_every": repr(every)}
        told = {
            "max_lr": "auto",
            "guess": guesses,
            "schedule": kind,
            "schedule_every": every,
            "go_back": go_back,
            "total_steps": total_steps,
        }
        self._run = search_of(optimizer, ours, guesses, total_steps, told, alike, go_back=go_back)
        owned = list(zip(parts_of(optimizer), schedules, strict=True))
        self._peak = peak_of(owned, total_steps, every, lead)
        self.optimizer = optimizer
        self.schedule = schedule
        self._every = every
        self._plain = PlainRates(optimizer, schedule)
        self._step = 0
        self._run.begin(optimizer)
        self._write()

    # -- the loop -----------------------------------------------------------------------------------------------------

    def step(self, loss: float | Tensor | None = None) -> None:
        """Observe a loss if one is given, end the round if one ends here, and go to the next step of the schedule."""
        t = self._step + 1
        self._take_in_new_groups()
        self._run.step(self.optimizer, self._step, t, loss, self._rates_at, self._rise)
        if t % self._every == 0:
            self._plain.step()
        self._step = t
        self._write()

    def observe(self, loss: float | Tensor) -> None:
        """Count a loss towards the round; ``step(loss)`` is observe and step."""
        self._run.observe(loss)

    def converge(self) -> None:
        """Average the model's buffers over the ranks now, and nothing else."""
        self._run.converge(self.optimizer, self._step)

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """Averaged buffers inside, each rank's own back afterwards, also after an exception. A collective."""
        with self._run.consensus(self.optimizer, self._step):
            yield

    # -- values -------------------------------------------------------------------------------------------------------

    def get_last_lr(self) -> list[float]:
        """The rates of the parameter groups, as torch's schedulers tell them."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    @property
    def base_lrs_now(self) -> list[Rate]:
        """The rate of each parameter group."""
        return self._run.rates(self._values(self._step), self._step)

    def _values(self, t: int) -> list[Rate]:
        """The schedule at this step or at the next one, its rise held at the peak."""
        moves = t > self._step and t % self._every == 0
        values = self._plain.ahead() if moves else self._plain.values
        if not self._run.holds_rise or t >= self._peak.step:
            return list(values)
        added = values[len(self._peak.rates) :]
        return [*self._peak.rates, *added]

    def _rates_at(self, t: int) -> list[float]:
        return [float(value) for value in self._values(t)]

    def _rise(self) -> float:
        """Where the search's own climb ends: with the schedule's, but not at once where that has none."""
        return max(float(self._peak.step), _RISE * (self._run.total_steps or 0))

    def _take_in_new_groups(self) -> None:
        new = self._plain.new_groups()
        if new:
            self._run.grow(rate_names(new.start, new.stop))

    def _write(self) -> None:
        rates = self._run.rates(self._values(self._step), self._step)
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            put_rate(group, rate)

    # -- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The same on every rank, and no collective. Save the optimizer and the model as usual."""
        return {
            "step": self._step,
            "total_steps": self._run.total_steps,
            "plain_lrs": list(self._plain.values),
            "peak": self._peak.step,
            "peak_lrs": list(self._peak.rates),
            "schedule": self.schedule.state_dict(),
            "hdet": self._run.state(),
        }

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Raise an :class:`hdet.ArgumentError` unless :meth:`load_state_dict` can go on from it. Changes nothing."""
        refuse_foreign(state_dict, set(self.state_dict()), "hdet.auto", "a state of hdet.auto with a schedule")
        groups = len(self._plain.values)
        rules = {
            "step": count(0),
            "total_steps": count(1),
            "plain_lrs": some_rates,
            "peak": number,
            "peak_lrs": some_rates,  # fewer, where groups were added since
            "schedule": fields,
            "hdet": fields,
        }
        check_state(state_dict, rules, "the checkpoint")
        if len(state_dict["plain_lrs"]) != groups:
            raise ArgumentError(
                f"the checkpoint has {len(state_dict['plain_lrs'])} parameter groups, but here there are {groups}; "
                "build the optimizer as it was when it was saved"
            )
        check_schedule(self.schedule, state_dict["schedule"])
        self._run.check(state_dict["hdet"])

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a checkpoint of any rank; its values replace the constructor's."""
        self.check_state_dict(state_dict)
        t, length = int(state_dict["step"]), state_dict["total_steps"]
        tell_another_length(self._run.total_steps, length, self._run.seat)
        self.schedule.load_state_dict(state_dict["schedule"])
        self._run.load(state_dict["hdet"], length, t)
        self._peak = Peak(int(state_dict["peak"]), list(state_dict["peak_lrs"]))
        self._plain.load(state_dict["plain_lrs"])
        self._step = t
        self._write()
        watch_loading(self.optimizer, self, self._run, ScheduledSearch._write)

    def search_state_dict(self) -> dict[str, Any]:
        """As in :class:`hdet.OneCycleLR`."""
        return self._run.tensors(self.optimizer, self._step)

    def check_search_state_dict(self, search: Mapping[str, Any], state_dict: Mapping[str, Any]) -> None:
        """As in :class:`hdet.OneCycleLR`."""
        self._run.check_tensors(search, self.optimizer, state_dict["step"])

    def load_search_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """As in :class:`hdet.OneCycleLR`."""
        self._run.load_tensors(state_dict, self.optimizer, self._step)
