"""``python -m lab train``: one run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import typer

from hdet.cli.output import Output, say_what_next
from hdet.errors import ArgumentError
from hdet.report.data import load_run
from hdet.report.verdict import base_movement, verdict
from lab.cli import options as o
from lab.cli.display import Job, display_for
from lab.cli.stopping import until_stopped
from lab.runs.folder import Folder
from lab.runs.launch import RanksFailed, execute
from lab.runs.plan import AUTO, Plan, usual_rate
from lab.runs.ranks import launched_ranks
from lab.runs.stop import Stop

__all__ = ["train"]

_NOT_OF_THE_PLAN = ("out", "resume", "force", "as_json")


def train(
    context: typer.Context,
    out: o.OutFolder,
    task: o.Task = o.TaskName.digits,
    steps: o.Steps = 600,
    replicas: o.Replicas = 1,
    batch_size: o.BatchSize = None,
    eval_every: o.EvalEvery = None,
    seed: o.Seed = 0,
    device: o.Where = o.Device.auto,
    data: o.Data = None,
    lr: o.Lr = None,
    guess: o.Guess = 1e-3,
    method: o.Which = None,
    optimizer: o.OptimizerOption = o.OptimizerName.adam,
    auto_lr: o.AutoLr = True,
    spread: o.Spread = 1 / 9,
    sync_every: o.SyncEvery = None,
    resume: o.Resume = False,
    force: o.Force = False,
    as_json: o.Json = False,
) -> int:
    """Train one run, on as many replicas as you like.

    By default the learning rate is found while it trains: `--lr auto`. A number is the peak of torch's OneCycleLR, or
    with `--method replicas` the rate around which the replicas spread.

    `--replicas N` starts N ranks; under `torchrun -m lab train` they are those that it started.
    Ctrl-C and SIGTERM finish the step and leave a checkpoint; a second one ends at once. A run that was killed goes on
    from the end of its last round.

    ```
    python -m lab train --task digits --out runs/auto
    python -m lab train --task feed --replicas 4 --method replicas --lr 5e-3 --out runs/feed
    python -m lab train --out runs/feed --resume
    ```
    """
    given = [name for name in context.params if _was_given(context, name) and name not in _NOT_OF_THE_PLAN]
    folder, output = Folder(out), Output(as_json)
    plan = _planned(context.params, given)
    if resume:
        plan = _resumed(folder, plan, given)
    return _train(folder, plan, output, resume=resume, force=force)


def _was_given(context: typer.Context, name: str) -> bool:
    """Whether an option stood on the command line, be it with the value of its default."""
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def _planned(options: Mapping[str, Any], given: list[str]) -> Plan:
    """The plan that the options describe."""
    found = launched_ranks()
    if found is not None and "replicas" in given and options["replicas"] != found:
        raise ArgumentError(
            f"--replicas is {options['replicas']}, but torchrun has started {found} ranks; leave out --replicas"
        )
    task, optimizer = options["task"].value, options["optimizer"].value
    if options["data"] is not None and task == "feed":
        raise ArgumentError("--data is for the tasks text and digits, but the task is feed; leave it out")
    rate = _rate(options["lr"])
    usual = "search" if rate in (None, AUTO) else "none"
    method = usual if options["method"] is None else options["method"].value
    plan = Plan(
        task=task,
        steps=options["steps"],
        replicas=found or options["replicas"],
        method=method,
        lr=rate if rate is not None else AUTO if method == "search" else usual_rate(task, optimizer),
        guess=options["guess"],
        optimizer=optimizer,
        batch_size=options["batch_size"],
        seed=options["seed"],
        eval_every=options["eval_every"],
        sync_every=options["sync_every"],
        spread=options["spread"],
        signal="loss" if options["auto_lr"] else "none",
        device=options["device"].value,
        options={"path": str(options["data"].resolve())} if options["data"] is not None else {},
    )
    plan.make_task().batch(plan.seed, 0, 0, plan.replicas)  # raises here what every rank would raise
    return plan


def _rate(text: str | None) -> float | str | None:
    """None: it was not given."""
    if text is None or text == AUTO:
        return text
    try:
        return float(text)
    except ValueError as error:
        raise ArgumentError(f"--lr must be a number or auto, but got {text!r}; for instance --lr 1e-3") from error


def _resumed(folder: Folder, asked: Plan, given: list[str]) -> Plan:
    """The plan of the run that is there. What was given again must say the same."""
    plan = folder.plan()
    ours, theirs = asked.arguments(), plan.arguments()
    for option, field in ((name, {"auto_lr": "signal", "data": "options"}.get(name, name)) for name in given):
        if ours[field] != theirs[field]:
            raise ArgumentError(
                f"--{option.replace('_', '-')} is {ours[field]} here, but the run in {folder.path} has "
                f"{theirs[field]}; leave it out, or start another run in another folder"
            )
    found = launched_ranks()
    if found is not None and found != plan.replicas:
        raise ArgumentError(
            f"the run in {folder.path} has {plan.replicas} replicas, but torchrun has started {found} ranks; "
            f"start {plan.replicas}"
        )
    return plan


def _train(folder: Folder, plan: Plan, output: Output, *, resume: bool, force: bool) -> int:
    if resume and folder.complete:
        output.say(f"the run in {folder.path} is complete")
        return _conclude(folder, output)
    job = Job(plan.name or folder.path.resolve().name, plan.steps)

    def begin() -> None:
        if not resume:
            folder.begin(plan, force=force)

    def work(stop: Stop) -> int | None:
        try:
            with display_for(output.console, [job]) as display:
                outcome = execute([folder], plan, display.show, begin, stop)
        except RanksFailed as error:
            raise RanksFailed(f"{error}; `python -m lab train --out {folder.path} --resume` goes on") from error
        return None if outcome == "stopped" else _conclude(folder, output)

    return until_stopped(output, folder.path, f"go on with: python -m lab train --out {folder.path} --resume", work)


def _conclude(folder: Folder, output: Output) -> int:
    """Say what came of it."""
    run, record = load_run(folder.path), folder.read()
    base = base_movement(run)
    output.say(verdict(run))
    say_what_next(output, run)
    if record["crashed"]:
        output.say("the training came to nothing: try a lower --lr, or --lr auto", style="bold red")
    output.say(f"hdet report {folder.path} draws it")
    output.result(
        outcome="crashed" if record["crashed"] else "complete",
        out=folder.path,
        rate=None if base is None else base.end,
        **{key: record[key] for key in ("task", "steps", "seed", "final", "untrained", "seconds", "arguments")},
    )
    return 1 if record["crashed"] else 0
