"""lab/experiments/study.py in miniature, its table by hand, and the recommender that it trains."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
import study
import torch
from real.problems.recommender import LIKED, Recommender
from study import ROWS, Tail, main
from study_table import LABELS, against, front, metric_table, page, rate_table, table

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
    assert {run["pass"] for run in runs} == {"scan", "grid", "fresh", "auto", "guard", "bytes", "accumulated"}
    assert {run["row"] for run in runs} == {*LABELS}
    for run in runs:
        seeds = {"scan": 1, "grid": 1}.get(run["pass"], 2)
        assert len(run["loss"]) == len(run["crashed"]) == len(run[METRICS[name]]) == seeds
    grid = {run["rate"] for run in runs if (run["pass"], run["row"]) == ("grid", "arms")}
    for rate in (factor * content["best"] for factor in study.FACTORS):
        assert min(grid, key=lambda tried: abs(tried - rate)) == pytest.approx(rate)
    assert not [run for run in runs if (run["pass"], run["row"]) == ("grid", "placebo")]
    fresh = [run for run in runs if run["pass"] == "fresh"]
    own = [{run["rate"] for run in fresh if run["row"] == row} for row in ("shared", "placebo")]
    assert own[0] == own[1]
    main(words)  # nothing is left to do
    assert json.loads((tmp_path / f"{name}.json").read_text())["runs"] == runs
    capsys.readouterr()
    main([*words, "--table"])
    out = capsys.readouterr().out
    assert f"| {ROWS['arms-last'].label} | 4 |" in out
    assert out.startswith("| loss ÷ plain training's at its best rate |")


def test_bad_words(capsys: pytest.CaptureFixture[str]) -> None:
    for bad, word in ((["--tasks", "feet"], "--tasks"), (["--quick"], "--results")):
        with pytest.raises(SystemExit):
            main(bad)
        assert word in capsys.readouterr().err


def test_runs_of_other_settings_are_not_lost(tmp_path: Path) -> None:
    file = tmp_path / "text.json"
    file.write_text('{"runs": ["hours of work"]}')
    with pytest.raises(SystemExit, match="move it away"):
        main(["--quick", "--tasks", "text", "--results", str(tmp_path)])
    assert "hours of work" in file.read_text()


def test_runs_of_another_text_are_not_mixed_in(tmp_path: Path) -> None:
    """Each Python has a standard library of its own."""
    setting, file = study.small(study.SETTINGS["text"]), tmp_path / "text.json"
    made = study.Study(setting, tmp_path, torch.device("cpu"))
    made._save()
    study.Study(setting, tmp_path, torch.device("cpu"))
    file.write_text(json.dumps({**json.loads(file.read_text()), "reference": 3.25}))
    with pytest.raises(SystemExit, match=r"\(reference\)"):
        study.Study(setting, tmp_path, torch.device("cpu"))


def test_nothing_is_begun_that_would_end_too_late(tmp_path: Path) -> None:
    made = study.Study(study.small(study.SETTINGS["text"]), tmp_path, torch.device("cpu"), until=time.time() + 60)
    made._pace[made._kind(1)] = 60.0  # seconds of a step
    assert not made.run()
    assert not made.content["runs"]


def test_a_pass_goes_as_far_as_there_is_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it lacks is made by the next call, and no run twice; the pace of another machine says nothing."""
    setting, seconds = study.small(study.SETTINGS["text"]), iter([5.0, 5.0, -1.0, -1.0])
    first = study.Study(setting, tmp_path, torch.device("cpu"))
    first._pace |= {"another machine, 1": 1e9, first._kind(1): 2.4 / setting.steps}  # of five seconds
    monkeypatch.setattr(first, "_left", lambda: next(seconds))
    columns = [study.Column("plain", study.ROWS["plain"], 0, rate) for rate in (0.1, 0.01, 0.001)]
    assert not first._train("scan", columns, (0,))
    assert [run["rate"] for run in first.content["runs"]] == [0.1, 0.01]
    second = study.Study(setting, tmp_path, torch.device("cpu"))
    assert second._train("scan", columns, (0,))
    assert [run["rate"] for run in second.content["runs"]] == [0.1, 0.01, 0.001]


def test_a_summed_step_takes_as_long_as_its_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = study.small(study.SETTINGS["text"])
    made = study.Study(setting, tmp_path, torch.device("cpu"))
    made._pace[made._kind(1)] = 1.0
    monkeypatch.setattr(made, "_left", lambda: 6.5 * setting.steps)
    column = study.Column("accumulated", study.ROWS["plain"], 20, 0.1)
    summed = study.Bench(setting.make_task(7), torch.device("cpu"))
    assert not made._train("accumulated", [column], (0,), bench=summed)
    assert not made.content["runs"]


def test_a_guarded_rate_is_kept_as_soon_as_it_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = study.Study(study.small(study.SETTINGS["text"]), tmp_path, torch.device("cpu"))
    made.content["best"], begun = 0.01, []

    def ends_early(job: tuple[Any, ...]) -> dict[str, float]:
        begun.append(job[1:3])
        if job[1] > 0.01:
            raise KeyboardInterrupt
        return {"loss": 1.0, "rollbacks": 0}

    monkeypatch.setattr(study, "guarded", ends_early)
    with pytest.raises(KeyboardInterrupt):
        made._guard()
    again = study.Study(made.setting, tmp_path, torch.device("cpu"))
    assert [row["rate"] for row in again.content["runs"]] == [0.01]
    monkeypatch.setattr(study, "guarded", lambda job: begun.append(job[1:3]) or {"loss": 2.0, "rollbacks": 1})
    assert again._guard()
    assert [row["rate"] for row in again.content["runs"]] == [0.01, 0.02, 0.04]
    assert begun == [(0.01, 0), (0.01, 1), (0.02, 0), *((rate, seed) for rate in (0.02, 0.04) for seed in (0, 1))]
    assert again._guard()  # nothing is left to do
    assert len(begun) == 7


def test_fewer_steps_see_the_last_samples() -> None:
    """The feed's held-out samples follow those of a whole run, and fashions drift."""
    setting = study.small(study.SETTINGS["feed"])
    bench = study.Bench(setting.make_task(), torch.device("cpu"), first=setting.steps - 3)
    made = bench.supply([0], 3).batches
    for t in range(3):
        for part, own in zip(made, bench.task.batch(0, setting.steps - 3 + t), strict=True):
            assert torch.equal(part[t, 0], own)


@pytest.mark.parametrize(("in_time", "columns"), [(math.inf, 2), (1.9, 1), (0.9, 0)])
def test_a_stack_is_as_large_as_memory_and_time_allow(
    monkeypatch: pytest.MonkeyPatch, in_time: float, columns: int
) -> None:
    task = study.small(study.SETTINGS["text"]).make_task()  # eight samples of 16 tokens
    monkeypatch.setattr(study, "_ITEMS_AT_ONCE", 3 * 8 * 16 * 2)
    assert study._at_once(task, 1, 3, in_time) == columns
    monkeypatch.setattr(study, "_ITEMS_AT_ONCE", 1)  # one does not fit, and is tried
    assert study._at_once(task, 1, 3, in_time) == min(columns, 1)


def run(name: str, row: str, every: int | None, rate: float, *losses: float | None) -> dict[str, Any]:
    about = {"pass": name, "row": row, "T": every, "rate": rate, "seeds": [*range(len(losses))]}
    crashed = [loss is None for loss in losses]
    return {**about, "loss": [*losses], "crashed": crashed, "auc_like": [0.5 + rate] * len(losses)}


CONTENT = {
    "task": "feed",
    "best": 0.1,
    "runs": [
        run("scan", "plain", None, 0.1, 5.0),  # the grid has it too, and counts
        run("scan", "plain", None, 0.4, 4.0),
        run("grid", "plain", None, 0.1, 2.0),
        run("grid", "plain", None, 0.2, None),
        run("fresh", "plain", None, 0.1, 1.0, 3.0, 2.0),
        run("fresh", "plain", None, 0.2, 0.5, None, 0.5),
        *(run("grid", "arms", 20, rate, loss) for rate, loss in ((0.1, 1.01), (0.2, 1.0), (0.4, 1.02), (0.8, 1.03))),
        run("fresh", "arms", 20, 0.1, 0.25, 0.75, 0.5),  # lower, but at a rate that the grid did not choose
        run("fresh", "arms", 20, 0.2, 0.5, 1.5, 1.0),
        run("auto", "auto", None, 0.3, 2.0, 6.0),
        run("auto", "auto", None, 0.1, None, 6.0),
        run("bytes", "bytes", 20, 0.1, 4.0, 12.0, 8.0),
        run("bytes", "bytes", 20, 0.2, 2.0, 6.0, 4.0),
    ],
}


def test_the_table_by_hand() -> None:
    """Ratios are of the same seeds; the grid chooses rates, and those that it does not choose have a line for each."""
    assert table(CONTENT).splitlines()[2:] == [
        f"| {LABELS['plain']} |  | 1 | 2.0000 ± 1.0000 |  | crashed | factor 1 or more | 0 of 3 |",
        f"| {LABELS['arms']} | 20 | 2 | 1.0000 ± 0.5000 | 0.500 (0.500 to 0.500) | 0.250, - | factor 4 or more "
        "| 0 of 3 |",
        "| `hdet.auto` on all ranks |  | 1 | none | crashed |  |  | 1 of 2 |",
        "| `hdet.auto` on all ranks |  | 3 | 4.0000 ± 2.8284 | 2.000 (2.000 to 2.000) |  |  | 0 of 2 |",
        f"| {LABELS['bytes']} | 20 | 2 | 4.0000 ± 2.0000 | 2.000 (2.000 to 2.000) | 4.000 |  | 0 of 3 |",
    ]


def test_the_table_of_a_study_that_has_not_ended(tmp_path: Path) -> None:
    """Of a scan there is none; a method whose best rate has not been run on fresh seeds has no line."""
    better = run("grid", "arms", 20, 1.6, 0.5)
    arms = f"| {LABELS['arms']} |"
    assert arms in table(CONTENT)
    assert arms not in table({**CONTENT, "runs": [*CONTENT["runs"], better]})
    (tmp_path / "feed.json").write_text(json.dumps({"task": "feed", "runs": CONTENT["runs"][:2]}))
    assert page(tmp_path) == ""
    assert front(tmp_path) == "Nothing has been run as far as its grid."


def test_the_rates_by_hand() -> None:
    """Over plain training's lowest, 2; within 2 % of a line's own lowest in bold."""
    assert rate_table(CONTENT).splitlines() == [
        "| method | T | × 1 | × 2 | × 4 | × 8 |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
        f"| {LABELS['plain']} |  | **1.000** | inf | 2.000 |  |",
        f"| {LABELS['arms']} | 20 | **0.505** | **0.500** | **0.510** | 0.515 |",
    ]


def test_the_front_by_hand(tmp_path: Path) -> None:
    """Each line at its own best rate, and at eight times the scan's; guesses as lowest to highest; a dash: not run."""
    told = [run("auto", "auto", None, 0.2, 1.0, 3.0, 2.0), run("auto", "auto", None, 0.4, 2.0, 6.0, 4.0)]
    runs = [one for one in CONTENT["runs"] if one["row"] != "auto"] + told
    fresh = run("fresh", "arms", 20, 0.8, 1.5, 4.5, 3.0)

    def cells(*more: dict[str, Any]) -> list[list[str]]:
        (tmp_path / "feed.json").write_text(json.dumps({**CONTENT, "runs": [*runs, *more]}))
        return [line.strip("| ").split(" | ")[-2:] for line in front(tmp_path).splitlines()[2:]]

    not_run = ["-", "-"]
    assert cells() == [["1.000", "-"], *[not_run] * 5, ["0.500", "0.52"], *[not_run] * 2, ["1.000 to 2.000", "-"]]
    assert cells(fresh)[6] == ["0.500", "*1.50*"]  # of fresh seeds
    assert cells({**fresh, "loss": [1.5, None, 3.0]})[6] == ["0.500", "*crashed*"]


def test_the_tasks_by_hand() -> None:
    lines = metric_table(CONTENT).splitlines()
    assert lines[0] == "| method | T | AUC like |"
    assert lines[2:4] == [f"| {LABELS['plain']} |  | 0.6000 |", f"| {LABELS['arms']} | 20 | 0.7000 |"]
    assert metric_table({"task": "text", "best": 1.0, "runs": []}) == ""


def test_an_interval_by_students_t() -> None:
    """Ratios e^0.1, e^0.2 and e^0.3: the middle is e^0.2, and Student's t says 4.303 standard errors."""
    plain = {"seeds": [0, 1, 2], "loss": [1.0, 1.0, 1.0]}
    off = 4.303 * 0.1 / math.sqrt(3)
    said = against({"seeds": [0, 1, 2], "loss": [math.exp(0.1), math.exp(0.2), math.exp(0.3)]}, plain)
    assert said == f"{math.exp(0.2):.3f} ({math.exp(0.2 - off):.3f} to {math.exp(0.2 + off):.3f})"


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
