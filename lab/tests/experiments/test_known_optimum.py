"""lab/experiments/known_optimum.py, small: its JSON, and that the controller finds what the placebo does not."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from tests.examples.launch import ROOT, output_of

KNOBS = {"lr", "weight_decay", "label_smoothing", "dropout", "temperature"}


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    """What ``--quick --json`` prints last: half a minute on a free core."""
    script = ROOT / "lab" / "experiments" / "known_optimum.py"
    return json.loads(output_of(sys.executable, script, "--quick", "--json").splitlines()[-1])


def verdicts(result: dict[str, Any], arrangement: str) -> list[dict[str, Any]]:
    return [row for row in result["verdicts"] if row["arrangement"] == arrangement]


def test_json_has_every_knob(result: dict[str, Any]) -> None:
    assert {"experiment", "seeds", "rounds", "problems", "runs", "placebo", "verdicts", "targets"} <= set(result)
    assert result["rounds"] == 60
    for part in ("problems", "runs", "placebo", "verdicts"):
        assert {row["knob"] for row in result[part]} == KNOBS
    row = result["runs"][0]
    assert {"seed", "arrangement", "replicas", "controller", "start", "best", "end", "error", "found"} <= set(row)
    assert set(result["targets"].values()) <= {"PASS", "MISS"}


def test_grid_agrees_with_algebra(result: dict[str, Any]) -> None:
    for problem in result["problems"]:
        assert problem["grid"] == pytest.approx(problem["algebra"], rel=0.15), problem["knob"]


def test_controller_beats_the_placebo(result: dict[str, Any]) -> None:
    for row in verdicts(result, "alone"):
        assert row["mean_error"] < row["placebo_mean_error"] / 3, row
    # With all five at once not every knob has the time to arrive; most must.
    better = [row["knob"] for row in verdicts(result, "joint") if row["mean_error"] < row["placebo_mean_error"] / 2]
    assert len(better) >= 4, better


def test_placebo_stays(result: dict[str, Any]) -> None:
    for row in result["verdicts"]:
        assert row["placebo_q95"] <= row["leash"], row
