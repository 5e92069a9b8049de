"""lab/experiments/study.py in miniature, its table by hand, and the recommender that it trains."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import study
import torch
from real.problems.recommender import LIKED, Recommender
from study import ROWS, Tail, main, table, width

METRICS = {"feed": "auc_like", "text": "loss", "movielens": "auc_watched"}


@pytest.mark.slow
@pytest.mark.parametrize("name", METRICS)
def test_in_miniature(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--quick", "--tasks", name, "--results", str(tmp_path)]
    main([*words, "--seconds", "0"])
    assert "not done" in capsys.readouterr().out
    main(words)
    content = json.loads((tmp_path / f"{name}.json").read_text())
    runs = content["runs"]
    assert {run["pass"] for run in runs} == {"scan", "grid", "fresh", "auto", "guard", "bytes"}
    assert {run["row"] for run in runs} == {*study.LABELS}
    for run in runs:
        seeds = {"scan": 1, "grid": 1}.get(run["pass"], 2)
        assert len(run["loss"]) == len(run["crashed"]) == len(run[METRICS[name]]) == seeds
    grid = {run["rate"] for run in runs if (run["pass"], run["row"]) == ("grid", "arms")}
    assert [*sorted(grid)] == pytest.approx([factor * content["best"] for factor in study.FACTORS])
    main(words)  # nothing is left to do
    assert json.loads((tmp_path / f"{name}.json").read_text())["runs"] == runs
    capsys.readouterr()
    main([*words, "--table"])
    assert f"| {ROWS['arms-last'].label} | 4 |" in capsys.readouterr().out


def test_bad_words(capsys: pytest.CaptureFixture[str]) -> None:
    for bad, word in ((["--tasks", "feet"], "--tasks"), (["--quick"], "--results")):
        with pytest.raises(SystemExit):
            main(bad)
        assert word in capsys.readouterr().err


def run(name: str, row: str, every: int | None, rate: float, *losses: float | None) -> dict[str, Any]:
    crashed = [loss is None for loss in losses]
    return {"pass": name, "row": row, "T": every, "rate": rate, "loss": [*losses], "crashed": crashed}


def test_the_table_by_hand() -> None:
    runs = [
        run("fresh", "plain", None, 0.1, 1.0, 3.0),
        run("fresh", "plain", None, 0.2, 2.0, None),  # crashed: worse than any loss
        run("fresh", "arms", 20, 0.2, 1.0, 1.0),
        run("auto", "auto", None, 0.3, 4.0, 4.0),
        *(run("grid", "arms", 20, rate, loss) for rate, loss in ((0.1, 1.01), (0.2, 1.0), (0.4, 1.02), (0.8, 1.03))),
    ]
    lines = table({"task": "feed", "runs": runs}).splitlines()
    assert lines[4:] == [
        "| plain data-parallel |  | 0.1 | 2.0000 ± 1.4142 | 1.000 |  | 1 of 4 |",
        "| arms, no spread | 20 | 0.2 | 1.0000 ± 0.0000 | 0.500 | factor 4 | 0 of 2 |",
        "| `hdet.auto` on all ranks |  | 0.3 | 4.0000 ± 0.0000 | 2.000 |  | 0 of 2 |",
    ]
    assert width(runs, "plain", None) == ""


def test_the_tail_is_the_mean_of_ten() -> None:
    tail = Tail(100)
    for t in range(1, 101):
        tail(t, torch.tensor([float(t)]))
    assert tail.mean.item() == pytest.approx(sum(range(91, 101)) / 10)


def test_the_recommenders_constants() -> None:
    """A model that says the same of every film has the loss that is stated, and no better ranking than chance."""
    task = Recommender("movielens", synthetic=True, width=4, hidden=8)
    model = task.model(0)
    ratings = torch.cat([batch[2] for batch in task.validation()]).float()
    share = float((ratings >= LIKED).float().mean())
    head: Any = model.get_submodule("head")
    with torch.no_grad():
        head.weight.zero_()
        best = [0.0, math.log(share / (1 - share)), float((ratings.mean() - task._mean) / task._deviation)]
        head.bias.copy_(torch.tensor(best))
    found = task.evaluate(model)
    assert found["loss"] == pytest.approx(task.constant_loss, rel=1e-3)
    assert found["auc_watched"] == found["auc_liked"] == 0.5
    assert found["ne_liked"] == pytest.approx(1.0, abs=1e-5)
    assert found["rmse_rating"] == pytest.approx(float(ratings.std(correction=0)), rel=1e-5)
