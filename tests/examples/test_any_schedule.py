"""examples/any_schedule.py, started by torchrun and without it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import hdet
from tests.examples.launch import EXAMPLES, TORCHRUN, output_of

pytest.importorskip("sklearn")
SCRIPT = EXAMPLES / "any_schedule.py"
LINE = re.compile(r"^step (\d+): rate (\S+); validation accuracy ([\d.]+)%$", re.MULTILINE)


def lines(output: str) -> list[tuple[float, ...]]:
    """(step, rate, accuracy) of every line."""
    found = [tuple(float(part) for part in match) for match in LINE.findall(output)]
    assert found, output
    return found


def test_two_processes_find_one_rate_which_follows_the_schedule(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    options = ("--steps=200", "--lr=1e-6", f"--journal={path}")
    rows = lines(output_of(*TORCHRUN, "--nproc-per-node=2", SCRIPT, *options))
    assert [row[0] for row in rows] == [20 * i for i in range(1, 11)]
    assert rows[-1][2] > 70
    rates = {row[0]: row[1] for row in rows}
    assert rates[200] == pytest.approx(0.01 * rates[160], rel=1e-2)  # the decay goes from 1 to 0.01
    journal = hdet.read_journal(path)
    assert journal.header["arguments"]["schedule"] == "SequentialLR"
    assert journal.rounds[-1]["learned"][0] > 100  # the guess was far too low
    shapes = {record["step"]: record["shape"][0] for record in journal.rounds}
    assert {shape for step, shape in shapes.items() if step <= 160} == {1e-6}  # the warm-up is held at its end


def test_one_process_needs_no_launcher() -> None:
    assert [row[0] for row in lines(output_of(sys.executable, SCRIPT, "--steps=40"))][-1] == 40
