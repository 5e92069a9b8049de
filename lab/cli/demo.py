"""``python -m lab demo``: two scenes in about three minutes."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Annotated

import typer

from hdet.cli.output import Force, Json, Output
from hdet.errors import ArgumentError
from hdet.report.page import write_report
from lab.cli.training import check_surroundings, train, until_stopped
from lab.runs.demo import ensemble, ensemble_table, guess_table, guess_words, guesses, movement_of
from lab.runs.result import Result, figures_of, result_of

__all__ = ["demo"]

_Out = Annotated[
    Path | None, typer.Option("--out", help="Folder for the runs and the report.", show_default="a new one in runs/")
]
_Steps = Annotated[int, typer.Option(help="Steps of each run in scene one.")]
_Feed = Annotated[int, typer.Option(help="Steps of scene two.")]
_Replicas = Annotated[int, typer.Option(help="Processes of scene two.")]


def demo(
    out: _Out = None,
    steps: _Steps = 400,
    ensemble_steps: _Feed = 400,
    replicas: _Replicas = 4,
    force: Force = False,
    as_json: Json = False,
) -> int:
    """Show what hdet does, in two scenes and about three minutes.

    One, a bad guess: a small CNN learns digits with a rate that is 100 times too low, and 100 times too high; torch's
    OneCycleLR beside hdet.auto. Two, the ensemble: four processes train a recommender's model at four rates around one
    schedule. At the end a table, and a report of each scene to open in a browser.
    """
    check_surroundings("demo")
    output = Output(as_json)
    folder = _folder(out, force)
    again = f"begin again with: python -m lab demo --out {folder} --force"
    return until_stopped(output, folder, again, lambda: _show(folder, steps, ensemble_steps, replicas, output))


def _show(out: Path, steps: int, ensemble_steps: int, replicas: int, output: Output) -> None:
    """Both scenes and their pages."""
    one, two = guesses(out, steps), ensemble(out, ensemble_steps, replicas)
    runs: list[Result] = []
    pages: list[Path] = []
    for scene in (one, two):
        output.say(f"\n{scene.title}", style="bold")
        output.say(scene.words)
        train(scene.folders, scene.plans, output)
        seen = [result_of(folder) for folder in scene.folders]
        table = guess_table(seen) if scene is one else ensemble_table(seen[0])
        page, words = (out / "report.html", guess_words(seen)) if scene is one else (out / "ensemble.html", "")
        drawn = [run.journal for run in seen if run.journal is not None]
        shared = figures_of(seen)
        pages.append(write_report(drawn, page, title=scene.title, table=table, headline=words, figures=shared))
        runs += seen
        output.table(table)
    output.say(f"\nthe reports: {pages[0]}, {pages[1]}", style="bold")
    found = {run.name: movement_of(run) for run in runs}
    rates = {name: movement.end for name, movement in found.items() if movement is not None}
    losses = {run.name: run.final.get("loss") for run in runs}
    output.result(outcome="complete", out=out, report=pages[0], ensemble=pages[1], losses=losses, rates=rates)


def _folder(out: Path | None, force: bool) -> Path:
    if out is None:
        tries = (Path("runs") / (f"demo-{i}" if i > 1 else "demo") for i in count(1))
        return next(path for path in tries if not path.exists())
    if out.exists() and not force and (not out.is_dir() or any(out.iterdir())):
        raise ArgumentError(f"{out} exists already; name another folder, or replace what is in it with --force")
    return out
