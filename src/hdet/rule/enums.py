"""What happens in a search, and why it stops: codes in code and in the journal, sentences for people."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum, StrEnum
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
    """The last rollback did not help: the data have become harder. The guard undoes it, and the search raises the rate
    back."""


class Action(IntEnum):
    """What is to be done with the weights."""

    NOTHING = 0
    KEEP = 1
    """Copy them, with buffers and optimizer state, into the decision's slot."""
    ROLL_BACK = 2
    """Restore what is in the decision's slot. A guard copies the weights aside before that, unless they are broken."""
    TAKE_BACK = 3
    """A guard's last rollback was a false alarm: restore what it has replaced, from the decision's slot."""
    CANNOT_ROLL_BACK = 4
    """Training has diverged, but there is no snapshot: it goes on if the weights are finite."""
    GIVE_UP = 5
    """Diverged once too often."""
    RESTART = 6
    """A search begins again from the weights as they were before the first step."""


class _Told(StrEnum):
    """A code, which is the value, and what it says to people."""

    text: str

    def __new__(cls, code: str, text: str) -> _Told:
        member = str.__new__(cls, code)
        member._value_, member.text = code, text
        return member


class Event(_Told):
    """What happened at the end of a round. The journal has the value."""

    FIRST_STEP = "first_step", "first step"
    """The first step was measured: from then on the guess does not matter."""
    RESTARTED = "restarted", "restarted: the first step was too long"
    """Training began again from the first weights, at a lower rate."""
    ROLLED_BACK = "rolled_back", "diverged: rolled back to step {rolled_back_to}"
    """Training diverged: it was rolled back, and the rate was lowered."""
    BAD_BATCH = "bad_batch", "weights NaN or infinite: rolled back to step {rolled_back_to}, at the same rate"
    """Weights were NaN or infinite after fine losses, and no such batch was excused lately."""
    SLOWED_DOWN = "slowed_down", "diverged: the rate is lowered"
    """Training diverged, and there was no snapshot."""
    FALSE_ALARM = "false_alarm", "the data were harder: the rate is as before"
    """After a rollback the losses were as high."""
    STOPPED = "stopped", "search stopped: {why}; using the given rate"
    """No rate can be found."""


class Reason(_Told):
    """Why a search has its status. Journal and checkpoints have the value."""

    NEVER_MOVED = "never_moved", "no step has moved the weights"
    NO_GRADIENT = "no_gradient", "weights moved, but no gradient was seen before the schedule's peak"
    RATE_IGNORED = "rate_ignored", "update size does not scale with the learning rate"
    TOO_SHORT = "too_short", "the run has fewer steps than the search needs, and uses the given rate"
    NOT_FALLEN = "not_fallen", "the train loss has not fallen, or hardly"
    AT_BOUND = "at_bound", "at the bound you gave"
    STILL_RISING = "still_rising", "the schedule fell while the rate was still rising"
    UNUSUAL = "unusual", "steps are more than ten times longer or shorter than other runs' at their best rates"


_TEXTS = {member.value: member.text for kind in (Event, Reason) for member in kind}


def event_of(record: Mapping[str, Any]) -> str | None:
    """What happened in a round of the journal, in words; None if nothing did.

    >>> event_of({"event": "rolled_back", "rolled_back_to": 36})
    'diverged: rolled back to step 36'
    >>> event_of({"event": "stopped", "why": "never_moved"})
    'search stopped: no step has moved the weights; using the given rate'
    """
    code = record.get("event")
    if code not in _TEXTS:  # none, or one of a later version
        return code or None
    return _TEXTS[code].format(rolled_back_to=record.get("rolled_back_to"), why=reason_of(record))


def reason_of(record: Mapping[str, Any]) -> str:
    """Why the search had its status at the end of a round of the journal, in words; empty if there is no reason.

    >>> reason_of({"why": "at_bound"}), reason_of({"why": None})
    ('at the bound you gave', '')
    """
    why = record.get("why")
    return _TEXTS.get(why, why) if why else ""
