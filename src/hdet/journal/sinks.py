"""Where the records of a journal go: a file, an object of the user's own, or an experiment tracker.

A *sink* is anything with ``write(record)``. Trackers are wrapped, so that they are sinks too.
"""

from __future__ import annotations

import inspect
import io
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Protocol, TypeAlias, Union, runtime_checkable

from hdet.checks import is_finite, shown
from hdet.errors import ArgumentError
from hdet.journal.file import Journal
from hdet.rule.enums import event_of


@runtime_checkable
class Sink(Protocol):
    """Anything that takes records: a :class:`Journal`, or an adapter to an experiment tracker."""

    def write(self, record: Mapping[str, Any]) -> None:
        """Take one record: a dict with "kind" one of "header", "round", "resume"."""


class ScalarWriter(Protocol):
    """TensorBoard's SummaryWriter, or what looks like one."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int, /) -> object:
        """Take one number."""


class MetricsLogger(Protocol):
    """The module ``mlflow``, or a logger of a framework."""

    def log_metrics(self, metrics: dict[str, float], /, *, step: int) -> object:
        """Take a step's numbers."""


class DictLogger(Protocol):
    """A W&B run, or anything of your own."""

    def log(self, data: dict[str, float], /, *, step: int) -> object:
        """Take a step's numbers."""


@dataclass
class Tracked:
    """A sink that logs each round's main numbers to an experiment tracker, which it neither opens nor closes."""

    tracker: Any
    _knobs: Sequence[str] = field(default=(), init=False, repr=False, compare=False)

    def write(self, record: Mapping[str, Any]) -> None:
        """Log a round. Of a header it keeps the names of the knobs."""
        if record["kind"] == "header":
            self._knobs = record.get("knobs", ())
        if record["kind"] != "round":
            return
        values, step = scalars(record, record.get("knobs") or self._knobs), int(record["step"])
        way = _way_of(self.tracker)
        if way == "add_scalar":
            for tag, value in values.items():
                self.tracker.add_scalar(tag, value, step)
        elif way == "log_metrics":
            self.tracker.log_metrics({_without_brackets(tag): value for tag, value in values.items()}, step=step)
        else:
            self.tracker.log(values, step=step)


@dataclass
class EventSink:
    """A sink that calls ``tell(record, event)`` when something happens in a search, with the event as a sentence.

    An event that is repeated in consecutive rounds is told once: a first step may have to be made again.
    """

    tell: Callable[[Mapping[str, Any], str], object]
    _told: str | None = field(default=None, init=False, repr=False, compare=False)

    def write(self, record: Mapping[str, Any]) -> None:
        """Tell of the event in a record, if there is one."""
        event, told = event_of(record), self._told
        self._told = event
        if event and event != told:
            self.tell(record, event)


OneJournal: TypeAlias = Union[str, "os.PathLike[str]", Sink, ScalarWriter, MetricsLogger, DictLogger, None]
Journals: TypeAlias = Union[OneJournal, "Sequence[Journals]"]
"""What ``journal=`` may be."""


def open_journal(journal: Journals) -> list[Sink]:
    """The sinks for a ``journal=`` argument: a path, a sink, a tracker, or a list of these; empty if there is none."""
    if journal is None:
        return []
    if isinstance(journal, (str, os.PathLike)):
        return [Journal(journal)]
    if isinstance(journal, (list, tuple)):
        return [sink for one in journal for sink in open_journal(one)]
    if isinstance(journal, Sink) and not isinstance(journal, io.IOBase) and _takes(journal, "write", {}):
        return [journal]
    if _way_of(journal) is not None:
        return [Tracked(journal)]
    raise ArgumentError(
        "journal must be a path, an object with write(record), add_scalar(tag, value, step), log(dict, step=) or "
        f"log_metrics(dict, step=), a list of these, or None, but got journal={shown(journal)}; for instance "
        'journal="run.jsonl"'
    )


def _way_of(tracker: object) -> str | None:
    """The name of the method by which a tracker takes the numbers of a step; None: it is no tracker."""
    if _takes(tracker, "add_scalar", "", 0.0, 0):
        return "add_scalar"
    if _takes(tracker, "log_metrics", {}, step=0):
        return "log_metrics"
    return "log" if _takes(tracker, "log", {}, step=0) else None


def _takes(one: Any, method: str, *arguments: object, **keywords: object) -> bool:
    """Whether it has a method that can be called like this. The log() of a logger or a tensor cannot: it means
    something else."""
    try:
        inspect.signature(getattr(one, method)).bind(*arguments, **keywords)
    except (AttributeError, TypeError, ValueError):
        return False
    return True


def scalars(record: Mapping[str, Any], knobs: Sequence[str] = ()) -> dict[str, float]:
    """A round's main numbers, by tag. A number that is missing, NaN or infinite has no entry.

    >>> scalars({"base": [0.1], "delta": None, "replicas": [{"loss": 1.0}, {"loss": 3.0}]}, ["lr[0]"])
    {'hdet/base/lr[0]': 0.1, 'hdet/loss/mean': 2.0, 'hdet/loss/min': 1.0, 'hdet/loss/max': 3.0}
    >>> scalars({"base": [0.1], "found": 0.3, "rolled_back_to": 40, "replicas": [{"loss": 1.0, "divergence": 0.0}]})
    {'hdet/base/knob[0]': 0.1, 'hdet/found': 0.3, 'hdet/rolled_back_to': 40.0, 'hdet/loss': 1.0}
    """
    names = [*knobs, *(f"knob[{g}]" for g in range(len(knobs), len(record.get("base") or ())))]
    found = {f"hdet/base/{name}": value for name, value in zip(names, record.get("base") or (), strict=False)}
    found |= {f"hdet/slope/{name}": value for name, value in zip(names, record.get("delta") or (), strict=False)}
    found |= {"hdet/found": record.get("found"), "hdet/estimated_rate": record.get("estimated_rate") or None}
    found |= {"hdet/rolled_back_to": record.get("rolled_back_to")}
    replicas = record.get("replicas", ())
    if len(replicas) == 1:  # its loss is mean, lowest and highest, and it has no distance from a mean
        found |= {"hdet/loss": replicas[0].get("loss")}
    else:
        found |= _summed_up("loss", replicas) | _summed_up("divergence", replicas)
    return {tag: float(value) for tag, value in found.items() if is_finite(value)}


def _summed_up(what: str, replicas: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Mean, lowest and highest value of the replicas; empty if no value is finite."""
    values = [row[what] for row in replicas if is_finite(row.get(what))]
    if not values:
        return {}
    return {f"hdet/{what}/mean": fmean(values), f"hdet/{what}/min": min(values), f"hdet/{what}/max": max(values)}


def _without_brackets(tag: str) -> str:
    """``lr.0`` for ``lr[0]``: MLflow accepts letters, digits and ``_-. :/`` only."""
    return re.sub(r"[^\w\-. :/]", "_", tag.replace("[", ".").replace("]", ""))
