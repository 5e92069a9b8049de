"""Where words go, and where results go."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from hdet.cli import speaks
from hdet.errors import ArgumentError, harmless
from hdet.report.advice import advice, warned
from hdet.report.comparison import Table
from hdet.report.data import RunData
from hdet.report.numbers import plain_json

__all__ = [
    "Force",
    "Json",
    "Output",
    "refuse_to_overwrite",
    "say_alarms",
    "say_what_next",
    "written",
]

Json = Annotated[bool, typer.Option("--json", help="One line of JSON, last on stdout; the rest goes to stderr.")]
Force = Annotated[bool, typer.Option("--force", help="Replace what is there.")]
"""Options of every command."""
_LOG_WIDTH = 120


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


def refuse_to_overwrite(path: Path, force: bool) -> None:
    if path.exists() and not force:
        raise ArgumentError(f"{path} exists already; name another file with -o, or replace it with --force")
