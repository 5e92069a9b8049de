"""``python -m lab ablate``: the published table, measured here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from hdet.cli.output import Output
from hdet.errors import ArgumentError
from hdet.files import write_atomically
from hdet.report.data import load_run
from hdet.report.numbers import plain_json
from hdet.report.page import check_packages, write_report
from lab.cli import options as o
from lab.cli.display import Job, display_for
from lab.cli.stopping import until_stopped
from lab.runs.ablation import RATES, PlannedRun, Study
from lab.runs.launch import execute, refuse_torchrun
from lab.runs.outcome import as_markdown, described, table_of
from lab.runs.stop import Stop

__all__ = ["ablate"]

_QUICK = Study(
    seeds=1,
    steps=12,
    warm_steps=4,
    replicas=2,
    batch_size=8,
    options={"users": 64, "items": 64, "history": 4, "width": 8, "depth": 1},
)
_Seeds = Annotated[int | None, typer.Option(help="Runs per configuration.", show_default="3")]
_Steps = Annotated[int | None, typer.Option(help="Steps per run.", show_default="400")]
_Replicas = Annotated[int | None, typer.Option(help="Ranks that train together.", show_default="4")]
_Batch = Annotated[int | None, typer.Option(help="Samples per replica and step.", show_default="64")]
_Low = Annotated[float | None, typer.Option(help="The good low rate.", show_default="feed: 5e-3")]
_High = Annotated[float | None, typer.Option(help="The rate that is too high.", show_default="feed: 0.15")]
_Quick = Annotated[bool, typer.Option("--quick", help="Tiny runs that say nothing, to see that all works (feed).")]
_Like = Annotated[Path | None, typer.Option("--like", help="Repeat the study of this ablation.json.")]
_Out = Annotated[Path, typer.Option("--out", help="Folder of the study; what is complete in it is kept.")]


def ablate(
    context: typer.Context,
    out: _Out,
    task: Annotated[o.TaskName, typer.Option(help="What to learn.")] = o.TaskName.feed,
    seeds: _Seeds = None,
    steps: _Steps = None,
    replicas: _Replicas = None,
    batch_size: _Batch = None,
    low: _Low = None,
    high: _High = None,
    like: _Like = None,
    quick: _Quick = False,
    force: o.Force = False,
    as_json: o.Json = False,
) -> int:
    """Measure the published table: six configurations, two controls, and a search for the rate.

    Baseline-Low and -High are plain training at two rates. Warm-Init begins with noisy weights of a short run at the
    low rate. Three rows take HDET apart. Controls: averages and noise without any spread (alpha = 0), and a placebo
    whose losses are shuffled over the replicas. The defaults take about a quarter of an hour on two cores.

    Writes ablation.json (arguments, versions, every run), table.md and report.html. The same command goes on where it
    was stopped; `--like ablation.json` repeats a study.

    ```
    python -m lab ablate --task feed --seeds 3 --out runs/ablation
    ```
    """
    refuse_torchrun("ablate")
    check_packages()
    output = Output(as_json)
    study = _study(context.params)
    runs = study.runs(out)
    _begin(study, runs, out / "ablation.json", force)

    def work(stop: Stop) -> int | None:
        pending = [run for run in runs if not run.folder.complete]
        if pending and _train(pending, output, stop) == "stopped":
            return None
        _conclude(study, runs, out, output)
        return 0

    return until_stopped(output, out, "the same command goes on (without --force)", work)


def _study(options: Mapping[str, Any]) -> Study:
    """What the options ask for: an earlier study, a quick one, or the usual one with changes."""
    given = {name: options[name] for name in ("seeds", "steps", "replicas", "batch_size", "low", "high")}
    given = {name: value for name, value in given.items() if value is not None}
    if options["like"] is not None:
        if given:
            raise ArgumentError(f"--like takes every argument from its file; leave out --{next(iter(given))}")
        return _like(options["like"])
    task = options["task"].value
    if options["quick"] and task != "feed":
        raise ArgumentError(f"--quick is for the task feed, but the task is {task}; give few --steps instead")
    low, high = RATES[task]
    usual = _QUICK if options["quick"] else Study(task=task, low=low, high=high, batch_size=64)
    return replace(usual, **given)


def _like(path: Path) -> Study:
    try:
        return Study.of(json.loads(path.read_text(encoding="utf-8"))["arguments"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArgumentError(f"--like needs the ablation.json of a study, but {path} is none ({error})") from error


def _begin(study: Study, runs: list[PlannedRun], file: Path, force: bool) -> None:
    """Write the plans of what is not there yet. Another study in the same folder stays as it is."""
    if file.exists() and not force:
        if _like(file) != study:
            raise ArgumentError(f"{file.parent} has another study; name another folder, or replace it with --force")
    elif any(run.folder.taken for run in runs) and not force:
        raise ArgumentError(f"{file.parent} has runs of something else; name another folder, or add --force")
    for run in runs:
        if force or not run.folder.taken:
            run.folder.begin(run.plan, force=force)
    _write(file, described(study, runs))


def _train(pending: list[PlannedRun], output: Output, stop: Stop) -> str:
    jobs = [Job(run.plan.name, run.plan.steps) for run in pending]
    with display_for(output.console, jobs) as display:
        return execute([run.folder for run in pending], pending[0].plan, display.show, stop=stop)


def _conclude(study: Study, runs: list[PlannedRun], out: Path, output: Output) -> None:
    """Numbers, table and page."""
    outcome = described(study, runs)
    table, file = table_of(outcome), out / "ablation.json"
    _write(file, outcome)
    write_atomically(out / "table.md", as_markdown(table))
    page = write_report(
        [load_run(run.folder.path) for run in runs if run.configuration is not None],
        out / "report.html",
        title=f"Ablation on {study.task}",
        table=table,
    )
    output.table(table)
    output.say(f"{file}, {out / 'table.md'}, {page}")
    del outcome["complete"]
    output.result(outcome="complete", out=out, report=page, **outcome)


def _write(file: Path, outcome: Mapping[str, Any]) -> None:
    write_atomically(file, json.dumps(plain_json(outcome), indent=1) + "\n")
