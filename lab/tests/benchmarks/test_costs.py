"""lab/benchmarks/auto_cost.py and guard_cost.py on a CPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import auto_cost
import pytest
import torch
from tests.examples.launch import ROOT, output_of


def test_a_row_and_its_memory_which_are_not_measured_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, cpu = tmp_path / "deep" / "rows.json", torch.device("cpu")
    rows = [auto_cost.Row("gpt-0.02M", 60, turns=1)]
    auto_cost.measured(auto_cost.Table(path), rows, ["gpt-0.02M"], cpu, 1e12)
    content = json.loads(path.read_text())
    (row,), (memory,) = content["rows"], content["memory"]
    assert row["ratio"] > 0
    assert all(row["parts_ms"][part] > 0 for part in ("step", "look", "keep", "keep_host", "end"))
    assert memory["searching"] > memory["descent"] > 2  # there is no device: both snapshots count
    assert memory["searching_go_back_false"] > 2  # the origin and the sum of gradients
    assert memory["descent_go_back_false"] == pytest.approx(0, abs=0.1)
    capsys.readouterr()
    auto_cost.measured(auto_cost.Table(path), rows, ["gpt-0.02M"], cpu, 1e12)
    assert not capsys.readouterr().out


def test_a_guards_cost_on_a_cpu(tmp_path: Path) -> None:
    path = tmp_path / "guard.json"
    few = ("--models", "gpt-0.8M", "--every", "8", "--steps", "8", "--turns", "2")
    output_of(sys.executable, ROOT / "lab" / "benchmarks" / "guard_cost.py", "--device", "cpu", *few, "--write", path)
    rows = json.loads(path.read_text())["rows"]
    assert [row["fused"] for row in rows] == [False, True]
    for row in rows:
        assert (row["model"], row["check_every"], row["memory"]) == ("gpt-0.8M", 8, None)
        assert len(row["ratios"]) == 2
        assert all(ratio > 0 for ratio in row["ratios"])
