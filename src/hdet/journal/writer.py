"""When the lines of a journal are written, and what happens if they cannot be.

One rank writes. Before the first round it locks the files, so that a second run is refused at once; later a full disk,
or an error of the user's own sink, loses rounds but never stops training.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import torch.distributed as dist

from hdet._version import __version__
from hdet.errors import JournalError
from hdet.journal import SCHEMA, Journal, Sink
from hdet.ranks.agreement import Agreement, RankGroup
from hdet.ranks.group import ReplicaGroup, Solo, arriving
from hdet.ranks.weights import Weights

_log = logging.getLogger("hdet")


class Clock:
    """Measures the phases of a round's end. It starts when it is made."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self.seconds: dict[str, float] = {}

    def lap(self, phase: str) -> None:
        """Count the time since the last lap as seconds of ``phase``."""
        now = time.perf_counter()
        self.seconds[phase] = now - self._last
        self._last = now


class JournalWriter:
    """Writes records to sinks; before the first one a header, or a record that says that the run was resumed.

    Args:
        sinks: where the journal goes; empty if there is none.
        arguments: the user's arguments, for the header.
    """

    def __init__(self, sinks: Sequence[Sink], arguments: Mapping[str, Any]) -> None:
        self.arguments = dict(arguments)
        self._outputs = [_Output(sink) for sink in sinks]
        self._resumed: dict[str, Any] | None = None
        """The record of it, once the run was resumed."""
        self.is_locked = False
        """Whether :meth:`lock` was called."""
        self._has_other_knobs = False
        """Whether the header may lack knobs, because they were added or an earlier process has written it."""
        self._added: dict[str, int] = {}
        """The step at which each knob was added since the last round."""
        self._round_began = time.perf_counter()

    @property
    def is_kept(self) -> bool:
        """Whether this rank has a journal."""
        return bool(self._outputs)

    def give_up(self) -> None:
        """Write nothing from here on, since another rank does."""
        self._outputs = []

    def lock(self, group: ReplicaGroup, *, writes: bool) -> None:
        """Before the first round: lock the files for this run. Raises on every rank if another run has one. Collective.

        Further calls do nothing. A file that cannot be opened for another reason is tried again at the end of every
        round.

        Args:
            group: the ranks.
            writes: whether this rank is the one that writes.
        """
        if self.is_locked:
            return
        self.is_locked = True
        refusal: JournalError | None = None
        for sink in self._files() if writes else ():
            try:
                sink.lock()
            except JournalError as error:
                refusal = error
                break
            except OSError as error:
                _log.warning("the journal %r cannot be opened: %s. Every round tries again", sink, error)
        refused = [rank for rank, (row,) in enumerate(group.gather([float(refusal is not None)])) if row]
        if refusal is not None:
            raise refusal
        if refused:
            raise JournalError(f"rank {refused[0]} may not write the journal, since another run does; see its message")

    @property
    def sinks(self) -> list[Sink]:
        """Where the journal goes."""
        return [output.sink for output in self._outputs]

    def _files(self) -> list[Journal]:
        return [sink for sink in self.sinks if isinstance(sink, Journal)]

    def begin_round(self) -> None:
        """Count the seconds of training from here."""
        self._round_began = time.perf_counter()

    def resume(self, step: int, mid_round: bool) -> None:
        """The run was resumed at a step. ``mid_round``: the losses of the round before it are lost."""
        self._resumed = {"kind": "resume", "step": step, "mid_round": mid_round}
        self._has_other_knobs = True
        for output in self._outputs:
            output.opened = False

    def add(self, knobs: Sequence[str], step: int) -> None:
        """Knobs were added at a step."""
        self._added |= dict.fromkeys(knobs, step)
        self._has_other_knobs = True

    def write(self, record: dict[str, Any], knobs: list[str], ended: float) -> None:
        """Write the record of a round to every sink that works: an error on one rank alone must not stop training.

        ``ended``: when the training of the round ended, by ``time.perf_counter``.
        """
        replicas, now = len(record["replicas"]), datetime.now(UTC).isoformat(timespec="seconds")
        record["seconds"] = {"train": ended - self._round_began, **record["seconds"]}
        if self._has_other_knobs:
            record["knobs"] = list(knobs)
        if self._added:
            record["added"], self._added = self._added, {}
        setup = {"replicas": replicas, "knobs": knobs, "arguments": self.arguments}
        header = {"kind": "header", "schema": SCHEMA, "hdet": __version__, "time": now, **setup}
        resume = [] if self._resumed is None else [{**self._resumed, "time": now, "replicas": replicas}]
        for output in self._outputs:
            output.write(header, resume, record)

    def close(self) -> None:
        """The run has ended: close the files, so that others may write to them."""
        for sink in self._files():
            sink.close()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, is_locked=False)


def connect_ranks(
    rank_group: RankGroup,
    journal_writer: JournalWriter,
    t: int,
    weights: Callable[[], Weights],
    agreed: Callable[[ReplicaGroup, Agreement], None] = lambda group, agreement: None,
) -> None:
    """Connect the ranks for the first time: check that they agree, and choose who writes the journal. Collective.

    Call it if ``rank_group.is_due``.

    Args:
        rank_group: the ranks.
        journal_writer: the journal of this rank.
        t: the step.
        weights: returns this rank's weights, checked; called only if there are several replicas.
        agreed: called once the ranks agree, with their group and agreement.
    """
    journal_writer.begin_round()
    if rank_group.replica_index.size == 1:
        rank_group.begin(Solo())
        if dist.get_rank() > 0:  # of several ranks that are one replica, the first writes the journal
            journal_writer.give_up()
        return
    given = journal_writer.arguments if journal_writer._resumed is None else {}  # a checkpoint's values replace them
    own = weights()
    with arriving("the first step, where the replicas meet"):
        group, roll = rank_group.first(t, own, given, keeps_journal=journal_writer.is_kept)
        agreed(group, roll)
        if roll.writer is not None:
            journal_writer.lock(group, writes=roll.writer == group.rank)
    rank_group.begin(group)


class _Output:
    """A sink with the id of the run in it, whether it has a header, and how many rounds it has missed."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.opened = False
        """Whether this run's header, or the record of its resume, was written."""
        self._run = uuid.uuid4().hex[:12]
        self._lost = 0

    def write(self, header: dict[str, Any], resume: list[dict[str, Any]], record: Mapping[str, Any]) -> None:
        """Write a record, and the header before the first. A record that cannot be written is lost, and counted.

        ``resume``: the record that says that the run was resumed, if it was. It continues the run in the file, if there
        is one.
        """
        try:
            if not self.opened:
                continued = self.sink.run if resume and isinstance(self.sink, Journal) else None
                self._run = continued or self._run
                for first in resume if continued else [header, *resume]:
                    self.sink.write({"run": self._run, **first})
                self.opened = True
            self.sink.write({"run": self._run, **record, **({"lost": self._lost} if self._lost else {})})
        except Exception as error:  # a full disk, a sink of the user's own: never a reason to stop on one rank alone
            self._lost += 1
            if self._lost & (self._lost - 1) == 0:  # 1, 2, 4, 8, ...: a week-long run has many rounds
                text = "the journal %r cannot be written: %s. Rounds lost: %d; the next one tries again"
                _log.warning(text, self.sink, error, self._lost)
        else:
            if self._lost:
                _log.warning("the journal %r is written again; rounds lost: %d", self.sink, self._lost)
            self._lost = 0
