"""What happens in a search, and why it stops: codes in code and in the journal, sentences for people."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, IntEnum
from typing import Any


class Phase(IntEnum):
    """Where the search stands."""

    FIRST = 0
    """Before a first step whose length is known."""
    SEARCHING = 1
    """The rate is searched, or has been found."""
    STOPPED = 2
    """Nothing is searched: the given rate is used, on the schedule as it is. Nothing is rolled back, either."""


class Verdict(IntEnum):
    """What the losses of a round say about the weights."""

    FINE = 0
    DIVERGED = 1
    """Roll back."""
    FALSE_ALARM = 2
    """The last rollback did not help: the data have become harder. Undo it."""


class Action(IntEnum):
    """What is to be done with the weights."""

    NOTHING = 0
    KEEP = 1
    """Copy them, with buffers and optimizer state, into the decision's slot."""
    ROLL_BACK = 2
    """Restore what is in the decision's slot. A guard copies the weights aside before that, unless they are broken."""
    TAKE_BACK = 3
    """A guard's last rollback was a false alarm: restore what it has replaced, from the decision's slot."""
    GO_ON = 4
    """Diverged, and there is no snapshot: training goes on if the weights are finite."""
    GIVE_UP = 5
    """Diverged once too often."""
    RESTART = 6
    """A search begins again from the weights as they were before the first step."""


class Event(str, Enum):
    """What happened at the end of a round. The journal has the value."""

    FIRST_STEP = "first_step"
    """The first step was measured: from then on the guess does not matter."""
    RESTARTED = "restarted"
    """The first step was too long: training began again from the first weights, at a lower rate."""
    ROLLED_BACK = "rolled_back"
    """Training diverged: it was rolled back, and the rate was lowered."""
    BAD_BATCH = "bad_batch"
    """Weights were NaN or infinite for the first time: training was rolled back at the same rate."""
    SLOWED_DOWN = "slowed_down"
    """Training diverged, and there was no snapshot: only the rate was lowered."""
    FALSE_ALARM = "false_alarm"
    """After a rollback the losses were as high: the data are harder, and the rate was raised back."""
    STOPPED = "stopped"
    """No rate can be found: the given rate is used from here on."""


class Reason(str, Enum):
    """Why a search has its status. Journal and checkpoints have the value."""

    NEVER_MOVED = "never_moved"
    NO_GRADIENT = "no_gradient"
    RATE_IGNORED = "rate_ignored"
    TOO_SHORT = "too_short"
    NOT_FALLEN = "not_fallen"
    AT_BOUND = "at_bound"
    STILL_RISING = "still_rising"
    UNUSUAL = "unusual"

    @property
    def text(self) -> str:
        """The reason in words."""
        return _REASONS[self]


_REASONS: dict[str, str] = {
    Reason.NEVER_MOVED: "no step has moved the weights",
    Reason.NO_GRADIENT: "weights moved, but no gradient was seen before the schedule's peak",
    Reason.RATE_IGNORED: "update size does not scale with the learning rate",
    Reason.TOO_SHORT: "the run has fewer steps than the search needs, and uses the given rate",
    Reason.NOT_FALLEN: "the train loss has not fallen, or hardly",
    Reason.AT_BOUND: "at the bound you gave",
    Reason.STILL_RISING: "the schedule fell while the rate was still rising",
    Reason.UNUSUAL: "steps are more than ten times longer or shorter than other runs' at their best rates",
}
_EVENTS: dict[str, str] = {
    Event.FIRST_STEP: "first step",
    Event.RESTARTED: "restarted: the first step was too long",
    Event.ROLLED_BACK: "diverged: rolled back to step {rolled_back_to}",
    Event.BAD_BATCH: "weights NaN or infinite: rolled back to step {rolled_back_to}, at the same rate",
    Event.SLOWED_DOWN: "diverged: the rate is lowered",
    Event.FALSE_ALARM: "the data were harder: the rate is as before",
    Event.STOPPED: "search stopped: {why}; using the given rate",
}


def event_of(record: Mapping[str, Any]) -> str | None:
    """What happened in a round of the journal, in words; None if nothing did.

    >>> event_of({"event": "rolled_back", "rolled_back_to": 36})
    'diverged: rolled back to step 36'
    >>> event_of({"event": "stopped", "why": "never_moved"})
    'search stopped: no step has moved the weights; using the given rate'
    """
    code = record.get("event")
    if code not in _EVENTS:  # none, or one of a later version
        return code or None
    return _EVENTS[code].format(rolled_back_to=record.get("rolled_back_to"), why=reason_of(record))


def reason_of(record: Mapping[str, Any]) -> str:
    """Why the search had its status at the end of a round of the journal, in words; empty if there is no reason.

    >>> reason_of({"why": "at_bound"}), reason_of({"why": None})
    ('at the bound you gave', '')
    """
    why = record.get("why")
    return _REASONS.get(why, why) if why else ""
