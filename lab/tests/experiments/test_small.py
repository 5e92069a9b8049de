"""Small tasks: each trains, and a cell of their table is what it says."""

from __future__ import annotations

import json
import math
from pathlib import Path

import changed_rule
import pytest
import small
import small_problems
import torch
from small_problems import SMALL, model_of

from hdet.rule.constants import DEFAULT


@pytest.mark.parametrize("name", SMALL)
def test_a_task_is_a_function_of_its_seed_and_can_be_learned(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SMALL, name, SMALL[name]._replace(steps=25))
    rate = {"sgd": 3e-5 if name == "unscaled" else 1e-2, "adagrad": 1e-1}.get(SMALL[name].optimizer, 3e-3)
    first, again = (small.run(small.Job(name, 1, rate))["score"] for _ in range(2))
    assert first == again < SMALL[name].score(model_of(SMALL[name], 1))


def test_the_global_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    small_problems._turned.cache_clear()
    small.run(small.Job("fine-tuning", 0, 1e-3))
    assert torch.equal(before, torch.get_rng_state())


def test_all_samples_are_a_batch_without_noise() -> None:
    task, stream = SMALL["picture"], torch.Generator().manual_seed(0)
    assert all(map(torch.equal, task.draw(stream, task.batch), task.held_out()))


def test_a_table_of_two_rules(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "small.json"
    losses = [[3.0, 3.0]] * len(small.RATES)
    losses[9] = [2.0, 0.5]
    path.write_text(json.dumps({"rates": small.RATES, "sweeps": {"topics": losses}}))
    call = f"--tasks topics --seeds 1 --processes 1 --json {path} --write --change prior_weight=0"
    small.main(call.split())
    kept = json.loads(path.read_text())
    assert kept["best"]["topics"] == {"rate": pytest.approx(small.RATES[9]), "loss": pytest.approx(1.0)}
    scores = [run["score"] for run in kept["runs"]["topics"]]
    assert len(scores) == 2
    head, line, *sums = capsys.readouterr().out.splitlines()
    assert head.split()[-1] == "prior_weight=0"
    assert line.split()[:2] == ["topics", f"{math.sqrt(math.prod(scores)):.2f}"]
    # the mean of its kind; of runs far above the best or near it, the share that is unsure
    assert [one.split()[0] for one in sums] == ["small", "unsure"]


def test_a_change_of_constants_is_read_as_it_is_written() -> None:
    assert small.constants_of("") == DEFAULT
    assert small.constants_of("min_round=3,backoff=2.5") == DEFAULT._replace(min_round=3, backoff=2.5)
    with pytest.raises(AttributeError, match="nothing"):
        small.constants_of("nothing=1")


def test_rules_are_compared_in_one_stack(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    problem = changed_rule.problem_of("zoo/softmax/adam/100")
    monkeypatch.setattr(changed_rule, "problem_of", lambda name: problem)
    monkeypatch.setattr(problem, "steps", 60)
    changed_rule.main(
        ["--workloads", "blocks-graph", "--seeds", "1", "--change", "initial_factor=1e-4", "max_climb=0.1"]
    )
    row = json.loads(capsys.readouterr().out)
    assert row["workload"] == "blocks-graph"
    assert row["as it is"] != row["max_climb=0.1"]
    assert all(0.2 < ratio < 100 for ratio, _ in (row["as it is"], row["initial_factor=1e-4"]))
