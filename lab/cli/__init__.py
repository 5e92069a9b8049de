"""The command ``python -m lab``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from hdet.cli import check_packages

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and leave with its exit code: 0, 1 (it failed), 2 (bad input) or 128 + n (stopped).

    Args:
        arguments: without the program's name; None: those of the process.
    """
    given = sys.argv[1:] if arguments is None else arguments
    check_packages("--json" in given)
    from lab.cli.app import run

    sys.exit(run(given))
