"""A run as data: what a report needs of a journal, and of the folder that it is in, checked and typed.

A folder is as the commands of ``python -m lab`` leave it: ``run.json`` and ``curve.csv`` beside the journal. Numbers
that are missing, NaN or infinite are None here, so that later code need not check.
"""

from __future__ import annotations

import csv
import itertools
import json
import os
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, pstdev
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from hdet.checks import shown
from hdet.errors import ArgumentError, HdetError, JournalError
from hdet.events import Event as SearchEvent
from hdet.events import event_of, reason_of
from hdet.journal.reading import JournalStream, in_order, stream_journal
from hdet.report.numbers import finite
from hdet.report.thinning import Thinner

Numbers = tuple[float | None, ...]
"""One per knob, in the order of :attr:`RunData.knobs`."""
Word = Literal["up", "down", "no signal"]
_MAYBE = ("validation_loss", "rate")
"""Columns that a curve need not have."""
_DECAYS = ("exponential", "printed")
"""Of bases that have a decay of their own."""
_CAUTION = 2.0
"""Number of standard errors by which a slope must differ from 0."""
_FULL = 0.9
"""The part of a round's length from which on it is a full one: the last but one ends a step before the run does."""
_HAPPENS = ("event", "why", "excluded", "absent", "joined", "not_finite")
"""What a record has something under if anything happened in its round; most have nothing."""
_EVENTS = 500
"""Events that are listed from the beginning of a run, and as many from its end."""


class Curve(NamedTuple):
    """``curve.csv``: losses and the learning rate over steps."""

    steps: tuple[float, ...] = ()
    train: tuple[float | None, ...] = ()
    validation: tuple[float | None, ...] = ()
    rates: tuple[float | None, ...] = ()
    """The rate of each step; the mean over parameter groups."""


def _read_about(path: Path) -> dict[str, Any]:
    """``run.json``: how a run was set up and how it ended; empty if there is none."""
    if not path.exists():
        return {}
    about = json.loads(path.read_text(encoding="utf-8"))
    return {**about, "final": {key: finite(value) for key, value in (about.get("final") or {}).items()}}


def _read_curve(path: Path) -> Curve:
    """Read ``curve.csv``; empty if there is none. A last line that was cut off is left out."""
    if not path.exists():
        return Curve()
    with path.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if None not in row.values()]
    found = [(float(row["step"]), *map(_cell, (row["train_loss"], *map(row.get, _MAYBE)))) for row in rows]
    return Curve(*zip(*found, strict=True)) if found else Curve()


def _cell(text: str | None) -> float | None:
    return finite(float(text)) if text else None


class Slope(NamedTuple):
    """What a round has said about one knob. Above 0: a higher value would have been better."""

    value: float
    error: float | None

    @property
    def word(self) -> Word:
        """In which direction the knob should move. An error of 0 is that of a single round, and says nothing.

        >>> Slope(0.5, 0.1).word, Slope(-0.5, 0.3).word, Slope(-0.5, None).word
        ('up', 'no signal', 'down')
        """
        if self.error == 0.0 or abs(self.value) <= _CAUTION * (self.error or 0.0):
            return "no signal"
        return "up" if self.value > 0 else "down"


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
    """Of a search: the estimated rate of the first knob; None if there is none."""
    events: tuple[Event, ...]
    """What happened, which replicas were left out, and which ranks had a loss that is NaN or infinite."""
    rolled_back_to: int | None
    """Of a search: the step to which training was rolled back at the end of the round."""
    found: Numbers
    """Of a search: the peak rates found so far."""
    status: str | None
    """Of a search: its status, for people."""

    @property
    def loss(self) -> float | None:
        """The mean over replicas."""
        return mean(row.loss for row in self.replicas)


class RunData(NamedTuple):
    """One run. Without a journal (a plain scheduler's run, for comparison) there are no rounds."""

    name: str
    path: Path
    knobs: tuple[str, ...] = ()
    starts: Numbers = ()
    """Per knob, what is learned before the first round: a factor on the schedule, or a value."""
    replicas: int = 0
    rounds: tuple[Round, ...] = ()
    """Of a long journal those that stand out (:mod:`hdet.report.thinning`)."""
    steps: Sequence[int] = ()
    """The step after each round, of all rounds."""
    last_full: Round | None = None
    """The last round that was not cut short, was not rolled back, and has a loss."""
    phases: Mapping[str, float] = MappingProxyType({})
    """Seconds of all rounds, by phase."""
    events: tuple[Event, ...] = ()
    """What happened in all rounds. An event that is repeated in consecutive rounds counts once."""
    alarms: tuple[Event, ...] = ()
    """For people: why the found rate must not be used. Each once, at the step at which it was first raised."""
    resumes: tuple[int, ...] = ()
    """Steps at which the run was resumed from a checkpoint."""
    arguments: Mapping[str, Any] = MappingProxyType({})
    made: str = ""
    """By which version of hdet, and when."""
    final: Mapping[str, float | None] = MappingProxyType({})
    """The loss, under "loss", and metrics, at the end."""
    crashed: bool = False
    seconds: float | None = None
    curve: Curve = Curve()

    @property
    def searched(self) -> bool:
        """Whether there is one model, whose rate was searched."""
        return self.arguments.get("max_lr") == "auto"

    @property
    def decays_by_itself(self) -> bool:
        """Whether the base has its own decay in place of the schedule's (``decay="exponential"``, ``AsPrinted()``)."""
        return self.arguments.get("decay") in _DECAYS

    @property
    def total_steps(self) -> int | None:
        """The length of the schedule, if the journal has it. The base value of the step after the last is not used."""
        return self.arguments.get("total_steps")

    @property
    def rates(self) -> tuple[int, ...]:
        """Which knobs are learning rates."""
        return tuple(g for g, name in enumerate(self.knobs) if kind_of(name) == "lr")


def kind_of(knob: str) -> str:
    """A knob's name without the group: ``lr`` of ``lr[embedding]``."""
    return knob.split("[", 1)[0]


def mean(values: Iterable[float | None]) -> float | None:
    """The mean of those that are known; None if none is.

    >>> mean([1.0, None, 2.0]), mean([None])
    (1.5, None)
    """
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def load_run(path: str | os.PathLike[str]) -> RunData:
    """Read a journal file, or a run's folder: ``journal.jsonl``, and ``run.json`` and ``curve.csv`` if there are any.

    Raises:
        ArgumentError: there is nothing at ``path``.
        JournalError: what is there was not written by hdet.
    """
    path = Path(path)
    try:
        return _loaded(path)
    except HdetError:
        raise
    except (AttributeError, LookupError, TypeError, ValueError, csv.Error) as error:
        text = f"{path} has content that hdet does not write ({error!r}); give another run, or remove what is damaged"
        raise JournalError(text) from error


def _loaded(path: Path) -> RunData:
    journal = journal_in(path)
    if not path.is_dir():
        name = path.resolve().parent.name if path.name == "journal.jsonl" else path.stem
        return _run(name, path, stream_journal(path), {}, Curve())
    about = _read_about(path / "run.json")
    has_begun = journal.exists() and journal.stat().st_size > 0  # the file of a run that crashed early is empty
    if not has_begun and not about:
        raise JournalError(f"{path} has neither journal.jsonl nor run.json, so it is not a run's folder; name another")
    data = stream_journal(journal) if has_begun else JournalStream({}, iter(()), [], 0)
    name = _text(about, "name") or path.resolve().name
    return _run(name, path, data, about, _read_curve(path / "curve.csv"))


def told_apart(runs: Sequence[RunData]) -> list[RunData]:
    """Runs whose names differ: those with the same name get as much of their path as tells them apart.

    ``a/run.jsonl`` and ``b/run.jsonl`` are "a/run" and "b/run". If a path is given twice, its second run is "run (2)".
    """
    named = list(runs)
    for name in {run.name for run in runs}:
        same = [i for i, run in enumerate(runs) if run.name == name]
        if len({os.path.abspath(runs[i].path) for i in same}) > 1:
            folders = [_folders(runs[i]) for i in same]
            depths = range(1, max(map(len, folders)) + 1)
            several = len({tuple(parts) for parts in folders})
            depth = next((d for d in depths if len({tuple(parts[-d:]) for parts in folders}) == several), 0)
            for i, parts in zip(same, folders, strict=True):
                named[i] = runs[i]._replace(name="/".join([*(parts[-depth:] if depth else ()), name]))
    taken: set[str] = set()
    for i, run in enumerate(named):
        tries = (run.name if k == 1 else f"{run.name} ({k})" for k in itertools.count(1))
        named[i] = run._replace(name=next(name for name in tries if name not in taken))
        taken.add(named[i].name)
    return named


def _folders(run: RunData) -> list[str]:
    """The folders above what a run is named after, from the root on."""
    parts = [part.strip(os.sep) for part in Path(os.path.abspath(run.path)).parts]
    if not run.path.is_dir():
        parts.pop()
    return parts[:-1] if parts and parts[-1] == run.name else parts


def journal_in(path: Path) -> Path:
    """The journal's file: at a path, or in a run's folder, which need not have one."""
    if not path.exists():
        raise ArgumentError(f"a run must be a journal or a run's folder, but {path} does not exist; check the path")
    return path / "journal.jsonl" if path.is_dir() else path


def _run(name: str, path: Path, data: JournalStream, about: Mapping[str, Any], curve: Curve) -> RunData:
    header, arguments = data.header, {name: about[name] for name in ("task", "seed") if name in about}
    arguments |= header.get("arguments") or about.get("arguments") or {}
    resumes, thinner = [int(record["step"]) for record in data.resumes], Thinner(data.most)
    tally, last = _Tally(finite(arguments.get("sync_every")), resumes), {}
    for last in data.rounds:
        tally.add(last)
        thinner.add(last)
    knobs = tuple(dict.fromkeys([*(header.get("knobs") or ()), *(last.get("knobs") or ())]))
    if "total_steps" in last:  # the length of the run may have been changed
        arguments["total_steps"] = last["total_steps"]
    given = {knob: finite(one.get("base")) for knob, one in (arguments.get("knobs") or {}).items()}
    starts = tuple(given.get(knob, 1.0 if kind_of(knob) == "lr" else None) for knob in knobs)
    decays = arguments.get("decay") in _DECAYS

    def drawn(record: Mapping[str, Any]) -> Round:
        return _round(in_order(record, knobs), starts, decays)

    return RunData(
        name=name,
        path=path,
        knobs=knobs,
        starts=starts,
        replicas=header.get("replicas") or 0,
        rounds=tuple(map(drawn, thinner.kept())),
        steps=tally.steps,
        last_full=None if tally.last_full is None else drawn(tally.last_full),
        phases=tally.phases,
        events=tally.events,
        alarms=tuple(Event(step, text) for text, step in tally.alarms.items()),
        resumes=tuple(resumes),
        arguments=arguments,
        made=f"hdet {header['hdet']}, {header.get('time', '')}" if "hdet" in header else "",
        final=about.get("final", {}),
        crashed=bool(about.get("crashed")),
        seconds=finite(about.get("seconds")),
        curve=curve,
    )


class _Tally:
    """What is counted of all rounds of a journal, one after the other.

    Args:
        length: steps of a full round; None: as many as the longest round so far.
        resumes: steps at which the run was resumed: losses of the round before them may be lost.
    """

    def __init__(self, length: float | None, resumes: Sequence[int]) -> None:
        self._length, self._longest, self._resumes = length, 0, sorted(resumes)
        self.steps = array("q")
        self.last_full: Mapping[str, Any] | None = None
        self.phases: dict[str, float] = {}
        self.alarms: dict[str, int] = {}
        self._told: tuple[str, ...] = ()
        """What happened in the last round."""
        self._first_events: list[Event] = []
        self._last_events: deque[Event] = deque(maxlen=_EVENTS)
        self._happened = 0

    def add(self, record: Mapping[str, Any]) -> None:
        """The next round."""
        step = int(record["step"])
        for phase, seconds in (record.get("seconds") or {}).items():
            self.phases[phase] = self.phases.get(phase, 0.0) + (finite(seconds) or 0.0)
        self._note_events(record, step)
        begun = self.steps[-1] if self.steps else 0
        resumed = bisect_left(self._resumes, step)
        length = step - max(begun, self._resumes[resumed - 1] if resumed else 0)
        is_full = length >= _FULL * (self._length or self._longest)
        losses = (row.get("loss") for row in record.get("replicas") or ())
        if is_full and record.get("rolled_back_to") is None and any(finite(loss) is not None for loss in losses):
            self.last_full = record
        self._longest = max(self._longest, length)
        self.steps.append(step)

    def _note_events(self, record: Mapping[str, Any], step: int) -> None:
        happened = tuple(_events(record, step)) if any(map(record.get, _HAPPENS)) else ()
        told = tuple(event.text for event in happened)
        if told != self._told:
            self._happened += len(happened)
            room = _EVENTS - len(self._first_events)
            self._first_events += happened[:room]
            self._last_events += happened[room:]
        self._told = told
        if record.get("event") == SearchEvent.STOPPED:
            self.alarms.setdefault(reason_of(record).rstrip(". "), step)

    @property
    def events(self) -> tuple[Event, ...]:
        """All that happened, or so much of it that a person may read it."""
        listed = (*self._first_events, *self._last_events)
        omitted = self._happened - len(listed)
        between = (Event(self._last_events[0].step, f"{omitted} earlier events are not listed"),) if omitted else ()
        return (*self._first_events, *between, *self._last_events)


def _text(record: Mapping[str, Any], name: str) -> str | None:
    """A text that may be missing. Raises for anything else."""
    value = record.get(name)
    if not (value is None or isinstance(value, str)):
        raise ValueError(f"{name} must be a text, but is {shown(value)}")
    return value


def _round(record: Mapping[str, Any], starts: Numbers, decays: bool) -> Round:
    def per_knob(row: Mapping[str, Any], name: str) -> Numbers:
        """A round from before a group was added has fewer numbers."""
        found = [finite(value) for value in row.get(name) or ()]
        return tuple((found + [None] * len(starts))[: len(starts)])

    base, learned, shape = (per_knob(record, name) for name in ("base", "learned", "shape"))
    step, status, why = int(record["step"]), _text(record, "status"), reason_of(record)
    if not any(shape) and not decays:  # only a search has a shape
        shape = tuple(v / m if v is not None and m else None for v, m in zip(base, learned, strict=True))
    plain = tuple(
        finite(v * x) if v is not None and x is not None else None for v, x in zip(shape, starts, strict=True)
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
    signals = [row.signal for r, row in enumerate(replicas) if r not in excluded and row.signal is not None]
    unit = pstdev(signals) if signals and record.get("error") else 0.0
    pairs = zip(per_knob(record, "delta"), per_knob(record, "error"), strict=True)
    return Round(
        step=step,
        replicas=replicas,
        base_before=per_knob(record, "base_before"),
        base=base,
        learned=learned,
        plain=plain,
        slopes=tuple(None if d is None else Slope(d, None if e is None else e * unit) for d, e in pairs),
        estimated_rate=finite(record.get("estimated_rate")) or None,
        events=tuple(_events(record, step)),
        rolled_back_to=record.get("rolled_back_to"),
        found=per_knob(record, "found_rates"),
        status=f"{status} ({why})" if status and why else status,
    )


def _events(record: Mapping[str, Any], step: int) -> Iterator[Event]:
    """What happened in a round; in most of them nothing did."""
    _text(record, "why")
    if _text(record, "event") and (happened := event_of(record)):
        is_setback = record["event"] == SearchEvent.STOPPED or record.get("rolled_back_to") is not None
        yield Event(step, happened, is_setback)
    excluded, names, absent = (record.get(name) or () for name in ("excluded", "names", "absent"))
    lists = (
        ("replica {} left out", [r for r in excluded if r not in absent]),
        ("{} gone", [names[r] for r in absent]),
        ("{} joined", record.get("joined")),
        ("loss of rank {} not finite", record.get("not_finite")),
    )
    yield from (Event(step, text.format(", ".join(map(str, some)))) for text, some in lists if some)
