"""The chronicle: when the journal's lines are written, and what happens when they cannot be."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

import torch.distributed as dist

from hdet._version import __version__
from hdet.errors import JournalError
from hdet.journal import SCHEMA, Journal, Several, Sink
from hdet.ranks.agreement import Agreement
from hdet.ranks.group import ReplicaGroup, Solo, arriving
from hdet.ranks.rank_group import RankGroup
from hdet.ranks.weights import Weights

_log = logging.getLogger("hdet")


class Clock:
    """Starts when it is made."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self.seconds: dict[str, float] = {}

    def lap(self, phase: str) -> None:
        """What has passed since the last lap belongs to ``phase``."""
        now = time.perf_counter()
        self.seconds[phase] = now - self._last
        self._last = now


def round_record(
    *,
    k: int,
    step: int,
    roll: Agreement,
    base: list[float],
    values: list[list[float]],
    multipliers: list[list[float]],
    learned: list[float],
    new_base: list[float],
    divergence: list[float],
    seconds: dict[str, float],
    weights: list[float] | None = None,
    deltas: list[float] | None = None,
    memory: Any = None,
) -> dict[str, Any]:
    """One round. Lists of knobs are in the header's order.

    ``weights``, ``deltas``, ``memory``: what the controller says and what it remembers; None without a signal.
    """
    replicas = [
        {
            "loss": loss if roll.has_losses else None,
            "signal": signal,
            "values": row,
            "multipliers": rho,
            "divergence": far,
        }
        for loss, signal, row, rho, far in zip(roll.losses, roll.signals, values, multipliers, divergence, strict=True)
    ]
    excluded = [r for r, live in enumerate(roll.live) if not live]
    return {
        "kind": "round",
        "round": k,
        "step": step,
        "replicas": replicas,
        "excluded": excluded,
        "weights": _with_zeros(weights, excluded),
        "delta": deltas,
        "velocity": getattr(memory, "velocity", None),
        "error": getattr(memory, "error", None),
        "learned": learned,
        "base_before": base,
        "base": new_base,
        "seconds": seconds,
    }


def _with_zeros(weights: list[float] | None, excluded: list[int]) -> list[float] | None:
    """The controller's weights per replica: those it did not see count nothing."""
    if weights is None:
        return None
    padded = list(weights)
    for r in excluded:
        padded.insert(r, 0.0)
    return padded


class JournalWriter:
    """Writes records to a sink; before the first of this process a header, or a record that the run goes on.

    Args:
        sink: where the journal goes, or None.
        arguments: the user's arguments, for the header.
    """

    def __init__(self, sink: Sink | None, arguments: Mapping[str, Any]) -> None:
        self.sink = sink
        self.arguments = dict(arguments)
        self._pens = [_Pen(one) for one in (sink.sinks if isinstance(sink, Several) else [sink]) if one is not None]
        self._resumed: tuple[int, bool] | None = None
        self.is_claimed = False
        self._knobs: list[str] | None = None
        """Those of the header, once there is a round; none where an earlier process may have written it."""
        self._added: dict[str, int] = {}
        """Knobs that were added since the last round, and at which step."""
        self._round_began = time.perf_counter()

    @property
    def is_kept(self) -> bool:
        """Whether this rank has a journal."""
        return self.sink is not None

    @property
    def is_resumed(self) -> bool:
        """Whether the run goes on from a checkpoint, whose values replace the arguments."""
        return self._resumed is not None

    def give_up(self) -> None:
        """Write nothing any more: somebody else does."""
        self.sink, self._pens = None, []

    def claim(self, group: ReplicaGroup, *, writes: bool) -> None:
        """Before the first round: open files for this run alone. Raise on every rank if one is taken. Collective.

        Once: further calls do nothing. A file that cannot be opened for another reason is tried again at the end of
        every round.

        Args:
            group: the ranks.
            writes: whether this rank is the one that writes.
        """
        if self.is_claimed:
            return
        self.is_claimed = True
        error = self._claimed() if writes else None
        refused = [rank for rank, (row,) in enumerate(group.gather([float(error is not None)])) if row]
        if error is not None:
            raise error
        if refused:
            raise JournalError(f"rank {refused[0]} may not write the journal, since another run does; see its message")

    def _claimed(self) -> JournalError | None:
        """The error if a file is taken."""
        for pen in self._pens:
            try:
                if isinstance(pen.sink, Journal):
                    pen.sink.claim()
            except JournalError as error:
                return error
            except OSError as error:
                _log.warning("the journal %r cannot be opened: %s. Every round tries again", pen.sink, error)
        return None

    def begin_round(self) -> None:
        """Training goes on: its seconds are counted from here."""
        self._round_began = time.perf_counter()

    def resume(self, step: int, mid_round: bool) -> None:
        """The run goes on from a checkpoint."""
        self._resumed, self._knobs = (step, mid_round), None
        for pen in self._pens:
            pen.opened = False

    def add(self, knobs: Sequence[str], step: int) -> None:
        """Knobs are there from a step on that were not there before."""
        self._added |= dict.fromkeys(knobs, step)

    def write(self, record: dict[str, Any], knobs: list[str], ended: float) -> None:
        """Write the record of a round, wherever that works: one rank alone must not stop training.

        ``ended``: when its training did, by ``time.perf_counter``.
        """
        replicas = len(record["replicas"])
        record["seconds"] = {"train": ended - self._round_began, **record["seconds"]}
        if self._knobs is None:
            self._knobs = [] if self.is_resumed else list(knobs)
        if knobs != self._knobs:
            record["knobs"] = list(knobs)
        if self._added:
            record["added"], self._added = self._added, {}
        for pen in self._pens:
            goes_on = self.is_resumed and getattr(pen.sink, "begun", False)
            opening = [] if goes_on else [_header(self.arguments, replicas, knobs)]
            if self._resumed is not None:
                opening.append(_resume(self._resumed[0], replicas, self._resumed[1]))
            pen.write(opening, record, goes_on=goes_on)

    def close(self) -> None:
        """The run has ended: others may write to its files."""
        for pen in self._pens:
            if isinstance(pen.sink, Journal):
                pen.sink.close()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, is_claimed=False)


def meet(
    rank_group: RankGroup,
    journal_writer: JournalWriter,
    t: int,
    weights: Callable[[], Weights],
    agreed: Callable[[ReplicaGroup, Agreement], None] | None = None,
) -> None:
    """The ranks see each other for the first time: whether they agree, and who writes. Collective.

    To be called where the meeting is due.

    Args:
        rank_group: the ranks.
        journal_writer: the journal of this one.
        t: the step.
        weights: this rank's, checked; asked for when it has others to compare with.
        agreed: what else is to be made ready once they are.
    """
    journal_writer.begin_round()
    if rank_group.replica_index.size == 1:
        rank_group.begin(Solo())
        if dist.get_rank() > 0:  # of several ranks that are one replica, one writes the journal
            journal_writer.give_up()
        return
    own, given = weights(), {} if journal_writer.is_resumed else journal_writer.arguments
    with arriving("the first step, where the replicas meet"):
        group, roll = rank_group.first(t, own, given, keeps_journal=journal_writer.is_kept)
        if agreed is not None:
            agreed(group, roll)
        if roll.writer is not None:
            journal_writer.claim(group, writes=roll.writer == group.rank)
    rank_group.begin(group)


class _Pen:
    """One sink, what it was told, and how much it has missed."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.opened = False
        """Whether it knows which run this is."""
        self._run = uuid.uuid4().hex[:12]
        self._lost = 0

    def write(self, opening: list[dict[str, Any]], record: Mapping[str, Any], *, goes_on: bool) -> None:
        """Write a record, and before the first one ``opening``. One that cannot be written is lost, and counted."""
        try:
            if not self.opened:
                self._run = getattr(self.sink, "run", None) or self._run if goes_on else self._run
                for first in opening:
                    self.sink.write({"run": self._run, **first})
                self.opened = True
            missing = {"lost": self._lost} if self._lost else {}
            self.sink.write({"run": self._run, **record, **missing})
        except Exception as error:  # a full disk, a sink of the user's own: never a reason to stop on one rank alone
            self._lost += 1
            if self._lost & (self._lost - 1) == 0:  # 1, 2, 4, 8, ...: a week-long run has many rounds
                text = "the journal %r cannot be written: %s. Rounds lost: %d; the next one tries again"
                _log.warning(text, self.sink, error, self._lost)
        else:
            if self._lost:
                _log.warning("the journal %r is written again; rounds lost: %d", self.sink, self._lost)
            self._lost = 0


def _header(arguments: Mapping[str, Any], replicas: int, knobs: list[str]) -> dict[str, Any]:
    """The first line: how the run was set up."""
    return {
        "kind": "header",
        "schema": SCHEMA,
        "hdet": __version__,
        "time": _now(),
        "replicas": replicas,
        "knobs": knobs,
        "arguments": dict(arguments),
    }


def _resume(step: int, replicas: int, mid_round: bool) -> dict[str, Any]:
    """The run goes on from a checkpoint. ``mid_round``: the round's earlier losses are lost."""
    return {"kind": "resume", "time": _now(), "step": step, "replicas": replicas, "mid_round": mid_round}


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
