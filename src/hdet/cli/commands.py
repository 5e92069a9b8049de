"""The commands: ``hdet report`` draws a run, ``compare`` puts runs side by side, ``export`` writes a found schedule."""

from __future__ import annotations

import csv
import io
import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from heapq import merge
from itertools import chain, groupby
from pathlib import Path
from typing import Annotated

import typer

from hdet.cli.output import Force, Json, Output, refuse_to_overwrite, say_alarms
from hdet.errors import ArgumentError, harmless
from hdet.files import replacing
from hdet.journal.reading import Found, found_schedules, value_at
from hdet.report import verdict as words
from hdet.report.data import RunData, journal_in, load_run, told_apart
from hdet.report.page import write_report

_Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder, or a journal.", show_default=False)]
_Runs = Annotated[list[Path], typer.Argument(metavar="RUN...", help="Runs' folders, or journals.", show_default=False)]
_Page = Annotated[Path | None, typer.Option("--out", "-o", help="The page.", show_default="report.html in the folder")]
_Also = Annotated[Path | None, typer.Option("--out", "-o", help="Also write a page with the curves to this file.")]
_Table = Annotated[Path | None, typer.Option("--out", "-o", help="A CSV file.", show_default="CSV on stdout")]
_Title = Annotated[str | None, typer.Option(help="Its title.", show_default="the run's name")]
_Every = Annotated[bool, typer.Option("--every-step", help="A row for every step, not only where a round ends.")]


def report(run: _Run, out: _Page = None, title: _Title = None, force: Force = False, as_json: Json = False) -> None:
    """Draw a run: one HTML page with everything inside, that opens offline.

    ```
    hdet report runs/feed -o feed.html
    ```
    """
    output, data = Output(as_json), load_run(run)
    out = out or (run if run.is_dir() else run.parent) / "report.html"
    refuse_to_overwrite(out, force)
    write_report([data], out, title=title)
    output.say(words.verdict(data))
    say_alarms(output, [data])
    if (found := words.advice(data)) is not None:
        output.say(str(found))
    output.say(str(out))
    output.result(out=out, verdict=words.verdict(data), rounds=len(data.steps))


def compare(runs: _Runs, out: _Also = None, force: Force = False, as_json: Json = False) -> None:
    """Put runs side by side: a table, and a page with their curves over each other.

    ```
    hdet compare runs/fixed runs/auto -o compare.html
    ```
    """
    if len(runs) < 2:
        raise ArgumentError("compare needs two runs or more, but got one; `hdet report` shows a single one")
    if out is not None:
        refuse_to_overwrite(out, force)
    output, found = Output(as_json), told_apart([load_run(path) for path in runs])
    output.table(words.table_of(found))
    output.say(words.compared(found))
    say_alarms(output, found)
    if out is not None:
        write_report(found, out)
        output.say(str(out))
    output.result(runs=[_summary(run) for run in found], out=out)


def _summary(run: RunData) -> dict[str, object]:
    base, end = words.base_movement(run), words.ending(run)
    return {
        "name": run.name,
        "path": run.path,
        "loss": end.loss,
        "which_loss": end.words,
        "base_start": None if base is None else base.start,
        "base_end": None if base is None else base.end,
        "rounds": len(run.steps),
    }


def export(
    run: _Run, out: _Table = None, every_step: _Every = False, force: Force = False, as_json: Json = False
) -> None:
    """Write the schedule that a run found as CSV: a column per knob, and two rows for each round, its last step and
    the next. With `--json` the table is on stdout as JSON.

    With `--every-step` there is a row for every step, with the values that `hdet.schedule_from(journal, optimizer)`
    gives in Python: between the steps of the journal their square roots are interpolated.

    ```
    hdet export runs/feed --every-step -o schedule.csv
    ```
    """
    if out is not None:
        refuse_to_overwrite(out, force)
    found, output = found_schedules(journal_in(run)), Output(as_json)
    known = array("q", (step for step, _ in groupby(merge(*(one.steps for one in found.values())))))
    steps = range(known[0], known[-1] + 1) if every_step else known
    if out is not None:
        with replacing(out) as draft, draft.open("w", encoding="utf-8") as file:
            file.writelines(_csv_lines(found, steps))
        output.say(str(out))
        output.result(out=out, rows=len(steps), knobs=list(found))
    elif as_json:
        columns = zip(*_rows(found, steps), strict=True)
        output.result(steps=next(columns), values=dict(zip(found, columns, strict=True)))
    else:
        sys.stdout.writelines(map(harmless, _csv_lines(found, steps)))


def _rows(found: Mapping[str, Found], steps: Sequence[int]) -> Iterator[tuple[float | None, ...]]:
    """Each step and the values there, one by one: those of a long run need not fit into memory.

    A value is None before its knob was added.
    """
    for t in steps:
        yield t, *(None if t < one.steps[0] else value_at(t, *one) for one in found.values())


def _csv_lines(found: Mapping[str, Found], steps: Sequence[int]) -> Iterator[str]:
    line = io.StringIO()
    writer = csv.writer(line, lineterminator="\n")
    for row in chain([("step", *found)], _rows(found, steps)):
        writer.writerow(row)
        yield line.getvalue()
        line.seek(0)
        line.truncate()
