"""The ablation as plans, and its table as texts; what it measures is measured by the command's own test."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

import hdet
from lab.runs.ablation import CONFIGURATIONS, CRASH, RATES, Study
from lab.runs.folder import Folder
from lab.runs.outcome import as_markdown, described, table_of
from lab.runs.plan import Plan


def plans_of(study: Study, out: Path, seed: int = 0) -> dict[str, Plan]:
    return {run.configuration.key: run.plan for run in study.runs(out) if run.configuration and run.seed == seed}


def test_the_published_rows_and_the_controls(tmp_path: Path) -> None:
    study = Study()
    plans = plans_of(study, tmp_path)
    low, high = RATES["feed"]
    assert len(CONFIGURATIONS) == 9
    assert [one.published for one in CONFIGURATIONS] == [3.294, 4.169, 4.674, 3.280, 3.281, 3.277, None, None, None]
    assert {key for key, plan in plans.items() if plan.start} == {
        "warm-init", "hdet-no-auto-lr", "hdet", "no-spread", "placebo",
    }  # fmt: skip
    assert {key for key, plan in plans.items() if plan.lr == low} == {"baseline-low"}
    assert {key for key, plan in plans.items() if plan.lr == high} == set(plans) - {"baseline-low", "search"}
    assert (plans["search"].lr, plans["search"].guess) == ("auto", high)
    assert plans["hdet-no-auto-lr"].signal == "none"
    assert (plans["no-spread"].spread, plans["no-spread"].noise) == (0.0, 0.01)
    assert plans["placebo"].signal == "shuffled"
    assert plans["placebo"].spread == plans["hdet"].spread == 1 / 9


def test_warm_starts_come_first_and_see_other_samples(tmp_path: Path) -> None:
    runs = Study(seeds=2).runs(tmp_path)
    assert [i for i, run in enumerate(runs) if run.configuration is None] == [0, 10]
    assert runs[0].plan.seed not in {run.plan.seed for run in runs if run.configuration}
    assert runs[1 + 2].plan.start == str(runs[0].folder.checkpoint.resolve())
    assert runs[11 + 2].plan.start == str(runs[10].folder.checkpoint.resolve())


def test_a_study_survives_json() -> None:
    study = Study(seeds=2, options={"users": 64})
    assert Study.of(json.loads(json.dumps(study.arguments()))) == study


def test_refuses() -> None:
    with pytest.raises(hdet.ArgumentError, match="low must be above 0 and below high"):
        Study(low=0.2, high=0.1)
    with pytest.raises(hdet.ArgumentError, match="seeds must be an integer, at least 1"):
        Study(seeds=0)
    with pytest.raises(hdet.ArgumentError, match=r"give an ablation\.json"):
        Study.of({"task": "feed"})


def test_mean_spread_and_crashes(tmp_path: Path) -> None:
    study = Study(seeds=2)
    runs = study.runs(tmp_path)
    finals = {"baseline-low": (0.70, 0.72), "baseline-high": (0.91, math.nan), "hdet": (math.nan, math.nan)}
    for run in runs:
        key = run.configuration.key if run.configuration else ""
        if key in finals:
            loss = finals[key][run.seed]
            crashed = not loss < 0.9
            _pretend(run.folder, run.plan, {"loss": loss, "train_loss": loss}, crashed=crashed)
    outcome = described(study, runs)
    rows = {row[0]: row for row in table_of(outcome).rows}
    assert rows["Baseline-Low"][3:] == ("0.7100 ± 0.0141", "0.7100 ± 0.0141", "–", "3.294")
    assert rows["Baseline-High"][3:] == ("0.9100, 1 not finite", "0.9100, 1 not finite", "2 of 2", "4.169, crashed")
    assert rows["HDET, full"][3:6] == ("not finite", "not finite", "2 of 2")
    assert rows["control: placebo"][3:] == ("–", "–", "–", "–")  # not run yet
    assert not outcome["complete"]
    assert outcome["torch"]
    assert CRASH in table_of(outcome).caption
    assert as_markdown(table_of(outcome)).startswith("| configuration |")
    assert "warm-start-1/checkpoint.pt" in json.dumps(outcome)
    assert str(tmp_path) not in json.dumps(outcome)  # a study may be moved, and its file be shown to others
    again = Study.of(json.loads(json.dumps(outcome["arguments"])))
    assert again.runs(tmp_path)[3].plan == runs[3].plan


def _pretend(folder: Folder, plan: Plan, final: dict[str, float], crashed: bool) -> None:
    folder.begin(plan)
    folder.write(folder.read() | {"complete": True, "crashed": crashed, "final": final, "seconds": 1.0})
