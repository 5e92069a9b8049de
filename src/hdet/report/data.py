"""A run as data: what a report needs of a journal, checked and typed.

Numbers that are missing, NaN or infinite are None here, so that later code need not check. A picture has a thousand
columns, and a journal may have a million rounds: of a long one those are kept that stand out.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, NamedTuple

from hdet.errors import ArgumentError, JournalError
from hdet.journal.reading import JournalStream, stream_journal
from hdet.report.numbers import finite
from hdet.rule.enums import Event as SearchEvent
from hdet.rule.enums import event_of, reason_of

MOST = 2000
"""Rounds that are kept of a journal that has more, roughly."""
Numbers = tuple[float | None, ...]
"""One per knob, in the order of :attr:`RunData.knobs`."""
_Record = Mapping[str, Any]
_DECAYS = ("exponential", "printed")
"""What ``decay`` is in the arguments of a run whose base has a decay of its own."""
_FULL = 0.9
"""The share of a round's length from which on it is a full one: the last but one ends a step before the run does."""
_EVENTS = 500
"""Events that are listed from the beginning of a run, and as many from its end."""


class Slope(NamedTuple):
    """What a round has said about one knob. Above 0: a higher value would have been better."""

    value: float
    error: float | None


class Replica(NamedTuple):
    """One replica, or the one model of a search, in one round."""

    loss: float | None
    signal: float | None
    values: Numbers
    divergence: float | None
    """Distance from the mean of the replicas, relative to its norm."""


class Event(NamedTuple):
    """Something that happened at a step."""

    step: int
    text: str
    is_setback: bool = False
    """Whether training was rolled back, or the search has stopped."""


class Round(NamedTuple):
    """One round, between ``base_before`` at its last step and ``base`` at ``step``, the step after it."""

    step: int
    replicas: tuple[Replica, ...]
    base_before: Numbers
    base: Numbers
    learned: Numbers
    plain: Numbers
    """``base`` if nothing had been learned."""
    slopes: tuple[Slope | None, ...]
    estimated_rate: float | None
    """The estimated rate of the first knob, if a search has one."""
    rolled_back_to: int | None
    """The step to which a search has rolled training back at the end of the round."""
    found: Numbers
    """The peak rates that a search has found so far."""

    @property
    def loss(self) -> float | None:
        """The mean over replicas."""
        return mean(row.loss for row in self.replicas)


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
        return self.arguments.get("max_lr") == "auto"

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


def journal_in(path: Path) -> Path:
    """The journal at a path: a file, or ``journal.jsonl`` in a folder."""
    if not path.exists():
        raise ArgumentError(f"a run must be a journal or the folder of one, but {path} does not exist; check the path")
    return path / "journal.jsonl" if path.is_dir() else path


def load_run(path: str | os.PathLike[str]) -> RunData:
    """Read a journal: a file, or ``journal.jsonl`` in a folder, whose name the run then has.

    Raises:
        ArgumentError: there is nothing at ``path``.
        JournalError: what is there was not written by hdet.
    """
    journal = journal_in(Path(path))
    data = stream_journal(journal)
    try:
        return _run(journal, data)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        text = f"{path} has content that hdet does not write ({error!r}); give another run, or remove what is damaged"
        raise JournalError(text) from error


def told_apart(runs: Sequence[RunData]) -> list[RunData]:
    """Runs whose names differ: journals of the same name are named by as much of their paths as differs."""
    named = []
    for run in runs:
        paths = {os.path.abspath(one.path) for one in runs if one.name == run.name}
        name = run.name if len(paths) == 1 else os.path.relpath(run.path, os.path.commonpath(paths))
        named.append(run._replace(name=name))
    return named


def _run(path: Path, data: JournalStream) -> RunData:
    header, tally = data.header, _Tally(data.header, [int(record["step"]) for record in data.resumes])
    begun = header.get("knobs") or ()
    records = list(thinned(tally.counted(data.rounds), data.length))
    last, arguments = records[-1] if records else {}, dict(header.get("arguments") or {})
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
        replicas=header.get("replicas") or 0,
        rounds=tuple(_round(record, starts, begun, arguments.get("decay") in _DECAYS) for record in records),
        length=data.length,
        loss=tally.loss,
        phases=tally.phases,
        events=tally.listed_events(),
        alarms=tuple(Event(step, text) for text, step in tally.alarms.items()),
        stopped=f"stopped ({reason_of(last)})" if last.get("status") == "stopped" else "",
        arguments=arguments,
        made=f"hdet {header.get('hdet')}, {header.get('time')}",
    )


class _Tally:
    """What is counted of all rounds of a journal.

    Args:
        header: the journal's.
        resumes: steps at which the run was resumed: losses of the round before them may be lost.
    """

    def __init__(self, header: _Record, resumes: Sequence[int]) -> None:
        arguments = header.get("arguments") or {}
        lengths = [length for name in ("sync_every", "total_steps") if (length := finite(arguments.get(name)))]
        self._length, self._resumes = min(lengths) if "sync_every" in arguments and lengths else None, resumes
        """Steps of a full round, if the header has it: a run may be shorter."""
        self._longest = self._begun = 0
        self._happened: list[str] = []
        """What happened in the last round."""
        self._events: list[Event] = []
        self.loss: float | None = None
        self.phases: dict[str, float] = {}
        self.alarms: dict[str, int] = {}

    def counted(self, records: Iterable[_Record]) -> Iterator[_Record]:
        """The same records, each counted when it is taken."""
        for record in records:
            self._count(record, int(record["step"]))
            yield record

    def _count(self, record: _Record, step: int) -> None:
        for phase, seconds in (record.get("seconds") or {}).items():
            self.phases[phase] = self.phases.get(phase, 0.0) + (finite(seconds) or 0.0)
        events = list(_events(record, step))
        if (happened := [event.text for event in events]) != self._happened:
            self._events += events
        self._happened = happened
        if record.get("event") == SearchEvent.STOPPED:
            self.alarms.setdefault(reason_of(record).rstrip(". "), step)
        length = step - max([self._begun, *(resumed for resumed in self._resumes if resumed < step)])
        is_full = length >= _FULL * (self._length or self._longest)
        if is_full and record.get("rolled_back_to") is None and (loss := _loss(record)) is not None:
            self.loss = loss
        self._longest, self._begun = max(self._longest, length), step

    def listed_events(self) -> tuple[Event, ...]:
        """So many events that a person may read them."""
        events = sorted([*(Event(step, "resumed") for step in self._resumes), *self._events])
        if (omitted := len(events) - 2 * _EVENTS) > 0:
            events[_EVENTS:-_EVENTS] = [Event(events[-_EVENTS].step, f"{omitted} earlier events are not listed")]
        return tuple(events)


def _events(record: _Record, step: int) -> Iterator[Event]:
    """What happened in a round, which replicas were left out, and which ranks had a loss that is NaN or infinite."""
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
    own = record.get("knobs") or begun

    def per_knob(row: _Record, name: str) -> Numbers:
        found = dict(zip(own, row.get(name) or (), strict=False))
        return tuple(finite(found.get(knob)) for knob in knobs)

    base, learned, shape = (per_knob(record, name) for name in ("base", "learned", "shape"))
    if not any(shape) and not decays:  # only a search has a shape
        shape = tuple(v / m if v is not None and m else None for v, m in zip(base, learned, strict=True))
    plain = (
        finite(v * x) if v is not None and x is not None else None for v, x in zip(shape, knobs.values(), strict=True)
    )
    replicas = tuple(
        Replica(
            loss=finite(row.get("loss")),
            signal=finite(row.get("signal")),
            values=per_knob(row, "values"),
            divergence=finite(row.get("divergence")),
        )
        for row in record.get("replicas") or ()
    )
    # The normalised controller's errors are in units of the signals' deviation in the round, its Delta is not.
    excluded = record.get("excluded") or ()
    signals = known(row.signal for r, row in enumerate(replicas) if r not in excluded)
    unit = pstdev(signals) if signals and record.get("error") else 0.0
    pairs = zip(per_knob(record, "delta"), per_knob(record, "error"), strict=True)
    return Round(
        step=int(record["step"]),
        replicas=replicas,
        base_before=per_knob(record, "base_before"),
        base=base,
        learned=learned,
        plain=tuple(plain),
        slopes=tuple(None if d is None else Slope(d, None if e is None else e * unit) for d, e in pairs),
        estimated_rate=finite(record.get("estimated_rate")) or None,
        rolled_back_to=record.get("rolled_back_to"),
        found=per_knob(record, "found_rates"),
    )
