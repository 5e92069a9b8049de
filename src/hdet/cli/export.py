"""``hdet export``: the found schedule, for use elsewhere."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from hdet.cli.output import Force, Json, Output, refuse_to_overwrite
from hdet.cli.schedule import found_schedule, journal_at
from hdet.errors import ArgumentError, harmless
from hdet.files import write_atomically
from hdet.report.numbers import plain_json

__all__ = ["export"]

_Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder, or a journal.", show_default=False)]
_Out = Annotated[Path | None, typer.Option("--out", "-o", help="A .csv or .json file.", show_default="CSV on stdout")]
_Every = Annotated[bool, typer.Option("--every-step", help="A row for every step, not only for the ends of rounds.")]


def export(
    run: _Run, out: _Out = None, every_step: _Every = False, force: Force = False, as_json: Json = False
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
