"""The teller: what a run says while it goes on, as plain messages for whoever shows them.

| kind | says |
| --- | --- |
| start | |
| step | ``step``, ``base`` (rates, one per parameter group), ``loss`` (mean over replicas); a few times a second |
| event | ``step``, ``event``: what happened to the run at the end of a round |
| end | ``outcome`` |

All have ``run``, the number of the run among those that were started together. Numbers that are not finite are None.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hdet.report.numbers import plain_json
from hdet.rule.enums import Event, event_of

__all__ = ["Message", "Tell", "Teller", "silent"]

Message = Mapping[str, Any]
Tell = Callable[[Message], None]
_INTERVAL = 0.1


def silent(message: Message) -> None:
    """Tells nobody."""


class Teller:
    """Tells of one run. It is also a sink for the journal's records, from which it knows what happens to the run."""

    def __init__(self, tell: Tell, run: int = 0) -> None:
        self._tell = tell
        self._run = run
        self._last = 0.0

    def say(self, kind: str, **content: Any) -> None:
        self._tell({"kind": kind, "run": self._run, **plain_json(content)})

    def step(self, step: int, base: Sequence[float], loss: float, last: bool) -> None:
        """Tell of a step, unless one was told a moment ago."""
        now = time.monotonic()
        if now >= self._last + _INTERVAL or last:
            self._last = now
            self.say("step", step=step, base=list(base), loss=loss)

    def write(self, record: Mapping[str, Any]) -> None:
        """A record of the journal."""
        if record["kind"] == "round" and record.get("event") not in (None, Event.FIRST_STEP):
            self.say("event", step=record["step"], event=event_of(record))
