"""A run as data: what a report needs of a journal, and of the folder it lies in, checked and typed.

A folder is as ``python -m lab train`` leaves it: ``run.json`` and ``curve.csv`` beside the journal. Numbers that are
missing, NaN or infinite are None here, so that later code need not check.
"""

from __future__ import annotations

import csv
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, get_args

from hdet.errors import ArgumentError, JournalError
from hdet.journal import JournalData, read_journal
from hdet.journal.reading import in_order
from hdet.report.numbers import finite

_NOTHING: Mapping[str, Any] = MappingProxyType({})

Numbers = tuple[float | None, ...]
"""One per knob, in the order of :attr:`RunData.knobs`."""
Word = Literal["up", "down", "no signal"]
WORDS: tuple[Word, ...] = get_args(Word)
_MOST = 5000
"""Rounds that are kept of a run: several times what a figure can show."""
_CAUTION = 2.0
"""Standard errors that a slope must be away from 0."""


class Summary(NamedTuple):
    """``run.json``: how a run was set up and how it ended. All of it may be unknown."""

    name: str = ""
    task: str = ""
    arguments: Mapping[str, Any] = _NOTHING
    final: Mapping[str, float | None] = _NOTHING
    """The loss, under "loss", and metrics, at the end."""
    crashed: bool = False
    seconds: float | None = None
    seed: int | None = None


class Curve(NamedTuple):
    """``curve.csv``: losses and the learning rate over steps."""

    steps: tuple[float, ...] = ()
    train: tuple[float | None, ...] = ()
    validation: tuple[float | None, ...] = ()
    rates: tuple[float | None, ...] = ()
    """That each step was made with; the mean over parameter groups."""


def read_summary(path: Path) -> Summary | None:
    """Read ``run.json``; None where there is none."""
    if not path.exists():
        return None
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise JournalError(f"{path} is not JSON ({error}); remove it, or run again") from error
    if not isinstance(record, dict):
        raise JournalError(f"{path} must hold one JSON object, but holds a {type(record).__name__}; remove it")
    seed = finite(record.get("seed"))
    return Summary(
        name=str(record.get("name") or ""),
        task=str(record.get("task") or ""),
        arguments=_mapping(record.get("arguments")),
        final={str(key): finite(value) for key, value in _mapping(record.get("final")).items()},
        crashed=bool(record.get("crashed")),
        seconds=finite(record.get("seconds")),
        seed=None if seed is None else int(seed),
    )


def read_curve(path: Path) -> Curve:
    """Read ``curve.csv``; empty where there is none. A last line that was cut off is left out."""
    if not path.exists():
        return Curve()
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.reader(file))
    except (UnicodeDecodeError, csv.Error) as error:
        raise JournalError(f"{path} is not a table of text ({error}); remove it, or run again") from error
    head = rows[0] if rows else []
    if "step" not in head or "train_loss" not in head:
        raise JournalError(
            f"{path} must have the columns step, train_loss and validation_loss, but begins with {head}; remove it"
        )
    names = ("step", "train_loss", "validation_loss", "rate")
    places = [head.index(name) if name in head else -1 for name in names]
    found = [[_cell(row, place) for place in places] for row in rows[1:] if len(row) == len(head)]
    points = [(step, *rest) for step, *rest in found if step is not None]
    return Curve(*zip(*points, strict=True)) if points else Curve()


def _cell(row: Sequence[str], place: int) -> float | None:
    try:
        return finite(float(row[place])) if place >= 0 else None
    except ValueError:  # empty, or cut off
        return None


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else _NOTHING


class Slope(NamedTuple):
    """What a round said about one knob. Above 0: a higher value would have been better."""

    value: float
    error: float | None

    @property
    def word(self) -> Word:
        """What this round says. An error of 0 is that of a single round: nothing is known about it.

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


class Round(NamedTuple):
    """One round, between ``base_before`` at its last step and ``base`` at ``step``, the step after it."""

    number: int
    step: int
    replicas: tuple[Replica, ...]
    excluded: tuple[int, ...]
    base_before: Numbers
    base: Numbers
    learned: Numbers
    plain_before: Numbers
    """What ``base_before`` would be if nothing had been learned."""
    plain: Numbers
    """The same of ``base``."""
    slopes: tuple[Slope | None, ...]
    reach: float | None
    """Of a search: the rate that the gradients asked for, of the first knob; None where they asked for nothing."""
    seconds: Mapping[str, float]
    event: str | None
    alarm: str | None
    """In words: what makes the found rate worthless."""
    not_finite: tuple[int, ...] = ()
    """Of a search: ranks whose loss was NaN or infinite, or missing."""
    rolled_back_to: int | None = None
    """Of a search: the step whose weights were put back at the end of the round."""
    found: Numbers = ()
    """Of a search: the peak rates that were found so far; None in journals of earlier versions."""
    status: str | None = None
    """Of a search: where it stood, in words; None in journals of earlier versions."""


@dataclass(frozen=True)
class RunData:
    """One run. Without a journal (a plain scheduler's run, for comparison) there are no rounds."""

    name: str
    path: Path
    knobs: tuple[str, ...] = ()
    starts: Numbers = ()
    """Per knob: what is learned before the first round, a factor on the schedule or a value."""
    replicas: int = 0
    rounds: tuple[Round, ...] = ()
    """Of a very long run evenly spaced ones, and those in which something happened; each has the seconds of those that
    were left out before it."""
    number_of_rounds: int = 0
    """In the journal."""
    resumes: tuple[int, ...] = ()
    """Steps at which the run went on from a checkpoint."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    made: str = ""
    """By which hdet, and when."""
    summary: Summary = field(default_factory=Summary)
    curve: Curve = field(default_factory=Curve)

    @property
    def searched(self) -> bool:
        """Whether there is one model, whose rate was searched. Earlier journals call it a probed fan-out."""
        return self.arguments.get("max_lr") == "auto" or self.arguments.get("fanout") == "probed"

    @property
    def decays_by_itself(self) -> bool:
        """Whether the base has its own decay in place of the schedule's (``decay="exponential"``)."""
        return self.arguments.get("decay") == "exponential"

    @property
    def total_steps(self) -> int | None:
        """Where the schedule ends, if the journal says it. What it gives for the step after is not used."""
        total = finite(self.arguments.get("total_steps"))
        return None if total is None else int(total)

    @property
    def rates(self) -> tuple[int, ...]:
        """Which knobs are learning rates."""
        return tuple(g for g, name in enumerate(self.knobs) if kind_of(name) == "lr")


def kind_of(knob: str) -> str:
    """A knob's name without the group: ``lr`` of ``lr[embedding]``."""
    return knob.split("[", 1)[0]


def load_run(path: str | os.PathLike[str]) -> RunData:
    """Read a journal file, or a run's folder: ``journal.jsonl``, and ``run.json`` and ``curve.csv`` if there are any.

    Raises:
        ArgumentError: there is nothing at ``path``.
        JournalError: what is there was not written by hdet.
    """
    path = Path(path)
    journal = journal_in(path)
    if not path.is_dir():
        name = path.resolve().parent.name if path.name == "journal.jsonl" else path.stem
        return _run(name, path, read_journal(path), Summary(), Curve())
    summary = read_summary(path / "run.json")
    begun = journal.exists() and journal.stat().st_size > 0  # the file of a run that crashed early is empty
    if not begun and summary is None:
        raise JournalError(f"{path} is no run's folder: it has neither journal.jsonl nor run.json; name another")
    summary = summary or Summary()
    data = read_journal(journal) if begun else JournalData({})
    return _run(summary.name or path.resolve().name, path, data, summary, read_curve(path / "curve.csv"))


def journal_in(path: Path) -> Path:
    """The journal's file: at a path, or in a run's folder, where there may be none."""
    if not path.exists():
        raise ArgumentError(f"a run must be a journal or a run's folder, but {path} does not exist; check the path")
    return path / "journal.jsonl" if path.is_dir() else path


def _run(name: str, path: Path, data: JournalData, summary: Summary, curve: Curve) -> RunData:
    try:
        header, knobs = data.header, _knobs(data)
        arguments = header.get("arguments") or summary.arguments
        last = data.rounds[-1] if data.rounds else {}
        if "total_steps" in last:  # the run may have got another length
            arguments = {**arguments, "total_steps": last["total_steps"]}
        starts = _starts(arguments, knobs)
        decays = arguments.get("decay") == "exponential"
        return RunData(
            name=name,
            path=path,
            knobs=knobs,
            starts=starts,
            replicas=int(header.get("replicas") or 0),
            rounds=tuple(_rounds(data, knobs, starts, decays)),
            number_of_rounds=len(data.rounds),
            resumes=tuple(int(record["step"]) for record in data.resumes),
            arguments=arguments,
            made=f"hdet {header['hdet']}, {header.get('time', '')}" if "hdet" in header else "",
            summary=summary,
            curve=curve,
        )
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise JournalError(
            f"{path} has lines that hdet does not write ({error}); give a file written by journal="
        ) from error


def _knobs(data: JournalData) -> tuple[str, ...]:
    """The header's names, and those of groups that were added later: the last round has them all.

    Journals of earlier versions have no names for the latter.
    """
    names, last = [str(name) for name in data.header.get("knobs") or ()], data.rounds[-1] if data.rounds else {}
    own = last.get("knobs") or [*names, *(f"lr[{g}]" for g in range(len(names), len(last.get("base") or ())))]
    return tuple(dict.fromkeys([*names, *own]))


def _starts(arguments: Mapping[str, Any], knobs: Sequence[str]) -> Numbers:
    """What was learned of each knob before the first round: the header says it, or it is a factor of 1 on a rate."""
    described = arguments.get("knobs")
    described = described if isinstance(described, Mapping) else {}
    first = [finite((described.get(name) or {}).get("base")) for name in knobs]
    default = [1.0 if kind_of(name) == "lr" else None for name in knobs]
    return tuple(own if own is not None else other for own, other in zip(first, default, strict=True))


def _rounds(run: JournalData, knobs: Sequence[str], starts: Numbers, decays: bool) -> Iterator[Round]:
    """In order: what was learned before a round stands in the round before it, unless the run went back between."""
    step, learned, every = 0, starts, math.ceil(len(run.rounds) / _MOST)
    passed: dict[str, float] = {}
    for number, record in enumerate(run.rounds, start=1):
        found = _round(in_order(record, knobs), len(starts), starts, decays)
        passed = _added(passed, found.seconds)
        is_told = found.event or found.alarm or found.excluded or found.not_finite
        if is_told or number % every == 0 or number == len(run.rounds):
            climbs = record.get("shape") is not None  # the base has a course of its own between the rounds
            follows = found.step > step and found.event is None and not decays and not climbs
            plain = _scaled(found.base_before, learned, starts) if follows else found.plain_before
            yield found._replace(plain_before=plain, seconds=passed)
            passed = {}
        step, learned = found.step, found.learned


def _added(some: Mapping[str, float], more: Mapping[str, float]) -> dict[str, float]:
    return {phase: some.get(phase, 0.0) + more.get(phase, 0.0) for phase in {**some, **more}}


def _round(record: Mapping[str, Any], knobs: int, starts: Numbers, decays: bool) -> Round:
    replicas = tuple(_replica(row, knobs) for row in record.get("replicas") or ())
    excluded = tuple(int(r) for r in record.get("excluded") or ())
    base, learned = _numbers(record.get("base"), knobs), _numbers(record.get("learned"), knobs)
    none: Numbers = (None,) * knobs
    plain = none if decays else _scaled(base, learned, starts)
    if record.get("shape") is not None:
        plain = _scaled(_numbers(record["shape"], knobs), (1.0,) * knobs, starts)
    return Round(
        number=int(record["round"]),
        step=_step_of(record),
        replicas=replicas,
        excluded=excluded,
        base_before=_numbers(record.get("base_before"), knobs),
        base=base,
        learned=learned,
        plain_before=none,
        plain=plain,
        slopes=_slopes(record, knobs, [row.signal for r, row in enumerate(replicas) if r not in excluded]),
        reach=finite(record.get("reach")) or None,
        seconds={str(name): finite(value) or 0.0 for name, value in (record.get("seconds") or {}).items()},
        event=str(record["event"]) if record.get("event") else None,
        alarm=str(record["alarm"]) if record.get("alarm") else None,
        not_finite=tuple(int(rank) for rank in record.get("not_finite") or ()),
        rolled_back_to=None if record.get("went_back_to") is None else int(record["went_back_to"]),
        found=_numbers(record.get("found_rates"), knobs),
        status=_standing(record),
    )


def _standing(record: Mapping[str, Any]) -> str | None:
    status, why = record.get("status"), record.get("why")
    return f"{status} ({why})" if status and why else status


def _step_of(record: Mapping[str, Any]) -> int:
    if record.get("step") is None:
        raise ValueError(f"round {record['round']} has no 'step'")
    return int(record["step"])


def _replica(row: Mapping[str, Any], knobs: int) -> Replica:
    loss = finite(row.get("loss"))
    signal = finite(row.get("signal", row.get("loss")))
    return Replica(loss, signal, _numbers(row.get("values"), knobs), finite(row.get("divergence")))


def _slopes(record: Mapping[str, Any], knobs: int, signals: Sequence[float | None]) -> tuple[Slope | None, ...]:
    """Delta and its error.

    The normalised controller's errors are in units of the signals' deviation in the round, its Delta is not.
    """
    unit = _deviation([s for s in signals if s is not None])
    deltas, errors = _numbers(record.get("delta"), knobs), _numbers(record.get("error"), knobs)
    return tuple(
        None if d is None else Slope(d, None if e is None else e * unit) for d, e in zip(deltas, errors, strict=True)
    )


def _numbers(values: Sequence[Any] | None, knobs: int) -> Numbers:
    """One per knob; a round from before a group was added has fewer."""
    found = [finite(value) for value in values or ()]
    return tuple((found + [None] * knobs)[:knobs])


def _scaled(values: Numbers, by: Numbers, to: Numbers) -> Numbers:
    """Values at what was learned, brought to what was learned at first."""
    rows = zip(values, by, to, strict=True)
    return tuple(None if v is None or not b or t is None else finite(v / b * t) for v, b, t in rows)


def _deviation(values: Sequence[float]) -> float:
    mean = math.fsum(values) / len(values) if values else 0.0
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / len(values)) if values else 0.0
