"""The output of commands: lines, tables and curves for people, one line of JSON for programs."""

from __future__ import annotations

import json
import math
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
from hdet.report import numbers as say
from hdet.report.data import RunData
from hdet.report.numbers import plain_json
from hdet.report.series import Line
from hdet.report.verdict import Table, warned

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
        self.console = Console(file=stream, highlight=False, width=width, quiet=not speaks())
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
        if self._as_json and speaks():
            print(json.dumps(plain_json(values)), flush=True)


def say_alarms(output: Output, runs: Sequence[RunData]) -> None:
    """Print in red why the rates of runs must not be used."""
    for one in (one for run in runs for one in warned(run)):
        output.say(str(one), style="bold red")


def refuse_to_overwrite(path: Path, force: bool) -> None:
    if path.exists() and not force:
        raise ArgumentError(f"{path} exists already; name another file with -o, or replace it with --force")


def plot(names: Sequence[str], lines: Sequence[Line], title: str, width: int = 80, height: int = 14) -> str:
    """The lines in one plot, each by its letter; if several meet, the last is seen. Logarithmic if all is above 0.

    >>> print(plot(["a run", "another"], [Line((0, 1, 2), (4.0, 2.0, 1.0)), Line((0, 2), (4.0, 4.0))], "Loss", 24, 3))
    Loss
           4 ┤b           b
           2 ┤     a
           1 ┤            a
             └─────────────
              0           2
    a: a run, b: another
    """
    letters = [chr(ord("a") + i % 26) for i in range(len(names))]
    rows = [(x, y, letter) for line, letter in zip(lines, letters, strict=True) for x, y in zip(*line[:2], strict=True)]
    points = [(x, y, letter) for x, y, letter in rows if y is not None]
    if not points:
        return f"{title}: none of the runs has a curve"
    columns = max(2, width - 11)
    left, right = min(x for x, _, _ in points), max(x for x, _, _ in points)
    logarithmic = all(y > 0 for _, y, _ in points)
    heights = [math.log(y) if logarithmic else y for _, y, _ in points]
    low, high = min(heights), max(heights)
    grid = [[" "] * columns for _ in range(height)]
    for (x, _, letter), y in zip(points, heights, strict=True):
        row = round((height - 1) * (high - y) / (high - low or 1.0))
        grid[row][round((columns - 1) * (x - left) / (right - left or 1.0))] = letter
    marks = [high - (high - low) * i / max(1, height - 1) for i in range(height)]
    labels = [say.number(math.exp(mark) if logarithmic else mark, 3) for mark in marks]
    drawn = [f"{label:>8} ┤{''.join(cells).rstrip()}" for label, cells in zip(labels, grid, strict=True)]
    axis = f"{say.number(left, 6)}{say.number(right, 6):>{columns - len(say.number(left, 6))}}"
    legend = ", ".join(f"{letter}: {name}" for letter, name in zip(letters, names, strict=True))
    return "\n".join([title, *drawn, " " * 9 + "└" + "─" * columns, " " * 10 + axis, legend])
