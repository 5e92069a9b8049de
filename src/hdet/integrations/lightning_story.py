"""What a search in a Lightning trainer tells: numbers for the loggers, sentences for people."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from hdet.events import event_of, reason_of
from hdet.journal import open_journal
from hdet.search.reporting import listed


class Story:
    """A sink: passes a search on to the trainer's loggers as numbers, and to people as sentences. On one rank."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._header: Mapping[str, Any] = {}
        self._last: Mapping[str, Any] | None = None
        self.verdict: str | None = None
        """What the search came to."""

    def write(self, record: Mapping[str, Any]) -> None:
        """Take a record of the journal."""
        if record["kind"] == "header":
            self._header = record
        if record["kind"] != "round":
            return
        self._last = record
        loggers = open_journal(list(self._trainer.loggers))
        if loggers is not None:
            loggers.write(self._header)
            loggers.write(record)
        happened = event_of(record)
        if happened:
            self._say(f"step {record['step']}: {happened}; the rate is {listed(record['base'])}")

    def conclude(self, guesses: Sequence[float]) -> None:
        """Say what rates were found.

        ``guesses``: of the parameter groups, in the first run: one that goes on may have been given others.
        """
        if self._last is None:
            return
        stopped = self._last["status"] == "stopped"
        found = "the search has stopped at" if stopped else "found"
        why = f": {reason_of(self._last)}" if stopped else ""
        self.verdict = f"{found} the rate {listed(self._last['found_rates'])}, from a guess of {listed(guesses)}{why}"
        self._say(self.verdict)

    def _say(self, words: str) -> None:
        part_of_lightning(self._trainer, "utilities.rank_zero").rank_zero_info(f"hdet: {words}")


def part_of_lightning(trainer: Any, path: str) -> Any:
    """A module of the package that the trainer is from: ``lightning.pytorch`` or ``pytorch_lightning``."""
    root, _, _ = type(trainer.fit_loop).__module__.partition(".loops.")
    return importlib.import_module(f"{root}.{path}")
