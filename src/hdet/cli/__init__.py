"""The command ``hdet``. Its packages, typer and rich, are optional, and are imported when it runs."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Sequence
from importlib import import_module

from hdet.errors import INSTALL, harmless


def main(arguments: Sequence[str] | None = None, commands: str = "hdet.cli.app") -> None:
    """Run a command and leave with its exit code: 0, 1 (it failed), 2 (bad input) or 130 (Ctrl-C).

    Args:
        arguments: without the program's name; None: those of the process.
        commands: the module that has them, and ``run``.
    """
    given = sys.argv[1:] if arguments is None else arguments
    if sys.stdout is None:  # as by `>&-`
        sys.exit(complain("stdout is closed: redirect it to a file, or to /dev/null", as_json=False, code=1))
    try:
        run = import_module(commands).run
    except ModuleNotFoundError as missing:
        sys.exit(complain(f"the command line needs {missing.name}; {INSTALL}", "--json" in given, code=2))
    except KeyboardInterrupt:  # importing takes most of a short command's time
        sys.exit(complain("stopped", "--json" in given, code=128 + signal.SIGINT))
    sys.exit(run(given))


def complain(text: str, as_json: bool, code: int) -> int:
    """Print an error as one line on stderr, and with ``--json`` also on stdout. Returns the exit code."""
    line = harmless(" ".join(text.split()))
    print(f"hdet: {line}", file=sys.stderr, flush=True)
    if as_json:
        print(json.dumps({"error": line, "code": code}), flush=True)
    return code
