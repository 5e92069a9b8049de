"""The command ``python -m lab``."""

from __future__ import annotations

from collections.abc import Sequence

from hdet import cli

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and leave with its exit code: 0, 1 (it failed), 2 (bad input) or 128 + n (stopped).

    Args:
        arguments: without the program's name; None: those of the process.
    """
    cli.main(arguments, "lab.cli.app")
