"""lab/benchmarks/auto_cost.py and guard_cost.py on a CPU."""

from __future__ import annotations

import doctest
import json
import sys
from pathlib import Path

import auto_cost
import pytest
import torch
from gpt import SIZES
from tests.examples.launch import ROOT, output_of

SCRIPT = ROOT / "lab" / "benchmarks" / "auto_cost.py"


def test_its_example_is_true() -> None:
    failed, tried = doctest.testmod(auto_cost)
    assert tried
    assert not failed


def test_it_runs_on_a_cpu() -> None:
    options = ("--device", "cpu", "--ranks", "1", "--size", "gpt-0.02M", "--json")
    found = json.loads(output_of(sys.executable, SCRIPT, *options).splitlines()[-1])
    assert found["ranks_1_percent_S_200"] > found["ranks_1_percent_S_10000"] > 0
    for part in ("step", "look", "keep", "keep_host", "end"):
        assert found[f"ranks_1_{part}_ms"] > 0
    assert found["memory_searching"] > found["memory_descent"] > 2  # there is no device: both snapshots count
    assert found["memory_searching_go_back_false"] > 2  # the origin and the sum of gradients
    assert found["memory_descent_go_back_false"] == pytest.approx(0, abs=0.1)


def test_rows_that_a_file_has_are_not_run_again(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "rows.json"
    table = auto_cost.Table(path)
    row = auto_cost.ROWS[0]
    table.rows.append({"model": row.model, "steps": row.steps, "compiled": row.compiled, "parameters": 1})
    table.memory.append({"model": "gpt-1B", "parameters": 2})
    table.write()
    again = auto_cost.Table(path)
    assert [again.has(row) for row in auto_cost.ROWS[:2]] == [True, False]
    assert (again.has_memory("gpt-1B"), again.has_memory("gpt-86M")) == (True, False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpus_rows_and_memory(tmp_path: Path) -> None:
    rows = [auto_cost.Row("gpt-0.02M", 60, turns=1), auto_cost.Row("gpt-0.02M", 60, compiled=True, turns=1)]
    found = auto_cost.on_gpu(rows, ["gpt-0.02M"], 1e12, tmp_path / "rows.json")
    plain, compiled = found["rows"]
    assert plain["ratio"] > 0
    assert compiled["seconds"]["auto"][0] > 0
    assert compiled["graphs"]["auto"] == compiled["graphs"]["torch"]  # no further graph
    assert found["memory"][0]["searching"] > found["memory"][0]["descent"]


def test_every_row_has_a_model() -> None:
    assert {row.model for row in auto_cost.ROWS} | set(auto_cost.REMEMBERED) <= set(SIZES)


def test_a_guards_cost_on_a_cpu(tmp_path: Path) -> None:
    path = tmp_path / "guard.json"
    few = ("--models", "gpt-0.8M", "--every", "8", "--steps", "8", "--turns", "2")
    output_of(sys.executable, SCRIPT.with_name("guard_cost.py"), "--device", "cpu", *few, "--write", path)
    (row,) = json.loads(path.read_text())["rows"]
    assert (row["model"], row["check_every"], row["memory"]) == ("gpt-0.8M", 8, None)
    assert len(row["ratios"]) == 2
    assert all(ratio > 0 for ratio in row["ratios"])
