"""lab/experiments/ablation.py: variants change what they say, are kept, and the table says what it says."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import ablation
import pytest
import torch
from ablation import Plan, Problem, bundled, markdown, named, problem_of, run_problem, table_of
from auto_runs import Measured, Run
from real.optimizers import update_of
from variants import ALONE, AS_IT_IS, CHANGES, PLACEBO, VARIANTS, changed, run_of

import hdet.rollback.judge as judging
from hdet.rollback.judge import LIMITS, Limits
from hdet.rollback.policy import Action
from hdet.search.constants import DEFAULT, Constants
from hdet.search.estimate import Sums
from hdet.search.rule import Decision
from lab.tests.experiments.small_tasks import CPU, small

JUDGE = {name: getattr(judging, name) for name in ("BLOCKS",)}
NUMBERS = {**DEFAULT._asdict(), **LIMITS._asdict(), **JUDGE}
STEPS = 60


def tiny(name: str = "tiny") -> Problem:
    task = small("digits")
    return Problem(name, "dev and kin", STEPS, 1e-2, lambda: task, lambda stack: update_of("adamw", stack))


def plan(folder: Path, *variants: str, again: bool = False) -> Plan:
    return Plan(list(variants), folder, CPU, seeds=(0, 1), again=again)


def after_round(run: Run, span: tuple[int, int], measured: Measured) -> Decision:
    run.begun, run.end = span
    return run.after_round(measured)


def test_every_number_is_changed_up_and_down() -> None:
    """Those of runs of unknown length are changed in endless.py: here all runs have one. Two are a guard's."""
    assert set(CHANGES) == set(NUMBERS) - {"assumed_length", "leap", "as_bad"}
    assert len(CHANGES) == 23
    for name, values in CHANGES.items():
        assert min(values) < NUMBERS[name] < max(values), name


def test_a_variant_changes_what_it_names() -> None:
    for name, values in VARIANTS.items():
        run = run_of(name, STEPS, 1e-5, 0)
        own = {**run.rule.constants._asdict(), **run.rule.limits._asdict()}
        assert all(own[key] == value for key, value in values.items() if key in own)
        different = {key for key, value in own.items() if value != NUMBERS[key]}
        assert different == {key for key in values if key in Constants._fields + Limits._fields}, name
    assert not run_of(ALONE, STEPS, 1e-5, 0).losses


def test_the_judges_numbers_are_a_runs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    judge = judging._lower_median
    monkeypatch.setattr(judging, "_lower_median", lambda values: (seen.append(judging.FEWEST), judge(values))[1])
    measured = Measured(1e-3, 1.0, Sums(0.0, 0.0, 0.0), [1.0, 2.0], [0.0, 0.0])
    for name in ("BLOCKS=4", AS_IT_IS, "BLOCKS=16"):
        run = run_of(name, STEPS, 1e-5, 0)
        for span in ((0, 1), (1, 3)):  # the first is not judged
            after_round(run, span, measured)
    assert seen == [2, JUDGE["BLOCKS"] // 2, 8]
    with pytest.raises(RuntimeError), changed({"BLOCKS": 1}):
        assert judging.BLOCKS == 1
        raise RuntimeError
    assert {name: getattr(judging, name) for name in JUDGE} == JUDGE


def test_variants_are_kept_and_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = (AS_IT_IS, "min_rise=1", "estimate_fraction=3.5", "no estimate", "min_steps=80", PLACEBO)
    there = run_problem(plan(tmp_path, *names), tiny())
    assert (tmp_path / "tiny.json").stat().st_size < 2000
    assert list(there["variants"]) == list(names)
    found = {name: row["found"] for name, row in there["variants"].items()}
    assert len({str(rates) for rates in found.values()}) == len(names)  # each variant has done something
    assert sum(found["no estimate"]) < sum(found[AS_IT_IS])
    assert found["min_steps=80"] == [1e-3, 1e-3]  # the guess is kept to
    assert max(there["fixed"]) < there["initial"]
    monkeypatch.setattr(ablation, "trained", lambda plan, problem, variants: pytest.fail(f"runs {variants}"))
    assert run_problem(plan(tmp_path, AS_IT_IS, PLACEBO), tiny()) == there
    for another in (plan(tmp_path, AS_IT_IS, again=True), plan(tmp_path, "straight_tolerance=1")):
        with pytest.raises(BaseException, match="runs"):
            run_problem(another, tiny())
    monkeypatch.setattr(ablation, "library", lambda: "another rule")
    with pytest.raises(BaseException, match="runs"):
        run_problem(plan(tmp_path, AS_IT_IS), tiny())


def test_a_variant_is_the_same_whoever_trains_beside_it(tmp_path: Path) -> None:
    alone = run_problem(plan(tmp_path / "a", "straight_tolerance=1"), tiny())
    beside = run_problem(plan(tmp_path / "b", AS_IT_IS, "BLOCKS=4", "straight_tolerance=1", "max_samples=4"), tiny())
    assert (
        alone["variants"]["straight_tolerance=1"] == beside["variants"]["straight_tolerance=1"]
    )  # to six digits, as the file has them
    assert alone["fixed"] == pytest.approx(beside["fixed"])


def test_parts_are_switched_off() -> None:
    ruined = Measured(1e-3, 1.0, Sums(1.0, 1.0, 1.0, 1.0), [1e9] * 8, [0.0] * 8)
    fine = ruined._replace(losses=[1.0, 2.0] * 4)
    for name, action in ((AS_IT_IS, Action.ROLL_BACK), ("never ruined", Action.NOTHING)):
        run = run_of(name, 200, 1e-5, 0)
        for number in range(4):
            after_round(run, (8 * number, 8 * number + 8), fine)
        assert after_round(run, (32, 40), ruined).action is action
    levels = {}
    for name in (AS_IT_IS, "never straight", "no estimate", "no ceiling"):
        run = run_of(name, 200, 1e-5, 0)
        after_round(run, (0, 1), fine)
        first = run.state.log_factor
        straight = Sums(numerator=1.0, denominator=1.0, rates=1e-9, straight=1e-9)
        after_round(run, (1, 3), fine._replace(sums=straight))
        levels[name] = run.state.log_factor - first
        after_round(run, (3, 5), fine._replace(sums=straight._replace(numerator=-1.0)))
        assert math.isinf(run.state.ceiling) == (name == "no ceiling"), name
    assert levels[AS_IT_IS] == levels["no estimate"] == pytest.approx(math.log(2))
    assert levels["never straight"] <= levels[AS_IT_IS]


def test_table_by_hand() -> None:
    def content(name: str, group: str, worse: float) -> dict[str, Any]:
        variants = {AS_IT_IS: {"losses": [1.0, 4.0]}, "estimate_fraction=3.5": {"losses": [worse, 4 * worse]}}
        return {"problem": name, "group": group, "initial": 100.0, "fixed": [1.0, 2.0], "variants": variants}

    table = table_of([content("a", "zoo 100", 1.1), content("b", "zoo 100", 1.3), content("c", "dev and kin", 0.9)])
    assert table[AS_IT_IS]["zoo 100"].mean == pytest.approx(math.sqrt(2))
    cell = table["estimate_fraction=3.5"]["zoo 100"]
    first, second = math.log(1.1), math.log(1.3)
    assert (cell.worst, cell.difference) == pytest.approx((1.3 * math.sqrt(2), (first + second) / 2))
    assert cell.error == pytest.approx((second - first) / 2)
    assert cell.mark == "worse"
    assert table["estimate_fraction=3.5"]["dev and kin"].mark == ""  # one problem has no error
    text = markdown(table, {"dev and kin": 1, "zoo 100": 2})
    assert "| estimate_fraction=3.5 | 1.273, 1.27 | -0.1054 | 1.691, 1.84 | +0.1788 ± 0.0835 worse |" in text
    assert "| as it is | 1.414, 1.41 |  | 1.414, 1.41 |  |" in text


def test_densities_and_failures() -> None:
    rows = {AS_IT_IS: {"losses": [None]}}
    content = {"initial": 1.0, "fixed": [0.0], "density": True, "variants": rows}
    assert ablation.scores(content) == {AS_IT_IS: 1.0}


def test_names_of_problems() -> None:
    everything = named("dev,kin,zoo")
    assert (len(everything), everything[0]) == (35 + 120, "movielens-factors")
    assert named("zoo100,sorting,zoo/line/adam/100")[:2] == ["sorting", "zoo/function/adam/100"]
    bundles = bundled(everything)
    assert len(bundles) == 35 + 12
    assert ",".join(bundles).split(",") == everything
    for words in ("test", "brain-unet", "nothing", "zoo/line/adam/7"):
        with pytest.raises(SystemExit, match="for judging, but got"):
            named(words)


def test_the_best_rate_is_known_or_asked_for(tmp_path: Path) -> None:
    zoo = tmp_path / "zoo.json"
    zoo.write_text(json.dumps({"grid": {"line/sign/100": [3.0, 1.0, *[2.0] * 18]}}))
    assert problem_of("zoo/line/sign/100", zoo=zoo).rate == pytest.approx(10 ** (-14 / 3))
    (tmp_path / "sorting.json").write_text(json.dumps({"best": {"rate": 0.5}}))
    sorting = problem_of("sorting", tmp_path)
    assert (sorting.group, sorting.rate, sorting.steps) == ("apart", 0.5, 2000)
    with pytest.raises(SystemExit, match=r"Run first: .*real_lr.py --workloads kjv-gpt --rows onecycle"):
        problem_of("kjv-gpt", tmp_path)


def test_the_table_of_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_problem(plan(tmp_path, AS_IT_IS, "estimate_fraction=3.5"), tiny())
    ablation.main(["--table", "--results", str(tmp_path)])
    assert "dev and kin (1): mean, worst" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        ablation.main(["--variants", "estimate_fraction=7"])


def test_no_time_no_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ablation, "problem_of", tiny)
    monkeypatch.setattr(ablation.time, "time", iter([0.0, 9.0]).__next__)
    threads = torch.get_num_threads()
    ablation.main(["--workloads", "sorting", "--seconds", "5", "--device", "cpu"])
    assert capsys.readouterr().out == "sorting: no time left\n"
    torch.set_num_threads(threads)
