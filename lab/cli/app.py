"""The commands of ``python -m lab`` together."""

from __future__ import annotations

import signal
from collections.abc import Sequence

import typer

from hdet.cli import app as library
from hdet.cli import complain
from lab.cli.ablate import ablate
from lab.cli.demo import demo
from lab.cli.train import train
from lab.runs.stop import Terminated, terminating

__all__ = ["app", "run"]

app = library.commands("lab", demo, train, ablate)


@app.callback(invoke_without_command=True)
def _root(context: typer.Context) -> None:
    """Train small tasks with hdet: find the learning rate, or let replicas explore it.

    Begin with `python -m lab demo`. Then train one of the tasks, look at the run, and take its schedule with you:

    ```
    python -m lab train --task digits --out runs/first
    hdet report runs/first
    hdet export runs/first -o schedule.csv
    ```

    Every command takes `--json`: one line, the last on stdout; messages go to stderr. Nothing is overwritten without
    `--force`. Exit codes: 0 done, 1 failed, 2 bad input, 128 + n stopped by signal n: 130 by Ctrl-C, 143 by SIGTERM.
    """
    if context.invoked_subcommand is None:
        print(context.get_help())


def run(arguments: Sequence[str]) -> int:
    """Run a command; the exit code."""
    try:
        with terminating():
            return library.run(arguments, app, "python -m lab")
    except Terminated:
        return complain("stopped", "--json" in arguments, code=128 + signal.SIGTERM)
