"""``hdet report``: a run as a page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hdet.cli.output import Force, Json, Output, refuse_to_overwrite, say_what_next
from hdet.report.data import load_run
from hdet.report.page import write_report
from hdet.report.verdict import verdict

__all__ = ["report"]

_Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder, or a journal.", show_default=False)]
_Out = Annotated[Path | None, typer.Option("--out", "-o", help="The page.", show_default="report.html in the folder")]
_Title = Annotated[str | None, typer.Option(help="Its title.", show_default="the run's name")]


def report(run: _Run, out: _Out = None, title: _Title = None, force: Force = False, as_json: Json = False) -> None:
    """Draw a run: one HTML page with everything inside, that opens offline.

    ```
    hdet report runs/feed -o feed.html
    ```
    """
    output, data = Output(as_json), load_run(run)
    out = out or (run if run.is_dir() else run.parent) / "report.html"
    refuse_to_overwrite(out, force)
    write_report([data], out, title=title)
    output.say(verdict(data))
    say_what_next(output, data)
    output.say(str(out))
    output.result(out=out, verdict=verdict(data), rounds=data.number_of_rounds)
