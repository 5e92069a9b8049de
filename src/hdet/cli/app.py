"""The command line: its commands, and their errors as one line with a cure instead of a traceback."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from hdet._version import __version__
from hdet.cli import complain
from hdet.cli.commands import compare, export, report
from hdet.errors import ArgumentError, HdetError, JournalError

_Usage: type[Exception] = typer.BadParameter.__mro__[2]
"""Click's base class of errors in the command line. Newer versions of typer contain their own click."""


def commands(name: str, *functions: Callable[..., Any]) -> typer.Typer:
    """A command line with a command for each function."""
    made = typer.Typer(
        name=name,
        rich_markup_mode="markdown",
        add_completion=False,
        pretty_exceptions_enable=False,
        no_args_is_help=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    for function in functions:
        made.command()(function)
    return made


app = commands("hdet", compare, report, export)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"hdet {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Look at runs by their journals: draw them, compare them, and take a found schedule with you.

    `journal="run.jsonl"` in `hdet.OneCycleLR` writes a journal. Then:

    ```
    hdet report run.jsonl
    hdet export run.jsonl -o schedule.csv
    ```

    Every command takes `--json`: one line, the last on stdout; messages go to stderr. Nothing is overwritten without
    `--force`. Exit codes: 0 done, 1 failed, 2 bad input, 130 stopped by Ctrl-C.
    """
    if context.invoked_subcommand is None:
        print(context.get_help())


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
        text, context = " ".join(getattr(error, "format_message", error.__str__)().split()), getattr(error, "ctx", None)
        end = "" if text.endswith((".", "?")) else "."
        command = name if context is None else context.command_path
        return complain(f"{text}{end} See `{command} --help`.", as_json, code=2)
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
