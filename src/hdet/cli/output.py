"""Where words go, and where results go."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from hdet.checks import harmless
from hdet.errors import ArgumentError
from hdet.report.advice import advice, warned
from hdet.report.comparison import Table
from hdet.report.data import RunData
from hdet.runs.folder import plain_json

__all__ = [
    "Output",
    "complain",
    "refuse_to_overwrite",
    "refuse_torchrun",
    "say_alarms",
    "say_what_next",
    "speaks",
    "written",
]

_LOG_WIDTH = 120


def speaks() -> bool:
    """Whether this process is the one that prints: of the ranks that torchrun started, the first."""
    return os.environ.get("RANK", "0") == "0"


def written(text: str, style: str = "") -> Text:
    """Text as it stands, whoever wrote it: brackets are just brackets, and escape sequences are spelled out."""
    return Text(harmless(text), style=style)


class Output:
    """Words on stdout; with ``--json`` they go to stderr, and stdout gets one line."""

    def __init__(self, as_json: bool) -> None:
        stream = sys.stderr if as_json else sys.stdout
        width = None if stream.isatty() else _LOG_WIDTH  # a file has no width of its own
        self.console = Console(file=stream, highlight=False, width=width, quiet=not speaks())
        self._as_json = as_json

    def say(self, text: str, style: str = "") -> None:
        """A line, not folded: paths must stay whole."""
        self.console.print(written(text, style), soft_wrap=True)

    def table(self, table: Table) -> None:
        """A table of texts; the first column to the left, numbers to the right."""
        drawn = RichTable(title=written(table.caption, "table.title") if table.caption else None, title_justify="left")
        for i, column in enumerate(table.columns):
            drawn.add_column(written(column), justify="right" if i else "left")
        for row in table.rows:
            drawn.add_row(*map(written, row))
        self.console.print(drawn)

    def result(self, **values: Any) -> None:
        """The line for programs, if they asked for it."""
        if self._as_json and speaks():
            print(json.dumps(plain_json(values)), flush=True)


def say_alarms(output: Output, runs: Sequence[RunData]) -> None:
    """In red what makes a run's rate worthless."""
    for one in (one for run in runs for one in warned(run)):
        output.say(str(one), style="bold red")


def say_what_next(output: Output, run: RunData) -> None:
    """How to use what a run found, or why not to."""
    say_alarms(output, [run])
    if (found := advice(run)) is not None:
        output.say(str(found))


def complain(text: str, as_json: bool, code: int) -> int:
    """One line on stderr, and for programs one on stdout; returns the exit code."""
    line = harmless(" ".join(text.split()))
    if not speaks() and code == 1:  # bad input is the same on all ranks, a failure need not be
        print(f"hdet, rank {os.environ['RANK']}: {line}", file=sys.stderr, flush=True)
    if speaks():
        print(f"hdet: {line}", file=sys.stderr, flush=True)
        if as_json:
            print(json.dumps({"error": line, "code": code}), flush=True)
    return code


def refuse_to_overwrite(path: Path, force: bool) -> None:
    if path.exists() and not force:
        raise ArgumentError(f"{path} exists already; name another file with -o, or replace it with --force")


def refuse_torchrun(command: str) -> None:
    """For commands that start ranks themselves, several times and of different numbers."""
    if "RANK" in os.environ:
        raise ArgumentError(f"hdet {command} starts its ranks itself, but torchrun has started this; run it without")
