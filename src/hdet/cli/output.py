"""The output of commands: lines and tables for people, one line of JSON for programs."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from hdet.errors import harmless
from hdet.report.numbers import plain_json
from hdet.report.verdict import Table

Json = Annotated[bool, typer.Option("--json", help="One line of JSON, last on stdout; the rest goes to stderr.")]
Force = Annotated[bool, typer.Option("--force", help="Replace what is there.")]
"""Options of every command."""
_LOG_WIDTH = 120


def written(text: str, style: str = "") -> Text:
    """Text as it is: rich does not interpret its brackets, and escape sequences are spelled out."""
    return Text(harmless(text), style=style)


class Output:
    """Text for people on stdout; with ``--json`` it goes to stderr, and stdout gets one line of JSON."""

    def __init__(self, as_json: bool) -> None:
        stream = sys.stderr if as_json else sys.stdout
        width = None if stream.isatty() else _LOG_WIDTH  # a file has no width of its own
        self.console = Console(file=stream, highlight=False, width=width)
        self._as_json = as_json

    def say(self, text: str, style: str = "") -> None:
        """Print a line without wrapping it, so that paths stay whole."""
        self.console.print(written(text, style), soft_wrap=True)

    def table(self, table: Table) -> None:
        """Print a table of texts; the first column is aligned left, the others right."""
        drawn = RichTable(title=written(table.caption, "table.title") if table.caption else None, title_justify="left")
        for i, column in enumerate(table.columns):
            drawn.add_column(written(column), justify="right" if i else "left")
        for row in table.rows:
            drawn.add_row(*map(written, row))
        self.console.print(drawn)

    def result(self, **values: Any) -> None:
        """Print the line of JSON, if ``--json`` was given."""
        if self._as_json:
            print(json.dumps(plain_json(values), default=str), flush=True)
