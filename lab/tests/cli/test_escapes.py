"""What a run's folder holds reaches the terminal as text: no command of the terminal's own."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.cli.test_escapes import EVIL, is_harmless, told
from tests.report.made_up import write_folder

from lab.cli.display import Job, Lines, Screen
from lab.tests.cli.command import lab_here


def test_complaints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = {"name": EVIL, "task": EVIL, "arguments": {EVIL: EVIL}, "final": {"loss": 1.0, EVIL: 2.0}, "steps": 30}
    folder = write_folder(tmp_path / f"run {EVIL}", **run)
    damaged = write_folder(tmp_path / "damaged", task=EVIL, arguments={"task": EVIL, "steps": EVIL, EVIL: 1})
    for out in (damaged, folder):
        for options in ((), ("--json",)):
            said = lab_here(capsys, "train", "--out", out, "--resume", *options)
            assert said.code != 0
            told(said)


def test_runs_that_are_shown_while_they_train() -> None:
    """A run that is resumed has its name from a file."""
    jobs = [Job(f"{EVIL}[bold]", 10)]
    step: dict[str, Any] = {"kind": "step", "run": 0, "step": 5, "base": [0.1], "loss": 1.25}
    start = {"kind": "start", "run": 0, "steps": 10, "step": 0, "replicas": 1, "groups": ["a"], "method": "none"}
    lines = io.StringIO()
    with Lines(Console(file=lines, width=200), jobs) as display:
        display.show(start)
        display.show(step)
    assert is_harmless(lines.getvalue())
    assert "owned" in lines.getvalue()
    screen = Console(file=io.StringIO(), width=200)
    with Screen(screen, jobs) as live:
        live.show(start)
        live.show(step)
        with screen.capture() as seen:
            screen.print(live._progress)
    assert is_harmless(seen.get())
    assert r"owned\x07\x1b[31mred" in seen.get()
    assert "[bold]" in seen.get()
