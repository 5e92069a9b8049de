"""lab/experiments/kinds.py in miniature: ratios reach their kinds, the common rate is tuned again, files are kept."""

from __future__ import annotations

import dataclasses
import json
import math
from itertools import product
from pathlib import Path
from typing import Any

import kinds
import pytest
from auto_runs import AutoRuns, Run
from kinds import Setting, fixed_lines, gain, searched, summary, told, within
from real.optimizers import update_of
from real.workloads import WORKLOADS
from stacked import Stack

from lab.tests.experiments.small_tasks import CPU
from problems import Problem, problem_of

NAME, STEPS = "adult-widedeep-adamw", 12


def short(name: str = NAME, steps: int = STEPS) -> Problem:
    """A workload's stand-in, cut short."""
    workload = WORKLOADS[name]
    return dataclasses.replace(problem_of(name), steps=steps, build=lambda: workload.task(synthetic=True))


def content_of(fixed: dict[str, dict[float, list[float | None]]], **more: Any) -> dict[str, Any]:
    """A file, from losses by ratios and rates."""
    rows = {words: {"rates": list(row), "losses": list(row.values())} for words, row in fixed.items()}
    sizes = {"embedding": 8, "head": 4}
    return {"workload": "made", "initial": 4.0, "density": False, "sizes": sizes, "fixed": rows, "auto": {}, **more}


@pytest.mark.parametrize("name", [w.name for w in WORKLOADS.values() if w.split in ("dev", "kin")])
def test_every_workload_has_kinds(name: str) -> None:
    sizes = Setting(short(name), [0], CPU).sizes
    assert {*sizes} <= {*kinds.KINDS}
    assert len(sizes) > 1


def test_a_ratio_multiplies_the_rates_of_its_kind_alone() -> None:
    stack = Stack(short().build(), [0], 2, CPU)
    runs = [Run(STEPS, 1e-2, searches=False, ratios=ratios) for ratios in ({}, {"head": 3.0})]
    rates = AutoRuns(stack, update_of("adamw", stack), [runs]).rates[:, 0]
    raised = rates[:, 1] / rates[:, 0]
    wanted = [3.0 if name == "head" else 1.0 for name in stack.group_names]
    assert raised.tolist() == [pytest.approx(wanted)] * STEPS


def test_the_common_rate_is_tuned_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses that are lowest at 1/8 of the best rate with the ratio 10, and at 1 without."""

    def losses(self: Setting, columns: list[list[Run]]) -> list[list[float]]:
        tried.append(len(columns))
        lowest = [self.problem.rate * (1 / 8 if run.ratios else 1) for run, *_ in columns]
        return [[1.0 + abs(math.log(column[0].guess / low))] * 2 for column, low in zip(columns, lowest, strict=True)]

    tried: list[int] = []
    monkeypatch.setattr(Setting, "losses", losses)
    content = content_of({}, shape="onecycle", initial=100.0)
    kinds.add_fixed(content, Setting(short(), [0, 1], CPU), ["", "hidden=10"])
    assert tried == [6, 1, 1, 1]  # 1/4, 1/8 and 1/16 with the ratio
    assert content["fixed"]["hidden=10"]["rates"] == [1 / 16, 1 / 8, 1 / 4, 0.5, 1.0, 2.0]
    assert gain(content, "hidden=10") == (pytest.approx(1.0), 0.0, 1 / 8)
    kinds.add_fixed(content, Setting(short(), [0, 1], CPU), ["", "hidden=10"])
    assert tried[4:] == [0]  # nothing is run again


def test_gains_are_of_the_best_rates_and_count_failed_runs() -> None:
    fixed = {"": {0.5: [3.0, 3.0], 1.0: [2.0, 2.0]}, "embedding=10": {0.5: [1.0, 4.0], 1.0: [1.0, None]}}
    content = content_of(fixed)
    assert gain(content, "embedding=10") == (pytest.approx(1.0), pytest.approx(math.log(2)), 0.5)
    lacking = content_of({"": {1.0: [2.0, 2.0]}}, workload="lacks", sizes={"head": 4})
    worse = content_of({"": {1.0: [2.0]}, "embedding=10": {1.0: [2.88]}}, workload="worse")
    line = list(summary([content, lacking, worse]))[1].split()
    assert line == ["fixed", "embedding=10", "1.1292", "(", "3)", "1.2000", "(", "2)", "1.440", "worse"]


def test_whether_straightness_tells_the_best_ratio() -> None:
    best = {"embedding": 3.0, "head": 0.3}
    fixed = {
        within(f"{kind}={ratio:g}", kinds.KINDS): {1.0: [1.0 + abs(math.log(ratio / best[kind]))]}
        for kind, ratio in product(best, kinds.RATIOS)
    }
    fixed[""] = {1.0: [1.5]}
    paths = [{"embedding": 0.6, "head": 0.1}, {"embedding": 0.1, "head": 0.6}]
    contents = [content_of(fixed, auto={"": {"straight": path}}) for path in paths]
    assert told(contents[:1]) == (pytest.approx(1.0), 2)
    assert told(contents[1:]) == (pytest.approx(-1.0), 2)
    assert told(contents) == (pytest.approx(0.0), 4)
    assert told([content_of({"": fixed[""]})])[1] == 0


def test_a_small_run_of_both_kinds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(kinds, "problem_of", lambda name: short(name, steps=44))
    monkeypatch.setattr(kinds, "WIDER", 0)
    words = ["--workloads", NAME, "--results", str(tmp_path), "--seeds", "2", "--together", "4"]
    kinds.main([*words, "--ratios", "embedding=10", "head=3,embedding=10", "places=10"])
    kinds.main([*words, "--auto", "--ratios", "embedding=10"])
    content = json.loads((tmp_path / f"{NAME}.json").read_text())
    assert set(content["fixed"]) == {"", "embedding=10", "embedding=10,head=3"}
    assert set(content["auto"]) == {"onecycle", "", "embedding=10"}
    assert content["auto"]["onecycle"]["losses"][0] == pytest.approx(content["fixed"][""]["losses"][1], rel=1e-4)
    plain, other = (content["fixed"][words]["losses"] for words in ("", "embedding=10"))
    assert len(plain) == len(other) == 3
    assert all(a != b for row in zip(plain, other, strict=True) for a, b in zip(*row, strict=True))
    assert searched(content, "embedding=10") != 1.0
    assert set(content["auto"][""]["straight"]) == set(content["sizes"])
    assert any("embedding=10,head=3" in line for line in fixed_lines(content))
    capsys.readouterr()
    monkeypatch.setattr(Setting, "losses", None)
    kinds.main([*words, "--table"])
    out = capsys.readouterr().out
    assert f"{NAME}, search: no ratios" in out
    assert "auto  embedding=10" in out
    with pytest.raises(SystemExit, match="seeds"):
        kinds.main([*words, "--seeds", "3"])
