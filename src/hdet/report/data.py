"""A run as data: what a report needs of a journal, checked and typed.

Numbers that are missing, NaN or infinite are None here, so that later code need not check. A picture has a thousand
columns, and a journal may have a million rounds: of a long one those are kept that stand out.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, NamedTuple

from hdet.errors import ArgumentError
from hdet.files import path_of
from hdet.journal.reading import JournalStream, stream_journal
from hdet.report.numbers import finite
from hdet.rule.enums import Event as SearchEvent
from hdet.rule.enums import event_of, reason_of
from hdet.state import reading

MOST = 2000
"""Rounds that are kept of a journal that has more, roughly."""
Numbers = tuple[float | None, ...]
"""One per knob, in the order of :attr:`RunData.knobs`, unless something else is said."""
_Record = Mapping[str, Any]
_DECAYS = ("exponential", "printed")
"""What ``decay`` is in the arguments of a run whose base has a decay of its own."""
_FULL = 0.9
"""The share of a round's length from which on it is a full one: the last but one ends a step before the run does."""
_EVENTS = 500
"""Events that are listed from the beginning of a run, and as many from its end."""


class Event(NamedTuple):
    """Something that happened at a step."""

    step: int
    text: str
    is_setback: bool = False
    """Whether training was rolled back, or the search has stopped."""


class Round(NamedTuple):
    """One round, between ``base_before`` at its last step and ``base`` at ``step``, the step after it."""

    step: int
    losses: Numbers
    """Of each replica, or of the one model of a search, as are the next three."""
    signals: Numbers
    values: tuple[Numbers, ...]
    divergences: Numbers
    """Distances from the mean of the replicas, relative to its norm."""
    base_before: Numbers
    base: Numbers
    learned: Numbers
    plain: Numbers
    """``base`` if nothing had been learned."""
    slopes: Numbers
    """What the round has said about the knobs. Above 0: a higher value would have been better."""
    errors: Numbers
    """Their standard errors."""
    estimated_rate: float | None
    """The estimated rate of the first knob, if a search has one."""
    rolled_back_to: int | None
    """The step to which a search has rolled training back at the end of the round."""
    found: Numbers
    """The peak rates that a search has found so far."""

    @property
    def loss(self) -> float | None:
        """The mean over replicas."""
        return mean(self.losses)


class RunData(NamedTuple):
    """One run, as its journal tells it."""

    name: str
    path: Path
    """The journal."""
    knobs: tuple[str, ...]
    starts: Numbers
    """Per knob, what is learned before the first round: a factor on the schedule, or a value."""
    replicas: int
    rounds: tuple[Round, ...]
    """Of a long journal those that stand out."""
    length: int
    """The number of all rounds."""
    loss: float | None
    """The train loss of the last round that was not cut short, was not rolled back, and has a loss: often the last
    round of a run has a single step, whose loss says little."""
    phases: Mapping[str, float]
    """Seconds of all rounds, by phase."""
    events: tuple[Event, ...]
    """What happened in all rounds, once if it is repeated in consecutive ones, and where the run was resumed."""
    alarms: tuple[Event, ...]
    """For people: why the found rate must not be used. Each once, at the step at which it was first raised."""
    stopped: str
    """That the search has stopped, and why; empty if it has not."""
    arguments: Mapping[str, Any]
    made: str
    """By which version of hdet, and when."""

    @property
    def searched(self) -> bool:
        """Whether there is one model, whose rate was searched."""
        return "guess" in self.arguments

    @property
    def decays_by_itself(self) -> bool:
        """Whether the base has its own decay in place of the schedule's (``decay="exponential"``, ``AsPrinted()``)."""
        return self.arguments.get("decay") in _DECAYS

    @property
    def rates(self) -> tuple[int, ...]:
        """Which knobs are learning rates."""
        return tuple(g for g, name in enumerate(self.knobs) if kind_of(name) == "lr")


def kind_of(knob: str) -> str:
    """A knob's name without the group: ``lr`` of ``lr[embedding]``."""
    return knob.split("[", 1)[0]


def known(values: Iterable[float | None]) -> list[float]:
    """Those that are not None."""
    return [value for value in values if value is not None]


def mean(values: Iterable[float | None]) -> float | None:
    """The mean of those that are known; None if none is.

    >>> mean([1.0, None, 2.0]), mean([None])
    (1.5, None)
    """
    found = known(values)
    return fmean(found) if found else None


def journal_in(path: str | os.PathLike[str]) -> Path:
    """The journal at a path: a file, or ``journal.jsonl`` in a folder."""
    found = path_of(path, "journal")
    if not found.exists():
        raise ArgumentError(f"a run must be a journal or the folder of one, but {path} does not exist; check the path")
    return found / "journal.jsonl" if found.is_dir() else found


def load_run(path: str | os.PathLike[str]) -> RunData:
    """Read a journal: a file, or ``journal.jsonl`` in a folder, whose name the run then has.

    Raises:
        ArgumentError: there is nothing at ``path``, or a record of the journal is damaged.
        JournalError: what is there was not written by hdet.
    """
    journal = journal_in(path)
    with reading(f"the journal of {path}", "it is damaged: give another run, or remove that line"):
        return _run(journal, stream_journal(journal))


def told_apart(runs: Sequence[RunData]) -> list[RunData]:
    """Runs whose names differ: journals of the same name are named by as much of their paths as differs."""
    named = []
    for run in runs:
        paths = {os.path.abspath(one.path) for one in runs if one.name == run.name}
        name = run.name if len(paths) == 1 else os.path.relpath(run.path, os.path.commonpath(paths))
        named.append(run._replace(name=name))
    return named


def _run(path: Path, data: JournalStream) -> RunData:
    header, arguments = data.header, dict(data.header["arguments"])
    tally = _Tally(data.header["arguments"], [int(record["step"]) for record in data.resumes])
    records, begun = list(thinned(tally.counted(data.rounds), data.length)), header["knobs"]
    last = records[-1] if records else {}
    if "total_steps" in last:  # the length of the run may have been changed
        arguments["total_steps"] = last["total_steps"]
    given = {knob: finite(one.get("base")) for knob, one in (arguments.get("knobs") or {}).items()}
    knobs = [*begun, *(last.get("knobs") or ())]
    starts = {knob: given.get(knob, 1.0 if kind_of(knob) == "lr" else None) for knob in knobs}
    return RunData(
        name=path.resolve().parent.name if path.name == "journal.jsonl" else path.stem,
        path=path,
        knobs=tuple(starts),
        starts=tuple(starts.values()),
        replicas=header["replicas"],
        rounds=tuple(_round(record, starts, begun, arguments.get("decay") in _DECAYS) for record in records),
        length=data.length,
        loss=tally.loss,
        phases=tally.phases,
        events=tally.listed_events(),
        alarms=tuple(tally.alarms),
        stopped=f"stopped ({reason_of(last)})" if last.get("status") == "stopped" else "",
        arguments=arguments,
        made=f"hdet {header.get('hdet')}, {header.get('time')}",
    )


class _Tally:
    """What is counted of all rounds of a journal.

    Args:
        arguments: the user's, in the journal's header.
        resumes: steps at which the run was resumed: losses of the round before them may be lost.
    """

    def __init__(self, arguments: Mapping[str, Any], resumes: Sequence[int]) -> None:
        self._arguments, self._resumes = arguments, resumes
        self._events: list[Event] = []
        self.loss: float | None = None
        self.phases: Counter[str] = Counter()
        self.alarms: list[Event] = []

    def counted(self, records: Iterable[_Record]) -> Iterator[_Record]:
        """The same records, each counted when it is taken."""
        every = self._arguments.get("sync_every", 0)
        longest = min(every, self._arguments.get("total_steps") or every)  # steps of a full round, as far as is known
        begun, before = 0, list[str]()
        for record in records:
            step, events = int(record["step"]), list(_events(record))
            if (happened := [event.text for event in events]) != before:
                self._events += events
                if record.get("event") == SearchEvent.STOPPED:
                    self.alarms.append(Event(step, reason_of(record)))
            self.phases.update(record.get("seconds") or {})
            length = step - max([begun, *(resumed for resumed in self._resumes if resumed < step)])
            is_full = length >= _FULL * longest and record.get("rolled_back_to") is None
            if is_full and (loss := _loss(record)) is not None:
                self.loss = loss
            longest, begun, before = max(longest, length), step, happened
            yield record

    def listed_events(self) -> tuple[Event, ...]:
        """So many events that a person may read them."""
        events = sorted([*(Event(step, "resumed") for step in self._resumes), *self._events])
        if (omitted := len(events) - 2 * _EVENTS) > 0:
            events[_EVENTS:-_EVENTS] = [Event(events[-_EVENTS].step, f"{omitted} earlier events are not listed")]
        return tuple(events)


def _events(record: _Record) -> Iterator[Event]:
    """What happened in a round, which replicas were left out, and which ranks had a loss that is NaN or infinite."""
    step = int(record["step"])
    if happened := event_of(record):
        is_setback = record["event"] == SearchEvent.STOPPED or record.get("rolled_back_to") is not None
        yield Event(step, happened, is_setback)
    excluded, names, absent = (record.get(name) or () for name in ("excluded", "names", "absent"))
    lists = {
        "replica {} left out": [r for r in excluded if r not in absent],
        "{} gone": [names[r] for r in absent],
        "{} joined": record.get("joined"),
        "loss of rank {} not finite": record.get("not_finite"),
    }
    yield from (Event(step, text.format(", ".join(map(str, some)))) for text, some in lists.items() if some)


def thinned(records: Iterator[_Record], count: int) -> Iterator[_Record]:
    """Some of the rounds, in their order.

    Rounds are taken in stretches of equal length. Of each the first round is kept, the last, the one with the highest
    loss, and those at which something happened.

    Args:
        records: the rounds.
        count: how many there are.

    >>> rounds = ({"round": k, "replicas": [{"loss": 9.0 if k == 54321 else 1.0}]} for k in range(10**5))
    >>> kept = [record["round"] for record in thinned(rounds, 10**5)]
    >>> len(kept) <= MOST, 54321 in kept, (kept[0], kept[-1]) == (0, 99_999), kept == sorted(kept)
    (True, True, True, True)
    """
    length = math.ceil(3 * count / MOST) if count > MOST else 1
    while stretch := list(islice(records, length)):
        losses = [_loss(record) or 0.0 for record in stretch]
        kept = {0, losses.index(max(losses)), len(stretch) - 1}
        yield from (record for k, record in enumerate(stretch) if k in kept or record.get("event"))


def _loss(record: _Record) -> float | None:
    """The mean over replicas."""
    return mean(finite(row.get("loss")) for row in record.get("replicas") or ())


def _round(record: _Record, knobs: Mapping[str, float | None], begun: Sequence[str], decays: bool) -> Round:
    """A round of a journal.

    Args:
        record: the round.
        knobs: each knob of the run, and what is learned of it before the first round.
        begun: the knobs with which the run began. A round has its own if groups were added.
        decays: whether the base has its own decay.
    """
    own, rows = record.get("knobs") or begun, record.get("replicas") or ()

    def per_knob(row: _Record, name: str) -> Numbers:
        found = dict(zip(own, row.get(name) or (), strict=False))
        return tuple(finite(found.get(knob)) for knob in knobs)

    def per_replica(name: str) -> Numbers:
        return tuple(finite(row.get(name)) for row in rows)

    base, learned, shape = (per_knob(record, name) for name in ("base", "learned", "shape"))
    if not any(shape) and not decays:  # only a search has a shape
        shape = tuple(v / m if v is not None and m else None for v, m in zip(base, learned, strict=True))
    plain = (
        finite(v * x) if v is not None and x is not None else None for v, x in zip(shape, knobs.values(), strict=True)
    )
    signals = per_replica("signal")
    # The normalised controller's errors are in units of the signals' deviation in the round, its Delta is not.
    live = known(signal for r, signal in enumerate(signals) if r not in record["excluded"])
    unit = pstdev(live) if live else 0.0
    return Round(
        step=int(record["step"]),
        losses=per_replica("loss"),
        signals=signals,
        values=tuple(per_knob(row, "values") for row in rows),
        divergences=per_replica("divergence"),
        base_before=per_knob(record, "base_before"),
        base=base,
        learned=learned,
        plain=tuple(plain),
        slopes=per_knob(record, "delta"),
        errors=tuple(None if error is None else error * unit for error in per_knob(record, "error")),
        estimated_rate=finite(record.get("estimated_rate")) or None,
        rolled_back_to=record.get("rolled_back_to"),
        found=per_knob(record, "found_rates"),
    )
