"""``hdet.auto(..., schedule=...)``: finds a factor on the rates of any schedule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.checks import must_count
from hdet.errors import ArgumentError
from hdet.journal import Journals
from hdet.parameters import Rate, with_added
from hdet.ranks.group import Group
from hdet.schedulers.arguments import CommonArguments, check_common, rate_names
from hdet.schedulers.given_schedule import AllSchedules, guesses_of, planned
from hdet.schedulers.peak import Peak
from hdet.schedulers.plain_rates import OnSchedule
from hdet.schedulers.plan import LengthError
from hdet.schedulers.search_arguments import WithSearch, check_search, search_of
from hdet.search.search import Search

_RISE = 0.1
"""The search climbs for this part of the run at least, also on a schedule that falls from its first step on (LOG, any
schedule)."""


class ScheduledSearch(OnSchedule, WithSearch):
    """A schedule times a factor that is found in the run. Made by :func:`hdet.auto`.

    The schedule's rising phase is held at its peak, and the search climbs in its place. From the peak on the rate is
    the schedule times the factor.
    """

    search: Search
    """The search for the factor."""
    _name = "hdet.auto"
    _run: Search

    def __init__(
        self,
        optimizer: Optimizer,
        schedule: Any,
        total_steps: int,
        every: int,
        *,
        group: Group = None,
        model: nn.Module | None = None,
        journal: Journals = None,
        rollback: bool = True,
        highest: Any = None,
    ) -> None:
        total_steps = must_count(1, "count optimizer steps", total_steps=total_steps)
        every = must_count(1, "leave it out for 1", high=total_steps, schedule_every=every)
        common = CommonArguments(group, model, journal)
        check_common(common, optimizer)
        check_search(optimizer, common, guesses_of(optimizer), highest)  # before a schedule writes
        peak, make = planned(optimizer, schedule, -(-total_steps // every))
        self._peak, made = peak._replace(step=peak.step * every), make()
        guesses = guesses_of(optimizer)  # a schedule may have rates of its own
        alike = {"the schedule's peak": repr(tuple(self._peak))}
        told = {
            "max_lr": "auto",
            "guess": guesses,
            "schedule": type(made[0]).__name__,
            "schedule_every": every,
            "rollback": rollback,
            "highest": highest,
            "total_steps": total_steps,
        }
        run = search_of(optimizer, common, guesses, total_steps, told, alike, rollback=rollback, highest=highest)
        self.search, self._every = run, every
        super().__init__(optimizer, made[0] if len(made) == 1 else AllSchedules(made), run)
        run.written.begin(self)
        self._write_again()

    # -- the loop -----------------------------------------------------------------------------------------------------

    def step(self, loss: float | Tensor | None = None) -> None:
        """Observe a loss if one is given, end the round if one ends here, and go to the next step of the schedule."""
        t = self.last_epoch + 1
        self._take_in_new_groups()
        self._run.step(self.optimizer, self.last_epoch, t, loss, self._rates_at, self._rise)
        if t % self._every == 0:
            self._step_schedule()
        self.last_epoch = t
        self._write_again()

    # -- values -------------------------------------------------------------------------------------------------------

    def finish(self, steps: int) -> None:
        """Refused: a schedule of your own ends where it was made to end."""
        raise ArgumentError(
            f"finish() is for runs without schedule=, but this one follows a {type(self.schedule).__name__} of "
            f"{self._run.total_steps} steps; leave schedule= out of hdet.auto, or begin a new run with the weights and "
            "a schedule of the steps that are left"
        )

    def get_last_lr(self) -> list[float]:
        """The rates of the parameter groups, as in torch's schedulers."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    @property
    def base_lrs_now(self) -> list[Rate]:
        """The rate of each parameter group."""
        return self._run.rates(self._values(self.last_epoch), self.last_epoch)

    def _values(self, t: int) -> list[Rate]:
        """The schedule at this step or at the next one, its rise held at the peak."""
        moves = t > self.last_epoch and t % self._every == 0
        values = self._ahead() if moves else self._plain
        if not self._run.holds_rise or t >= self._peak.step:
            return list(values)
        return [value if peak is None else peak for value, peak in zip(values, self._peak.rates, strict=True)]

    def _rates_at(self, t: int) -> list[float]:
        return [float(value) for value in self._values(t)]

    def _rise(self) -> float:
        """The step at which the search's own climb ends: the schedule's peak, but not before a tenth of the run."""
        return max(float(self._peak.step), _RISE * (self._run.total_steps or 0))

    def _take_in_new_groups(self) -> None:
        new = self._new_groups()
        if new:
            self._peak = self._peak._replace(rates=with_added(self._peak.rates, dict.fromkeys(new)))
            names = rate_names(self.optimizer)
            self._run.grow(new, names)
            self._run.journal_writer.add([names[g] for g in new], self.last_epoch)

    def _write_again(self) -> None:
        self._put(self.base_lrs_now)
        self._run.written.note(self.optimizer.param_groups)

    # -- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The same on every rank, and no collective. Save the optimizer and the model as usual."""
        state = super().state_dict()
        return {**state, "peak": self._peak.step, "peak_lrs": list(self._peak.rates)}

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Raise an :class:`hdet.ArgumentError` unless :meth:`load_state_dict` can go on from it. Changes nothing."""
        super().check_state_dict(state_dict)
        saved, mine = state_dict["total_steps"], self._run.total_steps
        if saved != mine:  # the schedule's own length is somewhere in its own state
            must = f"{saved} as in the run that was saved, since its schedule ends there"
            raise LengthError(must, f"{mine}", f"{saved}", self._run.found_in(state_dict["hdet"]).max_lr)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a checkpoint of any rank, at any number of ranks."""
        self.check_state_dict(state_dict)
        self._peak = Peak(int(state_dict["peak"]), list(state_dict["peak_lrs"]))
        super().load_state_dict(state_dict)
