"""The command ``hdet``."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

from hdet.errors import INSTALL, harmless


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and leave with its exit code: 0, 1 (it failed), 2 (bad input) or 130 (Ctrl-C).

    Args:
        arguments: without the program's name; None: those of the process.
    """
    given = sys.argv[1:] if arguments is None else arguments
    check_packages("--json" in given)
    from hdet.cli.app import run

    sys.exit(run(given))


def check_packages(as_json: bool) -> None:
    """Leave with a cure where the packages of a command line are missing."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ModuleNotFoundError as missing:
        sys.exit(complain(f"the command line needs {missing.name}; {INSTALL}", as_json, code=2))


def speaks() -> bool:
    """Whether this process is the one that prints: of the ranks that torchrun started, the first."""
    return os.environ.get("RANK", "0") == "0"


def complain(text: str, as_json: bool, code: int) -> int:
    """One line on stderr, and for programs one on stdout; returns the exit code."""
    line = harmless(" ".join(text.split()))
    if not speaks() and code == 1:  # bad input is the same on all ranks, a failure need not be
        print(f"hdet, rank {os.environ['RANK']}: {line}", file=sys.stderr, flush=True)
    if speaks():
        print(f"hdet: {line}", file=sys.stderr, flush=True)
        if as_json:
            print(json.dumps({"error": line, "code": code}), flush=True)
    return code
