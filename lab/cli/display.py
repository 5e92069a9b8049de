"""How a run is shown while it goes on: live on a terminal, a plain line every few seconds in a log."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from hdet.cli.output import written
from hdet.report import numbers as say
from lab.runs.plan import Plan
from lab.runs.teller import Message, Tell

__all__ = ["display_for"]

_LINE_EVERY = 5.0


@contextmanager
def display_for(console: Console, plans: Sequence[Plan]) -> Iterator[Tell]:
    """Inside, what takes the messages of :mod:`lab.runs.teller` and shows them: live, if somebody can see it."""
    done_before = [sum(plan.steps for plan in plans[:i]) for i in range(len(plans))]
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[at]}", markup=False),
        TimeRemainingColumn(),
    )
    progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    task = progress.add_task("starting", total=sum(plan.steps for plan in plans), at="")
    lines = _lines(console, plans)

    def show(message: Message) -> None:
        run = message["run"]
        if message["kind"] == "step":
            name = f"{plans[run].name} ({run + 1} of {len(plans)})"
            progress.update(task, completed=done_before[run] + message["step"], description=name, at=_at(message))
        if message["kind"] == "event" or not console.is_terminal:
            lines(message)

    with progress:
        yield show


def _lines(console: Console, plans: Sequence[Plan]) -> Tell:
    """Writes a line when a run starts and ends, when something happens to it, and every few seconds between."""
    next_at = 0.0

    def write(message: Message) -> None:
        nonlocal next_at
        kind, run = message["kind"], message["run"]
        plan = plans[run]
        if kind == "start":
            words = f"{plan.steps} steps, replicas: {plan.replicas}"
        elif kind == "event":
            words = f"step {message['step']}, {message['event']}"
        elif kind == "end":
            words = message["outcome"]
        elif time.monotonic() >= next_at:
            next_at = time.monotonic() + _LINE_EVERY
            words = f"{_at(message)} of {plan.steps}"
        else:
            return
        number = f"[{run + 1}/{len(plans)}] " if len(plans) > 1 else ""
        console.print(written(f"{number}{plan.name}: {words}"), soft_wrap=True)

    return write


def _at(message: Message) -> str:
    return f"rate {say.rate(message['base'][0])}, loss {say.loss(message['loss'])}, step {message['step']}"
