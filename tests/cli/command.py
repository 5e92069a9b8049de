"""The command as a user runs it: a process with a time-out and nothing left over; or, quicker, its entry point here."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest

from hdet.cli import main
from tests.examples.launch import started as started_together
from tests.patience import PATIENCE

HDET = (sys.executable, "-m", "hdet")
started = functools.partial(started_together, apart=True)
"""A command as a process, with stderr by itself. On leaving it has ended, and what it started too."""


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


def hdet_here(
    capsys: pytest.CaptureFixture[str], *arguments: object, entry: Callable[[Sequence[str]], None] = main
) -> Said:
    """The console script's function, in this process; or another command's ``entry``."""
    with pytest.raises(SystemExit) as leaving:
        entry([str(one) for one in arguments])
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
