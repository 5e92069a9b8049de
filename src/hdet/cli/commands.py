"""The commands: ``hdet report`` draws a run, ``compare`` puts runs side by side, ``export`` writes a found schedule."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from hdet.cli.output import Force, Json, Output, refuse_to_overwrite, say_alarms
from hdet.errors import ArgumentError, harmless
from hdet.files import write_atomically
from hdet.journal import JournalData, read_journal
from hdet.report import verdict as words
from hdet.report.data import RunData, journal_in, load_run
from hdet.report.page import write_report
from hdet.schedulers.replay import found_schedules, value_at

_Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder, or a journal.", show_default=False)]
_Runs = Annotated[list[Path], typer.Argument(metavar="RUN...", help="Runs' folders, or journals.", show_default=False)]
_Page = Annotated[Path | None, typer.Option("--out", "-o", help="The page.", show_default="report.html in the folder")]
_Also = Annotated[Path | None, typer.Option("--out", "-o", help="Also write a page with the curves to this file.")]
_Table = Annotated[Path | None, typer.Option("--out", "-o", help="A .csv or .json file.", show_default="CSV on stdout")]
_Title = Annotated[str | None, typer.Option(help="Its title.", show_default="the run's name")]
_Every = Annotated[bool, typer.Option("--every-step", help="A row for every step, not only for the ends of rounds.")]


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
    output.result(out=out, verdict=words.verdict(data), rounds=len(data.rounds))


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
    output, found = Output(as_json), [load_run(path) for path in runs]
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
        "crashed": run.crashed,
        "base_start": None if base is None else base.start,
        "base_end": None if base is None else base.end,
        "rounds": len(run.rounds),
        "seconds": run.seconds,
        "final": run.final,
    }


def export(
    run: _Run, out: _Table = None, every_step: _Every = False, force: Force = False, as_json: Json = False
) -> None:
    """Write the schedule that a run found: a row per step, a column per knob.

    In Python, `hdet.schedule_from(journal, optimizer)` trains with it again.

    ```
    hdet export runs/feed -o schedule.csv
    ```
    """
    if out is not None:
        if out.suffix not in (".csv", ".json"):
            raise ArgumentError(f"-o must end with .csv or .json, but got {out}; leave it out for CSV on stdout")
        refuse_to_overwrite(out, force)
    schedule, output = found_schedule(read_journal(journal_in(run)), every_step), Output(as_json)
    if out is not None:
        write_atomically(out, json.dumps(schedule) + "\n" if out.suffix == ".json" else as_csv(schedule))
        output.say(str(out))
        output.result(out=out, rows=len(schedule["steps"]), knobs=list(schedule["values"]))
    elif as_json:
        output.result(**schedule)
    else:
        sys.stdout.write(harmless(as_csv(schedule)))


def found_schedule(journal: JournalData, every_step: bool = False) -> dict[str, Any]:
    """The ``steps`` that a journal knows, or every step from the first to the last, and the ``values`` of each knob.

    They are those that :func:`hdet.schedule_from` replays: between known steps, their square roots are interpolated.
    Steps count from 0. A value is None before its knob was added.
    """
    found = found_schedules(journal)
    known = sorted({step for steps, _ in found.values() for step in steps})
    steps = list(range(known[0], known[-1] + 1)) if every_step else known
    values = {knob: [None if t < one[0][0] else value_at(t, *one) for t in steps] for knob, one in found.items()}
    return {"steps": steps, "values": values}


def as_csv(schedule: Mapping[str, Any]) -> str:
    """A found schedule as a table: a row per step, a column per knob.

    >>> print(as_csv({"steps": [0, 4], "values": {"lr[0]": [0.1, 0.3], "lr[1]": [None, 0.2]}}), end="")
    step,lr[0],lr[1]
    0,0.1,
    4,0.3,0.2
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["step", *schedule["values"]])
    writer.writerows(zip(schedule["steps"], *schedule["values"].values(), strict=True))
    return text.getvalue()
