"""The commands of ``python -m lab`` together."""

from __future__ import annotations

from collections.abc import Sequence

import typer

from hdet.cli import app as library
from lab.cli.ablate import ablate
from lab.cli.demo import demo

__all__ = ["app", "run"]

app = library.commands(demo, ablate)


@app.callback(invoke_without_command=True)
def _root(context: typer.Context) -> None:
    """See what hdet does: `python -m lab demo`. Measure the paper's table: `python -m lab ablate --out FOLDER`.

    Every command takes `--json`: one line, the last on stdout; messages go to stderr. Nothing is overwritten without
    `--force`. Exit codes: 0 done, 1 failed, 2 bad input, 128 + n stopped by signal n: 130 by Ctrl-C, 143 by SIGTERM.
    """
    if context.invoked_subcommand is None:
        print(context.get_help())


def run(arguments: Sequence[str]) -> int:
    """Run a command; the exit code."""
    return library.run(arguments, app, "python -m lab")
