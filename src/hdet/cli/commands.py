"""The commands: ``hdet report`` draws a run, ``compare`` puts runs side by side, ``export`` writes a found schedule."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from hdet.cli.output import Force, Json, Output, plot, refuse_to_overwrite, say_alarms
from hdet.errors import ArgumentError, harmless
from hdet.files import write_atomically
from hdet.journal import JournalData, read_journal
from hdet.report import series
from hdet.report import verdict as words
from hdet.report.data import RunData, journal_in, load_run
from hdet.report.numbers import plain_json
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
    """Put runs side by side: a table, and their curves over each other.

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
    curves = series.compare(found)
    output.say(plot(curves.names, curves.losses, curves.kind, width=min(100, output.console.width)))
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
        "crashed": run.summary.crashed,
        "base_start": None if base is None else base.start,
        "base_end": None if base is None else base.end,
        "rounds": len(run.rounds),
        "seconds": run.summary.seconds,
        "final": run.summary.final,
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
    schedule, output = found_schedule(journal_at(run), every_step), Output(as_json)
    if out is None:
        if as_json:
            output.result(**schedule.as_dict())
        else:
            sys.stdout.write(harmless(schedule.as_csv()))
        return
    text = json.dumps(plain_json(schedule.as_dict())) + "\n" if out.suffix == ".json" else schedule.as_csv()
    write_atomically(out, text)
    output.say(str(out))
    output.result(out=out, rows=len(schedule.steps), knobs=schedule.knobs)


class FoundSchedule(NamedTuple):
    """A table: a row per step, a column per knob."""

    knobs: tuple[str, ...]
    steps: tuple[int, ...]
    values: tuple[tuple[float | None, ...], ...]
    """Per step the base values, in the order of the knobs; None before a knob was added."""

    def as_csv(self) -> str:
        """CSV with a header line; steps count from 0."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["step", *self.knobs])
        for step, row in zip(self.steps, self.values, strict=True):
            writer.writerow([step, *("" if value is None else repr(value) for value in row)])
        return text.getvalue()

    def as_dict(self) -> dict[str, Any]:
        """``steps``, and a list of values for each knob."""
        columns = map(list, zip(*self.values, strict=True))
        return {"steps": list(self.steps), "values": dict(zip(self.knobs, columns, strict=True))}


def journal_at(path: Path) -> JournalData:
    """The journal at a path, or in a run's folder."""
    file = journal_in(path)
    if not file.exists():
        raise ArgumentError(
            f"{path} has no journal, so no schedule was found there; give a run of a search or of replicas"
        )
    return read_journal(file)


def found_schedule(journal: JournalData, every_step: bool = False) -> FoundSchedule:
    """The base values at the steps that a journal knows, or at every step from the first to the last.

    They are those that :func:`hdet.schedule_from` replays: between known steps, their square roots are interpolated.
    """
    found = found_schedules(journal)
    known = sorted({step for steps, _ in found.values() for step in steps})
    steps = range(known[0], known[-1] + 1) if every_step else known
    rows = [tuple(_at(step, *one) for one in found.values()) for step in steps]
    return FoundSchedule(tuple(found), tuple(steps), tuple(rows))


def _at(step: int, steps: Sequence[int], values: Sequence[float]) -> float | None:
    """A knob's value at a step; None before it was added.

    >>> _at(2, [0, 4], [1.0, 9.0]), _at(9, [0, 4], [1.0, 9.0]), _at(0, [1, 4], [1.0, 9.0])
    (4.0, 9.0, None)
    """
    return None if step < steps[0] else value_at(step, steps, values)
