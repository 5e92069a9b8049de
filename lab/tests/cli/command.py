"""``python -m lab`` as a user runs it, as a process or, quicker, by its entry point here; and processes of its runs."""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.cli.command import hdet_here
from tests.patience import PATIENCE

from lab.cli import main

LAB = (sys.executable, "-m", "lab")
lab_here = functools.partial(hdet_here, entry=main)
"""A command in this process."""
DIGITS = ("--task", "digits", "--batch-size", "16", "--eval-every", "100000")


def wait_until(condition: Callable[[], bool], timeout: float = PATIENCE) -> None:
    until = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.05)


def processes_with(path: Path) -> int:
    """How many processes have ``path`` in their command line."""
    return len(pids_with(path))


def pids_with(path: Path) -> list[int]:
    """Processes that have ``path`` in their command line."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # has just ended
            if str(path).encode() in entry.read_bytes():
                found.append(int(entry.parent.name))
    return found
