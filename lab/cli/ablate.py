"""``python -m lab ablate``: the paper's table, measured here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from hdet.cli.output import Force, Json, Output
from hdet.errors import ArgumentError
from hdet.report.numbers import plain_json
from hdet.report.page import write_report
from lab.cli.training import check_surroundings, train, until_stopped
from lab.runs.ablation import PlannedRun, Study
from lab.runs.folder import write_atomically
from lab.runs.outcome import as_markdown, described, table_of
from lab.runs.result import figures_of, result_of

__all__ = ["ablate"]

_QUICK = Study(
    seeds=1,
    steps=12,
    warm_steps=4,
    replicas=2,
    batch_size=8,
    high=(0.15,),
    rounds=(4,),
    options={"users": 64, "items": 64, "history": 4, "width": 8, "depth": 1},
    simulated=False,
)
_Seeds = Annotated[int | None, typer.Option(help="Runs per row.", show_default="5")]
_Steps = Annotated[int | None, typer.Option(help="Steps per run.", show_default="200")]
_Replicas = Annotated[int | None, typer.Option(help="Ranks that train together.", show_default="4")]
_Batch = Annotated[int | None, typer.Option(help="Samples per replica and step.", show_default="16")]
_Rounds = Annotated[
    list[int] | None,
    typer.Option("--sync-every", help="T, steps per round; may be given several times.", show_default="4 and 20"),
]
_Real = Annotated[
    bool, typer.Option("--real", help="Ranks as processes, with journals and a report; otherwise they are simulated.")
]
_Low = Annotated[float | None, typer.Option(help="The good low rate.", show_default="5e-3")]
_High = Annotated[
    list[float] | None,
    typer.Option(help="A rate at the border of stability; several are allowed.", show_default="0.04, 0.06"),
]
_Quick = Annotated[bool, typer.Option("--quick", help="Tiny runs that say nothing, to see that all works.")]
_Like = Annotated[Path | None, typer.Option("--like", help="Repeat the study of this ablation.json.")]
_Out = Annotated[Path, typer.Option("--out", help="Folder of the study; what is complete in it is kept.")]


def ablate(
    context: typer.Context,
    out: _Out,
    seeds: _Seeds = None,
    steps: _Steps = None,
    replicas: _Replicas = None,
    batch_size: _Batch = None,
    low: _Low = None,
    high: _High = None,
    sync_every: _Rounds = None,
    real: _Real = False,
    like: _Like = None,
    quick: _Quick = False,
    force: Force = False,
    as_json: Json = False,
) -> int:
    """Measure the paper's table: its six configurations as printed and as corrected, controls, and arms.

    Baseline-Low and -High are plain training at two rates. Warm-Init begins with noisy weights of a short run at the
    low rate. The rows of HDET share gradients; arms have their own. Controls: averages and noise without any spread
    (alpha = 0), and a placebo whose losses are shuffled over the replicas. Ranks are simulated, as rows of one tensor;
    the search, and with --real all of them, are processes. The defaults take up to half an hour on two free cores.

    Writes ablation.json (arguments, versions, every run), table.md and, with --real, report.html. After it was stopped,
    the same command goes on with the runs that are not complete; `--like ablation.json` repeats a study.

    ```
    python -m lab ablate --out runs/ablation
    ```
    """
    check_surroundings("ablate")
    output = Output(as_json)
    study = _study(context.params)
    runs = study.runs(out)
    _begin(study, runs, out / "ablation.json", force)

    def work() -> None:
        pending = [run for run in runs if force or not run.folder.complete]
        if pending:
            train([run.folder for run in pending], [run.plan for run in pending], output)
        _conclude(study, runs, out, output)

    return until_stopped(output, out, "the same command goes on (without --force)", work)


def _study(options: Mapping[str, Any]) -> Study:
    """What the options ask for: an earlier study, a quick one, or the usual one with changes."""
    given = {name: options[name] for name in ("seeds", "steps", "replicas", "batch_size", "low")}
    several = {"high": options["high"], "rounds": options["sync_every"]}
    given |= {name: tuple(values) if values else None for name, values in several.items()}
    given |= {"simulated": False if options["real"] else None}
    given = {name: value for name, value in given.items() if value is not None}
    if options["like"] is not None:
        if given:
            names = {"rounds": "sync-every", "simulated": "real"}
            first = next(iter(given))
            raise ArgumentError(f"--like takes every argument from its file; leave out --{names.get(first, first)}")
        return _like(options["like"])
    return replace(_QUICK if options["quick"] else Study(), **given)


def _like(path: Path) -> Study:
    try:
        return Study.of(json.loads(path.read_text(encoding="utf-8"))["arguments"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArgumentError(f"--like needs the ablation.json of a study, but {path} is none ({error})") from error


def _begin(study: Study, runs: list[PlannedRun], file: Path, force: bool) -> None:
    """Write down what is studied. Another study in the same folder stays as it is."""
    if file.exists() and not force:
        if _like(file) != study:
            raise ArgumentError(f"{file.parent} has another study; name another folder, or replace it with --force")
    elif any(run.folder.taken for run in runs) and not force:
        raise ArgumentError(f"{file.parent} has runs of something else; name another folder, or add --force")
    file.parent.mkdir(parents=True, exist_ok=True)
    _write(file, described(study, [] if force else runs))


def _conclude(study: Study, runs: list[PlannedRun], out: Path, output: Output) -> None:
    """Numbers, table and page."""
    outcome = described(study, runs)
    table, file = table_of(outcome), out / "ablation.json"
    _write(file, outcome)
    write_atomically(out / "table.md", as_markdown(table))
    shown = [result_of(run.folder) for run in runs if run.row is not None and not run.plan.simulated]
    drawn, title = [one.journal for one in shown if one.journal is not None], f"Ablation on {study.task}"
    page = write_report(drawn, out / "report.html", title=title, table=table, figures=figures_of(shown))
    output.table(table)
    output.say(f"{file}, {out / 'table.md'}, {page}")
    del outcome["complete"]
    output.result(outcome="complete", out=out, report=page, **outcome)


def _write(file: Path, outcome: Mapping[str, Any]) -> None:
    write_atomically(file, json.dumps(plain_json(outcome), indent=1) + "\n")
