"""The command line: its commands, and their errors as one line with a cure instead of a traceback."""

from __future__ import annotations

import csv
import os
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

from hdet._version import __version__
from hdet.cli import complain
from hdet.cli.doctor import findings
from hdet.cli.output import Force, Json, Output
from hdet.errors import ArgumentError, HdetError, JournalError, harmless
from hdet.files import replacing
from hdet.journal.reading import found_schedules
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
_FOLDER = {"metavar": "FOLDER", "show_default": "this folder"}
_Journals = Annotated[Path, typer.Option("--journal", help="Where journals are to be written.", **_FOLDER)]
_Checkpoints = Annotated[Path, typer.Option("--checkpoints", help="Where checkpoints are to be written.", **_FOLDER)]
_HERE = Path(".")
_Version = Annotated[bool, typer.Option("--version", help="Print the version and leave.")]
_Usage: Any = typer.BadParameter.__mro__[1]
"""Click's base class of errors in the command line. Newer versions of typer contain their own click."""


def compare(runs: _Runs, out: _Also = None, force: Force = False, as_json: Json = False) -> None:
    """Put runs side by side: a table, and a page with their curves over each other.

    ```
    hdet compare runs/fixed runs/auto -o compare.html
    ```
    """
    if len(runs) < 2:
        raise ArgumentError("compare needs two runs or more, but got one; `hdet report` shows a single one")
    _refuse_to_overwrite(out, force)
    output, found = Output(as_json), told_apart([load_run(path) for path in runs])
    output.table(words.table_of(found))
    output.say(words.compared(found))
    _say_alarms(output, found)
    if out is not None:
        write_report(found, out)
        output.say(str(out))
    output.result(runs=[_summary(run) for run in found], out=out)


def _summary(run: RunData) -> dict[str, object]:
    base = words.base_movement(run)
    told = {"name": run.name, "path": run.path, "loss": run.loss, "rounds": run.length}
    return {**told, "base_start": base and base.start, "base_end": base and base.end}


def report(run: _Run, out: _Page = None, title: _Title = None, force: Force = False, as_json: Json = False) -> None:
    """Draw a run: one HTML page with everything inside, that opens offline.

    ```
    hdet report runs/feed -o feed.html
    ```
    """
    output, data = Output(as_json), load_run(run)
    out = out or (run if run.is_dir() else run.parent) / "report.html"
    _refuse_to_overwrite(out, force)
    output.say(words.verdict(data))
    _say_alarms(output, [data])
    if (found := words.advice(data)) is not None:
        output.say(str(found))
    write_report([data], out, title=title)  # after what is known at once, since plotly takes its time
    output.say(str(out))
    output.result(out=out, verdict=words.verdict(data), rounds=data.length)


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
    _refuse_to_overwrite(out, force)
    output, found = Output(as_json), found_schedules(journal_in(run))
    known = sorted({step for one in found.values() for step in one.steps})
    steps = range(known[0], known[-1] + 1) if every_step else known
    # A value is None before its knob was added.
    rows = ([t, *(None if t < one.begins else one.at(t) for one in found.values())] for t in steps)
    if out is not None:
        with replacing(out) as draft, draft.open("w", encoding="utf-8") as file:
            _write_csv(file, found, rows)
        output.say(str(out))
        output.result(out=out, rows=len(steps), knobs=list(found))
    elif as_json:
        columns = zip(*rows, strict=True)
        output.result(steps=next(columns), values=dict(zip(found, columns, strict=True)))
    else:
        _write_csv(sys.stdout, map(harmless, found), rows)


def doctor(journal: _Journals = _HERE, checkpoints: _Checkpoints = _HERE, as_json: Json = False) -> None:
    """Print what a bug report has to say of this machine, and a line for each thing that will not work on it.

    Versions, frameworks, devices, and whether a journal and a checkpoint can be written: both are written, and removed.
    Only torch is imported, which takes some seconds. The exit code is 1 if anything will not work.

    ```
    hdet doctor --journal runs --checkpoints /mnt/checkpoints
    ```
    """
    output = Output(as_json)
    told: dict[str, str] = {}
    wrong: list[str] = []
    for one in findings(journal, checkpoints):
        output.say(f"{one.name}: {one.says}")
        told[one.name] = one.says
        wrong += one.wrong
    for line in wrong:
        output.say(f"will not work: {line}", style="bold red")
    output.result(found=told, will_not_work=wrong)
    if wrong:
        raise typer.Exit(
            complain(f"things that will not work: {len(wrong)}; the lines above name them", as_json=False, code=1)
        )


def _write_csv(file: TextIO, knobs: Iterable[str], rows: Iterable[Sequence[float | None]]) -> None:
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["step", *knobs])
    writer.writerows(rows)


def _say_alarms(output: Output, runs: Sequence[RunData]) -> None:
    """Print in red why the rates of runs must not be used."""
    for name, one in ((run.name, one) for run in runs for one in run.alarms):
        output.say(f"{name}, step {one.step}: {one.text}. {words.CURE}", style="bold red")


def _refuse_to_overwrite(path: Path | None, force: bool) -> None:
    """A device or a folder is not replaced by ``--force``, either."""
    if path is not None and path.exists() and not (force and path.is_file()):
        raise ArgumentError(f"{path} exists already; name another file with -o, or replace a file with --force")


def commands(*functions: Callable[..., Any], completes: bool = False) -> typer.Typer:
    """A command line with a command for each function. ``completes``: a shell can be told to complete its words."""
    settings = {"help_option_names": ["-h", "--help"]}
    made = typer.Typer(
        rich_markup_mode="markdown",
        add_completion=completes,
        pretty_exceptions_enable=False,
        context_settings=settings,
    )
    for function in functions:
        made.command()(function)
    return made


app = commands(compare, report, export, doctor, completes=True)


@app.callback(invoke_without_command=True)
def _root(context: typer.Context, version: _Version = False) -> None:
    """Look at runs by their journals: draw them, compare them, and take a found schedule with you.

    `journal="run.jsonl"` in `hdet.auto`, `hdet.OneCycleLR` or `hdet.Ensemble` writes a journal. Then:

    ```
    hdet report run.jsonl
    hdet export run.jsonl -o schedule.csv
    ```

    `hdet doctor` says what works on this machine, for a bug report. `hdet --install-completion` completes words in your
    shell. Every command takes `--json`: one line, the last on stdout; messages go to stderr. Nothing is overwritten
    without `--force`. Exit codes: 0 done, 1 failed, 2 bad input, 130 stopped by Ctrl-C.
    """
    if version or context.invoked_subcommand is None:
        print(f"hdet {__version__}" if version else context.get_help())
        raise typer.Exit


def run(arguments: Sequence[str], line: typer.Typer = app, name: str = "hdet") -> int:
    """Run a command and return its exit code.

    Args:
        arguments: without the program's name.
        line: the command line that has the command.
        name: the program's.
    """
    as_json = "--json" in arguments
    try:
        code = line(list(arguments), prog_name=name, standalone_mode=False)
    except HdetError as error:
        return complain(str(error), as_json, code=2 if isinstance(error, (ArgumentError, JournalError)) else 1)
    except _Usage as error:
        text, context = error.format_message().strip(), error.ctx
        end = "" if text.endswith((".", "?")) else "."
        return complain(f"{text}{end} See `{context.command_path if context else name} --help`.", as_json, code=2)
    except KeyboardInterrupt:
        return complain("stopped", as_json, code=128 + signal.SIGINT)
    except OSError as error:
        return complain(f"{error}; check the path, the rights and the space left", as_json, code=1)
    except Exception as error:
        if os.environ.get("HDET_DEBUG"):
            raise
        text = f"{type(error).__name__}: {error}; this is a bug in hdet; HDET_DEBUG=1 shows where"
        return complain(text, as_json, code=1)
    return code if isinstance(code, int) else 0
