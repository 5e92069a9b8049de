"""lab/benchmarks/guard_cost.py: the whole on a CPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.examples.launch import ROOT, output_of

SCRIPT = ROOT / "lab" / "benchmarks" / "guard_cost.py"


def test_it_runs_on_a_cpu(tmp_path: Path) -> None:
    path = tmp_path / "guard.json"
    few = ("--models", "gpt-0.8M", "--every", "8", "--steps", "8", "--turns", "2")
    output_of(sys.executable, SCRIPT, "--device", "cpu", *few, "--write", path)
    (row,) = json.loads(path.read_text())["rows"]
    assert (row["model"], row["every"], row["memory"]) == ("gpt-0.8M", 8, None)
    assert len(row["ratios"]) == 2
    assert all(ratio > 0 for ratio in row["ratios"])
