"""examples/demo.py, small: the table, the failures, and that nothing is left running."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import pytest

import hdet
from tests.examples.launch import EXAMPLES, output_of, started

pytest.importorskip("sklearn")
pytest.importorskip("rich")
DEMO = (sys.executable, EXAMPLES / "demo.py", "--seeds=1", "--replicas=2")


def test_prints_a_table_and_leaves_a_journal(tmp_path: Path) -> None:
    output = output_of(*DEMO, "--steps=60", f"--out={tmp_path}")
    for row in ("validation loss", "accuracy, %", "multiplier, conv", "round ends"):
        assert row in output
    assert "one seed: no spread known" in output
    assert "hdet.OneCycleLR, seed 0: step 60 of 60" in output  # no terminal here: plain lines
    assert len(hdet.read_journal(tmp_path / "seed-0.jsonl").rounds) == 4


def test_failure_is_one_line(tmp_path: Path) -> None:
    with started(*DEMO, "--steps=0", f"--out={tmp_path}") as process:
        text, _ = process.communicate(timeout=90)
    assert process.returncode == 1
    assert text.splitlines()[-1].startswith("demo: ValueError: Expected positive integer total_steps")
    assert "Traceback" not in text


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes in /proc")
def test_interrupt_leaves_no_process(tmp_path: Path) -> None:
    with started(*DEMO, "--steps=100000", f"--out={tmp_path}") as process:
        assert process.stdout is not None
        assert any("step" in line for line in iter(process.stdout.readline, "") if "OneCycleLR" in line)
        assert len(running_with(tmp_path)) == 4  # the demo, torchrun, two replicas
        process.send_signal(signal.SIGINT)
        text, _ = process.communicate(timeout=60)
    assert text.splitlines()[-1] == "demo: stopped"
    assert process.returncode == 1
    deadline = time.monotonic() + 10
    while running_with(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert running_with(tmp_path) == []


def running_with(path: Path) -> list[str]:
    """Command lines of the processes that have ``path`` in them."""
    lines = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(entry.read_bytes().decode(errors="replace"))
        except OSError:  # has just ended
            continue
    return [line for line in lines if str(path) in line]
