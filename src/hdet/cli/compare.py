"""``hdet compare``: runs side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hdet.cli.output import Force, Json, Output, refuse_to_overwrite, say_alarms
from hdet.cli.plot import plot
from hdet.errors import ArgumentError
from hdet.report import comparison
from hdet.report.data import RunData, load_run
from hdet.report.page import write_report
from hdet.report.verdict import base_movement, compared, ending

__all__ = ["compare"]

_Runs = Annotated[list[Path], typer.Argument(metavar="RUN...", help="Runs' folders, or journals.", show_default=False)]
_Out = Annotated[Path | None, typer.Option("--out", "-o", help="Also write a page with the curves to this file.")]


def compare(runs: _Runs, out: _Out = None, force: Force = False, as_json: Json = False) -> None:
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
    output.table(comparison.table_of(found))
    curves = comparison.compare(found)
    output.say(plot(curves.names, curves.losses, curves.kind, width=min(100, output.console.width)))
    output.say(compared(found))
    say_alarms(output, found)
    if out is not None:
        write_report(found, out)
        output.say(str(out))
    output.result(runs=[_summary(run) for run in found], out=out)


def _summary(run: RunData) -> dict[str, object]:
    base, end = base_movement(run), ending(run)
    return {
        "name": run.name,
        "path": run.path,
        "loss": end.loss,
        "which_loss": end.words,
        "crashed": run.summary.crashed,
        "base_start": None if base is None else base.start,
        "base_end": None if base is None else base.end,
        "rounds": run.number_of_rounds,
        "seconds": run.summary.seconds,
        "final": run.summary.final,
    }
