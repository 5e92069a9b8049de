"""The command ``hdet``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and leave with its exit code: 0, 1 (it failed), 2 (bad input) or 128 + n (stopped).

    Args:
        arguments: without the program's name; None: those of the process.
    """
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ModuleNotFoundError as missing:
        cure = "run `pip install '.[cli,report]'` in a checkout of hdet, or `pip install 'hdet[cli,report]'`"
        print(f"hdet: the command line needs {missing.name}; {cure}", file=sys.stderr)
        sys.exit(2)
    from hdet.cli.app import run

    sys.exit(run(sys.argv[1:] if arguments is None else arguments))
