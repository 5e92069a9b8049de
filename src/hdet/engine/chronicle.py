"""The chronicle: when the journal's lines are written, and what happens when they cannot be."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from hdet.engine.records import header_record, resume_record
from hdet.journal import Sink

__all__ = ["Chronicle"]

_log = logging.getLogger("hdet")


class Chronicle:
    """Writes records to a sink; before the first of this process a header, or a record that the run goes on.

    Args:
        sink: where the journal goes, or None.
        arguments: the user's arguments, for the header.
    """

    def __init__(self, sink: Sink | None, arguments: Mapping[str, Any]) -> None:
        self.sink = sink
        self.arguments = dict(arguments)
        self._opened = False
        self._resumed: tuple[int, bool] | None = None

    def give_up(self) -> None:
        """Write nothing any more: somebody else does."""
        self.sink = None

    def resume(self, step: int, mid_round: bool) -> None:
        """The run goes on from a checkpoint."""
        self._opened, self._resumed = False, (step, mid_round)

    def write(self, record: Mapping[str, Any], replicas: int, knobs: list[str]) -> None:
        """Write a record. A journal that cannot be written is given up: one rank alone must not stop training."""
        if self.sink is None:
            return
        try:
            if not self._opened:
                self._open(self.sink, replicas, knobs)
            self.sink.write(record)
        except Exception as error:  # a full disk, a sink of the user's own: never a reason to stop on one rank alone
            _log.warning("the journal %r cannot be written and is given up: %s", self.sink, error)
            self.give_up()

    def _open(self, sink: Sink, replicas: int, knobs: list[str]) -> None:
        if self._resumed is None or not getattr(sink, "begun", False):
            sink.write(header_record(self.arguments, replicas, knobs))
        if self._resumed is not None:
            sink.write(resume_record(self._resumed[0], replicas, self._resumed[1]))
        self._opened = True
