"""How a run is shown while it goes on: live on a terminal, a plain line every few seconds in a log."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from hdet.cli.output import written
from hdet.report import numbers as say
from lab.runs.plan import Plan
from lab.runs.teller import Message

__all__ = ["display_for"]

_LINE_EVERY = 5.0


def display_for(console: Console, jobs: Sequence[Plan]) -> Screen | Lines:
    """The live one if somebody can see it. Enter it, and let it show messages of :mod:`lab.runs.teller`."""
    return Screen(console, jobs) if console.is_terminal else Lines(console, jobs)


class Screen:
    """A bar with the time left over all jobs, and below it one line per replica, or one for a search."""

    def __init__(self, console: Console, jobs: Sequence[Plan]) -> None:
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[at]}"),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, console=console)
        self._task = self._progress.add_task("starting", total=sum(job.steps for job in jobs), at="")
        self._jobs = jobs
        self._before = [sum(job.steps for job in jobs[:i]) for i in range(len(jobs))]
        self._start: Message = {}
        self._round: Message | None = None
        self._live = Live(self._progress, console=console, refresh_per_second=8, transient=True)

    def __enter__(self) -> Screen:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)

    def show(self, message: Message) -> None:
        kind, run = message["kind"], message["run"]
        if kind == "start":
            self._start, self._round = message, None
        elif kind == "round":
            self._round = message
        elif kind == "step":
            job = self._jobs[run]
            number = f" ({run + 1} of {len(self._jobs)})" if len(self._jobs) > 1 else ""
            done, at = self._before[run] + message["step"], f"step {message['step']} of {job.steps}"
            self._progress.update(self._task, completed=done, description=f"{job.name}{number}", at=at)
            self._live.update(Group(self._progress, rows(self._start, message, self._round)))
        elif kind == "end":
            self._progress.update(self._task, completed=self._before[run] + self._jobs[run].steps)


def rows(start: Message, step: Message, last: Message | None) -> Table:
    """Rates, loss and weight of every replica at the last round's end; the base as it is now."""
    searches = start["method"] == "search"
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("", *(f"rate, {name}" for name in start["groups"]), "loss", *(() if searches else ("weight",))):
        table.add_column(written(column), justify="right" if column else "left")
    for r, row in enumerate(last["rows"] if last is not None else ()):
        cells = [*map(say.rate, row["values"]), say.loss(row["loss"])]
        name, weight = ("last round", ()) if searches else (f"replica {r}", (_weight(row["weight"]),))
        table.add_row(name, *cells, *weight)
    table.add_row("now" if searches else "base", *map(say.rate, step["base"]), say.loss(step["loss"]), style="bold")
    if last is not None:
        table.add_row("found" if searches else "learned", *map(say.factor, last["learned"]), style="dim")
    return table


def _weight(weight: float | None) -> Text:
    """How much a replica counted, as number and bar."""
    if weight is None:
        return Text("")
    return Text(f"{weight:.2f} ") + Text(("█" * round(8 * weight)).ljust(8), style="cyan")


class Lines:
    """A line when a run starts and ends, when something happens to it, and every few seconds between."""

    def __init__(self, console: Console, jobs: Sequence[Plan]) -> None:
        self._console = console
        self._jobs = jobs
        self._total = sum(job.steps for job in jobs)
        self._shown = 0.0
        self._first: tuple[float, int] | None = None

    def __enter__(self) -> Lines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def show(self, message: Message) -> None:
        kind, run = message["kind"], message["run"]
        job, now = self._jobs[run], time.monotonic()
        if kind == "start":
            self._print(run, f"{job.steps} steps, replicas: {message['replicas']}")
        elif kind == "end":
            self._print(run, message["outcome"])
        elif kind == "round" and message["event"] not in (None, "first step"):
            self._print(run, f"step {message['step']}, {message['event']}")
        elif kind == "step":
            done = sum(job.steps for job in self._jobs[:run]) + message["step"]
            self._first = self._first or (now, done)  # the start-up says nothing about the speed
            if now >= self._shown + _LINE_EVERY:
                self._shown = now
                base, loss = say.rate(message["base"][0]), say.loss(message["loss"])
                self._print(
                    run, f"step {message['step']} of {job.steps}, rate {base}, loss {loss}{self._left(now, done)}"
                )

    def _left(self, now: float, done: int) -> str:
        began, first = self._first or (now, done)
        return f"; about {(now - began) * (self._total - done) / (done - first):.0f} s left" if done > first else ""

    def _print(self, run: int, text: str) -> None:
        number = f"[{run + 1}/{len(self._jobs)}] " if len(self._jobs) > 1 else ""
        self._console.print(written(f"{number}{self._jobs[run].name}: {text}"), soft_wrap=True)
