"""The command as a user runs it: a process with a time-out and nothing left over; or, quicker, its entry point here."""

from __future__ import annotations

import contextlib
import functools
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from hdet.cli import main
from tests.examples.launch import started as started_together
from tests.patience import PATIENCE

HDET = (sys.executable, "-m", "hdet")
started = functools.partial(started_together, apart=True)
"""A command as a process, with stderr by itself. On leaving it has ended, and what it started too."""
DIGITS = ("--task", "digits", "--batch-size", "16", "--eval-every", "100000")


class Said(NamedTuple):
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """The last line of stdout."""
        return json.loads(self.out.splitlines()[-1])  # type: ignore[no-any-return]

    @property
    def complaint(self) -> str:
        """The one line on stderr."""
        lines = self.err.splitlines()
        assert len(lines) == 1, self.err
        assert lines[0].startswith("hdet: ")
        return lines[0]


def hdet_here(capsys: pytest.CaptureFixture[str], *arguments: object) -> Said:
    """The console script's function, in this process."""
    with pytest.raises(SystemExit) as leaving:
        main([str(one) for one in arguments])
    captured = capsys.readouterr()
    return Said(int(leaving.value.code or 0), captured.out, captured.err)


def said(process: subprocess.Popen[str], timeout: float = PATIENCE) -> Said:
    """Wait for its end."""
    out, err = process.communicate(timeout=timeout)
    return Said(process.returncode, out, err)


def run(*command: object, timeout: float = PATIENCE) -> Said:
    """Start a command and wait for its end."""
    with started(*command) as process:
        return said(process, timeout)


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
