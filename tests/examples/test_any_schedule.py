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
LINE = re.compile(
    r"^step (\d+): lr\[weights\] (\S+), lr\[biases\] (\S+), weight_decay\[weights\] (\S+); "
    r"validation accuracy ([\d.]+)%$",
    re.MULTILINE,
)


def lines(output: str) -> list[tuple[float, ...]]:
    """(step, rate of the weights, rate of the biases, weight decay, accuracy) of every line."""
    found = [tuple(float(part) for part in match) for match in LINE.findall(output)]
    assert found, output
    return found


def test_two_replicas_explore_around_the_schedule(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    options = ("--steps=200", "--sync-every=20", f"--journal={path}")
    rows = lines(output_of(*TORCHRUN, "--nproc-per-node=2", SCRIPT, *options, timeout=110))
    assert [row[0] for row in rows] == [20 * i for i in range(1, 11)]
    assert rows[-1][4] > 70
    journal = hdet.read_journal(path)
    assert journal.header["knobs"] == ["lr[weights]", "lr[biases]", "weight_decay[weights]"]
    assert journal.header["arguments"]["schedule"] == "SequentialLR"
    first, second = (replica["values"] for replica in journal.rounds[0]["replicas"])
    assert all(a != b for a, b in zip(first, second, strict=True))


def test_one_process_follows_the_plain_schedule() -> None:
    rows = lines(output_of(sys.executable, SCRIPT, "--steps=100", "--sync-every=20"))
    rates = {row[0]: row[1] for row in rows}
    assert rates[10] == rates[50] == rates[80] == 1e-3  # warm, stable, before the decay
    assert rates[90] == pytest.approx(1e-3 * (1 + 0.01) / 2, rel=1e-3)  # half-way down
    assert rates[100] == pytest.approx(1e-5, rel=1e-3)
    assert all(row[3] == 0.1 for row in rows)
