"""The journal: what happened, one JSON line per round.

A journal file is a header line, then one line per round, and a line for every resume. Lines are appended and flushed,
so a run that dies leaves a readable file; of a round that is written again after a resume, the last line is read.

Numbers that JSON does not know are written as the strings "NaN", "Infinity" and "-Infinity".

An experiment tracker (TensorBoard, W&B, MLflow) can take a round's main numbers, beside the file or in its place.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TextIO, TypeAlias, Union, runtime_checkable

from hdet.errors import ArgumentError, JournalError
from hdet.journal_fields import check_fields

__all__ = ["SCHEMA", "Journal", "JournalData", "Journals", "Sink", "open_journal", "read_journal", "scalars"]

_log = logging.getLogger("hdet")

SCHEMA = 1
"""Version of the schema, in every header."""
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@runtime_checkable
class Sink(Protocol):
    """Anything that takes records: a :class:`Journal`, or an adapter to an experiment tracker."""

    def write(self, record: Mapping[str, Any]) -> None:
        """Take one record: a dict with "kind" one of "header", "round", "resume"."""


class Journal:
    """A journal file. Opened at the first write, appended to, flushed after every line; never pickled open."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if self.path.is_dir():
            raise ArgumentError(f"journal must be the path of a file, but {self.path} is a folder; name a file in it")
        self._file: TextIO | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Journal) and self.path == other.path

    __hash__ = None  # type: ignore[assignment]  # equal by value and, like a list, not meant as a key

    def __repr__(self) -> str:
        return f"Journal({str(self.path)!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "_file": None}

    @property
    def begun(self) -> bool:
        """Whether the file has content already, so that a resumed run goes on in it."""
        return self.path.exists() and self.path.stat().st_size > 0

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one line."""
        if self._file is None:
            self._file = _open_for_append(self.path)
        self._file.write(json.dumps(_encode(record), allow_nan=False, separators=(",", ":")) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file. A later write opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None


@runtime_checkable
class ScalarWriter(Protocol):
    """TensorBoard's SummaryWriter, or what looks like one."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int, /) -> object:
        """Take one number."""


@runtime_checkable
class MetricsLogger(Protocol):
    """The module ``mlflow``, or a logger of Lightning."""

    def log_metrics(self, metrics: dict[str, float], /, *, step: int) -> object:
        """Take a step's numbers."""


@runtime_checkable
class DictLogger(Protocol):
    """A W&B run, or anything of your own."""

    def log(self, data: dict[str, float], /, *, step: int) -> object:
        """Take a step's numbers."""


@dataclass
class Tracked:
    """A sink that passes each round's scalars on to an experiment tracker, which it neither opened nor closes."""

    tracker: ScalarWriter | MetricsLogger | DictLogger
    _knobs: Sequence[str] = field(default=(), init=False, repr=False, compare=False)

    def write(self, record: Mapping[str, Any]) -> None:
        """Pass on what a round says; of the other records only the knobs' names are kept."""
        if record["kind"] == "header":
            self._knobs = record.get("knobs", ())
        if record["kind"] != "round":
            return
        values, step = scalars(record, self._knobs), int(record["step"])
        if isinstance(self.tracker, ScalarWriter):
            for tag, value in values.items():
                self.tracker.add_scalar(tag, value, step)
        elif isinstance(self.tracker, MetricsLogger):
            self.tracker.log_metrics({_without_brackets(tag): value for tag, value in values.items()}, step=step)
        else:
            self.tracker.log(values, step=step)


@dataclass
class Several:
    """Several sinks as one. One that fails is given up with a warning; the last one's error is the caller's."""

    sinks: list[Sink]
    _header: Mapping[str, Any] | None = field(default=None, init=False, repr=False, compare=False)

    def write(self, record: Mapping[str, Any]) -> None:
        """Pass a record on. A header waits for the record after it: a file that a resumed run goes on in has one."""
        if record["kind"] == "header":
            self._header = record
            return
        header, self._header = self._header, None
        for sink in list(self.sinks):
            try:
                goes_on = record["kind"] == "resume" and getattr(sink, "begun", False)
                if header is not None and not goes_on:
                    sink.write(header)
                sink.write(record)
            except Exception as error:
                if len(self.sinks) == 1:
                    raise
                _log.warning("the journal %r cannot be written and is given up: %s", sink, error)
                self.sinks = [other for other in self.sinks if other is not sink]


OneJournal: TypeAlias = Union[str, "os.PathLike[str]", Sink, ScalarWriter, MetricsLogger, DictLogger, None]
Journals: TypeAlias = Union[OneJournal, "list[OneJournal]", "tuple[OneJournal, ...]"]
"""What ``journal=`` may be."""


@dataclass(frozen=True)
class JournalData:
    """One run, as read from a journal."""

    header: dict[str, Any]
    rounds: list[dict[str, Any]] = field(default_factory=list)
    """In the order of their round numbers; the last line of a round wins."""
    resumes: list[dict[str, Any]] = field(default_factory=list)


def open_journal(journal: Journals) -> Sink | None:
    """What the ``journal=`` argument means: a path, a sink, a tracker, or several of them in a list."""
    if journal is None or isinstance(journal, Sink):
        return journal
    if isinstance(journal, (str, os.PathLike)):
        return Journal(journal)
    if isinstance(journal, (list, tuple)):
        sinks = [sink for sink in map(open_journal, journal) if sink is not None]
        return Several(sinks) if len(sinks) > 1 else sinks[0] if sinks else None
    text = isinstance(journal, (logging.Logger, logging.LoggerAdapter))  # their log() means something else
    if not text and isinstance(journal, (ScalarWriter, MetricsLogger, DictLogger)):
        return Tracked(journal)
    raise ArgumentError(
        "journal must be a path, an object with write(record), add_scalar(tag, value, step), log(dict, step=) or "
        f'log_metrics(dict, step=), a list of these, or None, but got {journal!r}; for instance journal="run.jsonl"'
    )


def scalars(record: Mapping[str, Any], knobs: Sequence[str] = ()) -> dict[str, float]:
    """A round's main numbers, by tag. What is missing or not finite has no entry.

    >>> scalars({"base": [0.1], "delta": None, "replicas": [{"loss": 1.0}, {"loss": 3.0}]}, ["lr[0]"])
    {'hdet/base/lr[0]': 0.1, 'hdet/loss/mean': 2.0, 'hdet/loss/min': 1.0, 'hdet/loss/max': 3.0}
    """
    names = [*knobs, *(f"knob[{g}]" for g in range(len(knobs), len(record.get("base") or ())))]
    found = {f"hdet/base/{name}": value for name, value in zip(names, record.get("base") or (), strict=False)}
    found |= {f"hdet/slope/{name}": value for name, value in zip(names, record.get("delta") or (), strict=False)}
    found |= {"hdet/reach": record.get("reach") or None}
    summaries: dict[str, Callable[[list[float]], float]] = {"mean": _mean, "min": min, "max": max}
    for what in ("loss", "divergence"):
        values = [row[what] for row in record.get("replicas", ()) if _is_finite(row.get(what))]
        if values:
            found |= {f"hdet/{what}/{name}": summary(values) for name, summary in summaries.items()}
    return {tag: float(value) for tag, value in found.items() if _is_finite(value)}


def read_journal(path: str | os.PathLike[str]) -> JournalData:
    """The last run in a journal file. A last line that was cut off is left out."""
    records = _records(Path(path))
    starts = [i for i, record in enumerate(records) if record["kind"] == "header"]
    if not starts:
        raise JournalError(f"{path} is no journal: it has no header line; give a file written by journal=")
    header = records[starts[-1]]
    if header.get("schema") != SCHEMA:
        raise JournalError(
            f"{path} has journal schema {header.get('schema')!r}, this hdet reads {SCHEMA}; use the hdet that wrote it"
        )
    run = records[starts[-1] + 1 :]
    rounds = {record["round"]: record for record in run if record["kind"] == "round"}
    resumes = [record for record in run if record["kind"] == "resume"]
    return JournalData(header, [rounds[k] for k in sorted(rounds)], resumes)


def _records(path: Path) -> list[dict[str, Any]]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise JournalError(
            f"{path} is no journal: it is not text ({error}); give a file written by journal="
        ) from error
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            if line.strip():
                records.append(_record(line))
        except ValueError as error:
            no_json = isinstance(error, json.JSONDecodeError)
            if not (no_json and _was_cut_off(lines, number)):
                found = "is not JSON" if no_json else "is no record"
                raise JournalError(
                    f"{path}, line {number} {found} ({error}); remove that line, or give a file written by journal="
                ) from error
    return records


def _record(line: str) -> dict[str, Any]:
    """One line, decoded. Raises ValueError for one that no journal has."""
    record = _decode(json.loads(line))
    if not isinstance(record, dict) or "kind" not in record or (record["kind"] == "round" and "round" not in record):
        raise ValueError("it must be an object with a kind, and a round's with its number")
    check_fields(record)
    return record


def _was_cut_off(lines: list[str], number: int) -> bool:
    """Whether line ``number`` may be what a killed run left: the last line, or the one before a resumed run went on."""
    following = next((line for line in lines[number:] if line.strip()), None)
    return following is None or any(f'"kind":"{kind}"' in following for kind in ("header", "resume"))


def _open_for_append(path: Path) -> TextIO:
    """Open at the end; a line that was cut off is ended first, so that it cannot swallow the next one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        if file.tell() > 0:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
    return path.open("a", encoding="utf-8")


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def _is_finite(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _without_brackets(tag: str) -> str:
    """``lr.0`` for ``lr[0]``: MLflow refuses brackets, and whatever else is no letter, digit or one of ``_-. :/``."""
    return re.sub(r"[^\w\-. :/]", "_", tag.replace("[", ".").replace("]", ""))


def _encode(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {key: _encode(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_encode(item) for item in value]
    return value


def _decode(value: Any) -> Any:
    if isinstance(value, str):
        return _NON_FINITE.get(value, value)
    if isinstance(value, dict):
        return {key: _decode(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_decode(item) for item in value]
    return value
