"""The ablation as plans, and its table as texts; what it measures is measured by the command's own test."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.examples.launch import ROOT

import hdet
from hdet.report import numbers as say
from lab.runs.ablation import CONFIGURATIONS, CRASH, LOW, Study
from lab.runs.folder import Folder
from lab.runs.outcome import as_markdown, described, table_of, wilson
from lab.runs.plan import Plan
from lab.runs.run import has_crashed


def plans_of(study: Study, out: Path, seed: int = 0) -> dict[str, Plan]:
    return {run.row.key: run.plan for run in study.runs(out) if run.row and run.seed == seed}


def test_the_papers_rows_the_controls_and_arms(tmp_path: Path) -> None:
    plans = plans_of(Study(high=(0.1, 0.2), rounds=(4, 20)), tmp_path)
    published = [3.294, 4.169, 4.674, 3.280, 3.281, 3.277, 3.281, 3.277]
    assert [one.published for one in CONFIGURATIONS if one.published] == published
    assert {one.key for one in CONFIGURATIONS if one.warm} == {
        "warm-init", "hdet-no-auto-lr", "printed", "corrected", "no-spread", "placebo",
    }  # fmt: skip
    assert {key for key, plan in plans.items() if plan.guess == LOW} == {
        "baseline-low-0.005", "warm-init-0.005", "printed-0.005-T4", "printed-0.005-T20", "corrected-0.005-T4",
        "corrected-0.005-T20", "arms-0.005-T4", "arms-0.005-T20", "arms-spread-0.005-T4", "arms-spread-0.005-T20",
    }  # fmt: skip
    assert (plans["search-0.2"].lr, plans["search-0.2"].guess) == ("auto", 0.2)
    assert not plans["search-0.2"].simulated
    assert all(plan.simulated for key, plan in plans.items() if not key.startswith("search"))
    assert plans["hdet-no-auto-lr-0.1-T20"].sync_every == 20
    assert plans["printed-0.1-T4"].signal == "printed"
    assert (plans["no-spread-0.1-T4"].spread, plans["no-spread-0.1-T4"].noise) == (0.0, 0.01)
    assert plans["placebo-0.1-T4"].spread == plans["corrected-0.1-T4"].spread == 1 / 9
    assert {key.rsplit("-0.", 1)[0] for key, plan in plans.items() if plan.method == "arms"} == {
        "arms", "arms-spread", "arms-corrected", "arms-placebo",
    }  # fmt: skip
    assert len(plans) == 10 + 2 * (2 + 11 * 2 + 1)


def test_warm_starts_come_first_and_see_other_samples(tmp_path: Path) -> None:
    runs = Study(seeds=2, high=(0.1,), rounds=(4,)).runs(tmp_path)
    first, second = (i for i, run in enumerate(runs) if run.row is None)
    assert first == 0
    assert runs[0].plan.seed not in {run.plan.seed for run in runs if run.row}
    assert {run.plan.start for run in runs[:second]} == {None, str(runs[0].folder.checkpoint.resolve())}
    assert {run.plan.start for run in runs[second:]} == {None, str(runs[second].folder.checkpoint.resolve())}


def test_a_study_survives_json() -> None:
    study = Study(seeds=2, options={"users": 64})
    assert Study.of(json.loads(json.dumps(study.arguments()))) == study


def test_refuses() -> None:
    with pytest.raises(hdet.ArgumentError, match="low must be above 0 and below high"):
        Study(low=0.2, high=(0.3, 0.1))
    with pytest.raises(hdet.ArgumentError, match="seeds must be an integer, at least 1"):
        Study(seeds=0)
    with pytest.raises(hdet.ArgumentError, match=r"give an ablation\.json"):
        Study.of({"task": "feed"})


def test_mean_spread_and_crashes(tmp_path: Path) -> None:
    study = Study(seeds=2, high=(0.15,), rounds=(4,))
    runs = study.runs(tmp_path)
    finals = {
        "baseline-low-0.005": (0.70, 0.72), "baseline-high-0.15": (0.91, math.nan), "corrected-0.15-T4": (math.nan,) * 2
    }  # fmt: skip
    for run in runs:
        key = run.row.key if run.row else ""
        if key in finals:
            loss = finals[key][run.seed]
            metrics = {"loss": loss, "train_loss": loss, "auc_like": 0.6, "auc_dwell": 0.7, "ne_like": 0.9}
            _pretend(run.folder, run.plan, metrics, crashed=not loss < 0.9)
    outcome = described(study, runs)
    rows = {(row[0], row[2]): row[3:] for row in table_of(outcome).rows}
    low = ("–", "0 of 2 (0.00 to 0.66)", "0.7100 ± 0.0141", "0.7100 ± 0.0141", "0.6500 ± 0.0000", "0.9000 ± 0.0000")
    assert rows["Baseline-Low", say.rate(0.005)] == (*low, "3.294")
    high = rows["Baseline-High", say.rate(0.15)]
    assert high[1:4] == ("2 of 2 (0.34 to 1.00)", "0.9100, 1 not finite", "0.9100, 1 not finite")
    assert high[-1] == "4.169, crashed"
    assert rows["HDET, full, corrected", say.rate(0.15)][:4] == (
        "4",
        "2 of 2 (0.34 to 1.00)",
        "not finite",
        "not finite",
    )
    assert rows["control: HDET with losses shuffled", say.rate(0.15)] == ("4", *["–"] * 6)  # not run yet
    assert not outcome["complete"]
    assert outcome["torch"]
    assert CRASH in table_of(outcome).caption
    assert as_markdown(table_of(outcome)).startswith("| configuration |")
    assert "warm-start-1/checkpoint.pt" in json.dumps(outcome)
    assert str(tmp_path) not in json.dumps(outcome)  # a study may be moved, and its file be shown to others
    again = Study.of(json.loads(json.dumps(outcome["arguments"])))
    assert again == study
    assert again.runs(tmp_path)[3].plan == runs[3].plan


@given(st.integers(1, 60), st.data())
def test_wilsons_interval_holds_the_share_and_shrinks(of: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, of))
    low, high = wilson(count, of) or (1.0, 0.0)
    assert 0 <= low <= count / of <= high <= 1
    wider = wilson(count, of)
    narrower = wilson(10 * count, 10 * of)
    assert wider is not None
    assert narrower is not None
    assert narrower[1] - narrower[0] < wider[1] - wider[0]
    mirrored = wilson(of - count, of)
    assert mirrored == pytest.approx([1 - high, 1 - low])


def _pretend(folder: Folder, plan: Plan, final: dict[str, float], crashed: bool) -> None:
    folder.begin(plan)
    folder.write(folder.read() | {"complete": True, "crashed": crashed, "final": final, "seconds": 1.0})


def test_what_has_crashed_in_the_stored_study_follows_from_its_losses() -> None:
    """Of warm runs too: the bar is the loss of fresh weights, which are the same for all runs of a seed."""
    stored = json.loads((ROOT / "lab" / "experiments" / "results" / "ablation_border.json").read_text())
    fresh: dict[int, float] = {}
    for row in stored["configurations"]:
        for run in row["runs"]:
            assert fresh.setdefault(run["seed"], run["untrained_loss"]) == run["untrained_loss"]
            loss = math.nan if run["loss"] is None else run["loss"]
            assert run["crashed"] is has_crashed(run["untrained_loss"], loss, run["plan"]["steps"])
        assert row["crashed"] == sum(run["crashed"] for run in row["runs"])
