"""What a search has found, for people, and how sure it is."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, SupportsFloat, TypeAlias

from hdet.rule.constants import CLEAR, SURE
from hdet.rule.enums import Phase, Reason
from hdet.rule.state import State

Status: TypeAlias = Literal["searching", "settled", "unsure", "stopped", "too short"]
_ERROR, _DISAGREEMENT, _ERROR_ALONE = 0.8, 0.3, 1.2
"""Deviation of the logarithm of a rate that was found from the best one: if the evidence agrees with the prior, what it
gains with their distance, and without a prior (LOG, an estimate)."""
_UNUSUAL = math.log(10.0)
"""The distance of evidence and prior from which on the rate is in doubt."""


@dataclass(frozen=True)
class Found:
    """What :func:`hdet.auto` has found so far.

    Args:
        rate: the peak rate, of the first parameter group that is searched. NaN until a round has ended.
        status: "searching"; "settled": the schedule has begun to fall, the rate is at its bound, or nothing was raised
            for three rounds of a run of unknown length; and the train loss, if given, has fallen beyond its noise;
            "unsure": the same, but the rate may well be wrong, and ``why`` says what speaks against it; "stopped": no
            rate will be found, or the loss had not fallen when the schedule fell; "too short": the run has fewer steps
            than the search needs.
        rolled_back: how often training was rolled back to earlier weights.
        rates: the peak rates of all parameter groups, also of those that are not searched and of those that were added
            in the run. As ``max_lr=list(rates)`` they begin a new OneCycle with these peaks. Empty until a round has
            ended.
        why: what has stopped the search, what makes it unsure, or that the rate has settled at the bound; otherwise
            empty.
        within: two times out of three the best rate is within this factor of ``rate``, above or below. Infinite while
            nothing but a lower bound is known.

    >>> print(Found(0.0671234, "settled", rolled_back=1, within=2.4))
    found 0.067 within a factor 2.4, settled, rolled back once
    >>> print(Found(0.0671234, "unsure", why=Reason.STILL_RISING.text))
    found 0.067, unsure (the schedule fell while the rate was still rising), never rolled back
    >>> print(Found(0.01, "settled", why=Reason.AT_BOUND.text))
    found 0.01, settled (at the bound you gave), never rolled back
    >>> print(Found(0.067, "stopped", why=Reason.NOT_FALLEN.text))
    at 0.067, stopped (the train loss has not fallen, or hardly), never rolled back
    >>> print(Found(0.067, rates=(0.0, 0.067)))
    found [0, 0.067], still searching, never rolled back
    """

    rate: float
    status: Status = "searching"
    rolled_back: int = 0
    rates: tuple[float, ...] = ()
    why: str = ""
    within: float = math.inf

    @property
    def settled(self) -> bool:
        """Whether the rate is found."""
        return self.status == "settled"

    @property
    def max_lr(self) -> str:
        """The rates as ``max_lr`` takes them, for people."""
        return listed(self.rates or (self.rate,))

    def __str__(self) -> str:
        if math.isnan(self.rate):
            return "found nothing yet"
        words = {0: "never rolled back", 1: "rolled back once"}
        often = words.get(self.rolled_back, f"rolled back {self.rolled_back} times")
        status = "still searching" if self.status == "searching" else self.status
        why = f" ({self.why})" if self.why else ""
        verb = "found" if self.status in ("searching", "settled", "unsure") else "at"
        is_told = self.status in ("settled", "unsure") and self.within < math.inf
        within = f" within a factor {self.within:.2g}" if is_told else ""
        return f"{verb} {self.max_lr}{within}, {status}{why}, {often}"


def listed(rates: Iterable[SupportsFloat]) -> str:
    """The rates of all parameter groups in words: one number, or a list if they differ.

    >>> listed([0.05, 0.05]), listed([0.0, 0.0671])
    ('0.05', '[0, 0.067]')
    """
    words = [f"{float(rate):.2g}" for rate in rates]
    return words[0] if len(set(words)) == 1 else f"[{', '.join(words)}]"


def status_of(
    found: State,
    stopped_for: Reason | None,
    *,
    is_falling: bool,
    rests: bool,
    is_bound: bool,
    has_fallen: Callable[[float], bool],
) -> tuple[Status, Reason | None]:
    """Where a search stands, and why; see :class:`Found`.

    Args:
        found: the state of the rule.
        stopped_for: why the search has stopped, if it has.
        is_falling: whether the schedule has fallen so far that nothing is raised any more.
        rests: whether the rate is to stay, though the schedule has not fallen yet.
        is_bound: whether the rate is at the bound that the user gave.
        has_fallen: whether the loss has, by so many deviations; also true if too little is known of it.
    """
    if found.phase == Phase.STOPPED:
        return ("too short" if stopped_for is Reason.TOO_SHORT else "stopped"), stopped_for
    if found.phase == Phase.FIRST or not (is_falling or rests):
        return "searching", None
    if not has_fallen(SURE if is_falling else CLEAR):
        return ("stopped", Reason.NOT_FALLEN) if is_falling else ("searching", None)
    if is_bound:
        return "settled", Reason.AT_BOUND
    if math.isinf(found.ceiling):
        return "unsure", Reason.STILL_RISING
    return ("unsure", Reason.UNUSUAL) if abs(found.asked - found.prior) > _UNUSUAL else ("settled", None)


def within(found: State) -> float:
    """The factor within which the best rate is, two times out of three; infinite as long as gradients agree."""
    if math.isinf(found.ceiling):
        return math.inf
    apart = found.asked - found.prior
    return math.exp(math.hypot(_ERROR, _DISAGREEMENT * apart) if math.isfinite(apart) else _ERROR_ALONE)
