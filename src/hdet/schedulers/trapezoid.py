"""The schedule of ``hdet.auto`` if none is given: the rate rises, is held, and falls. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple, NoReturn

from hdet.checks import is_finite, is_int, is_real, shown
from hdet.errors import ArgumentError
from hdet.optimizer import Rate, with_added
from hdet.rule.constants import DEFAULT, DIV_FACTOR, FINAL_DIV_FACTOR, HOLD, RISE


class LengthError(ArgumentError):
    """A run that was saved cannot go on with the length that was given."""


class Trapezoid(NamedTuple):
    r"""The rate over its peak, as a function of the step t in a run of S steps.

    It rises along a line from 1/25 until step 0.3 S - 1, is held until step h = 0.6 S - 1, and falls as
    :math:`1 - \sqrt{(t - h) / (S - 1 - h)}`, to 1/250,000 in the last step.

    >>> trapezoid = Trapezoid.of(100)
    >>> [round(trapezoid.at(t), 2) for t in (0, 29, 59, 69, 99)]
    [0.04, 1.0, 1.0, 0.5, 0.0]
    """

    total_steps: int | None
    """S; None: the length is unknown, and the rate is held."""
    rise: float
    """The step at which the peak is reached."""
    hold: float
    """The last step at the peak."""

    @classmethod
    def of(cls, total_steps: int | None) -> Trapezoid:
        """That of a run of this length."""
        if total_steps is None:
            return cls(None, float(DEFAULT.min_steps), math.inf)
        return cls(total_steps, RISE * total_steps - 1, HOLD * total_steps - 1)

    @classmethod
    def loaded(cls, state: Mapping[str, Any]) -> Trapezoid:
        """That of :meth:`_asdict`. Raises ValueError for anything else."""
        total_steps, rise, hold = state["total_steps"], state["rise"], state["hold"]
        if not (total_steps is None or is_int(total_steps)) or not (is_finite(rise) and is_real(hold) and hold == hold):
            raise ValueError(f"its trapezoid is {dict(state)!r}")
        return cls(total_steps, float(rise), float(hold))

    def at(self, t: float, peak: float = 1.0) -> float:
        """The rate at step t, which may be a fraction of a step."""
        low = peak / DIV_FACTOR
        if t <= self.rise and not self.is_finished:
            return (peak - low) * (t / self.rise) + low
        if self.total_steps is None or not self.has_fallen(t):
            return peak
        part = min((t - self.hold) / (self.total_steps - 1 - self.hold), 1.0)
        return (low / FINAL_DIV_FACTOR - peak) * math.sqrt(part) + peak

    def has_fallen(self, t: float) -> bool:
        """Whether the rate is below its peak at step ``t``, on its way down."""
        return t > self.hold

    @property
    def is_finished(self) -> bool:
        """Whether it was made by :meth:`finished`: there is no rise any more."""
        return self.rise == self.hold

    def finished(self, now: int, steps: int) -> Trapezoid:
        """The rate falls over ``steps`` steps from ``now`` on. If it falls already, it falls faster or slower."""
        hold = float(now - 1)
        if self.has_fallen(now) and steps > 1 and self.total_steps is not None:
            pace = (steps - 1) / (self.total_steps - 1 - now)
            hold = now + pace * (self.hold - now)
        return Trapezoid(now + steps, hold, hold)

    def going_on(self, saved: Trapezoid, now: float, found: str) -> Trapezoid:
        """The schedule of this length for a run that was saved at step ``now`` with another one.

        If its rate is held already, it does not rise again. Raises a :class:`LengthError` if either has fallen.

        Args:
            saved: the schedule of the run that was saved.
            now: its step.
            found: the peak rates that it has found, in words.
        """
        if saved.has_fallen(now):
            refuse_length(
                saved.total_steps,
                self.total_steps,
                f"its rate falls from step {saved.hold:g} on and this is step {now:g}",
                found,
            )
        if self.has_fallen(now):
            raise LengthError(
                f"total_steps must be such that the schedule falls after step {now:g}, at which the run was saved, but "
                f"got total_steps={self.total_steps}, with which it falls from step {self.hold:g} on; give more"
            )
        return self._replace(rise=saved.rise) if now > saved.rise else self


class TrapezoidSchedule:
    """The trapezoid of a run, and the guesses that are its peaks. What each method does holds for every schedule here.

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
        """The length of the run; None: unknown."""
        return self.shape.total_steps

    @property
    def climb_end(self) -> float:
        """The step at which the search's own climb ends."""
        return self.shape.rise

    def rates(self, t: float, *, held: bool) -> list[Rate]:
        """The rate of each parameter group at step ``t``; ``held``: its peak in place of its rising phase."""
        t = max(t, self.shape.rise) if held else t
        return [self.shape.at(t, peak) for peak in self.guesses]

    def step(self, t: int) -> None:
        """There is nothing to do: the shape is a function of the step."""

    def finish(self, now: int, steps: int) -> None:
        """Fall over ``steps`` steps from ``now`` on."""
        self.shape = self.shape.finished(now, steps)

    def grow(self, added: Mapping[int, Mapping[str, Any]], rates: Sequence[Rate]) -> None:
        """Take in groups that were added to the optimizer.

        Args:
            added: the groups, by their numbers among all.
            rates: of the groups that were there.
        """
        guesses = {g: guess_of(group["lr"], self.guesses, rates) for g, group in added.items()}
        # a group that is a copy of another one brings the guess of that, too
        guesses |= {g: float(group["initial_lr"]) for g, group in added.items() if "initial_lr" in group}
        self.guesses = with_added(self.guesses, guesses)

    def arguments(self) -> dict[str, Any]:
        """What the journal's first line says of it, and what all ranks must have alike."""
        return {"guess": self.guesses, "schedule": "trapezoid"}

    def state_dict(self) -> dict[str, Any]:
        return {"planned": self._planned.total_steps, "guesses": self.guesses, **self.shape._asdict()}

    def check(self, state: Mapping[str, Any], t: int, found: str) -> None:
        """Raise unless :meth:`load` can go on from it at step ``t``; ``found``: the peak rates found, in words."""
        check_rates(state["guesses"], len(self.guesses))
        self._resumed(state, t, found)

    def load(self, state: Mapping[str, Any], t: int) -> bool:
        """Go on from it, and say whether the run has another length than it had."""
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


def guess_of(given: Rate, guesses: Sequence[Rate], rates: Sequence[Rate]) -> float:
    """The guess of a group that is added during the run: its rate, or that rate without the factor that was found.

    Nothing tells which of the two was meant but what it is nearer to, in geometric means, the guesses or the rates of
    now: fine-tuning loops often derive a group's rate from that of another group, which has the factor in it.

    Args:
        given: the rate of the group that is added.
        guesses: of the other groups, without the factor.
        rates: of the other groups, with it.

    >>> guess_of(1e-6, [1e-6], [0.2]), f"{guess_of(0.02, [1e-6], [0.2]):.0e}"
    (1e-06, '1e-07')
    """
    own, pairs = float(given), [(float(guess), float(rate)) for guess, rate in zip(guesses, rates, strict=True)]
    logs = [(math.log(guess), math.log(rate)) for guess, rate in pairs if guess > 0 and rate > 0]
    if own <= 0 or not logs:
        return own
    usual_guess, usual_rate = map(fmean, zip(*logs, strict=True))
    is_guess = abs(math.log(own) - usual_guess) <= abs(math.log(own) - usual_rate)
    return own if is_guess else own * math.exp(usual_guess - usual_rate)


def refuse_length(saved: int | None, given: int | None, why: str, found: str) -> NoReturn:
    """Raise because a run can only go on with the length that it had.

    Args:
        saved: that length.
        given: the length that this scheduler was built with.
        why: the reason.
        found: the peak rates that the run has found, in words.
    """
    raise LengthError(
        f"total_steps must be {saved} as in the run that was saved, since {why}, but got total_steps={given}; give "
        f"that, or begin a new run from the weights with the rate {found}, which was found"
    )


def check_rates(rates: Sequence[Any], groups: int) -> None:
    """Raise unless these are finite rates, one for each parameter group."""
    if [math.isfinite(rate) for rate in rates] != [True] * groups:
        raise ValueError(f"its rates of {groups} parameter groups are {shown(rates)}")
