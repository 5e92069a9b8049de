"""lab/experiments/spikes.py in miniature: a plain run is torch's, faults do harm, and the table has every way."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import sklearn.datasets  # noqa: F401 - here, because its import sets environment variables, and tests must not
import spikes
import torch
from torch import nn


def test_an_undisturbed_run_is_a_plain_loop() -> None:
    task = spikes.WORKLOADS["text"].task()
    model = task.model(2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 0.5 * (1 + math.cos(math.pi * t / 10)))
    for t in range(10):
        optimizer.zero_grad()
        task.loss(model, task.batch(2, t)).backward()
        optimizer.step()
        schedule.step()
    for way in ("nothing", "guard"):
        assert spikes.trained("text", "none", way, 2, 10) == (task.evaluate(model)["loss"], 0, 0, 0)


def test_lost_steps_are_read_from_the_warning() -> None:
    ran = spikes.trained("regression", "flip", "guard", 1, 60)
    assert ran.left == 1
    assert ran.lost > ran.times


def test_a_step_is_skipped_whose_gradient_is_far_longer_than_usual() -> None:
    skipping = spikes._Skipping()
    assert [skipping.skips(norm) for norm in (1.0, 2.0, 50.0, math.nan, math.inf, 1.0)] == [False] * 2 + [True] * 3 + [
        False
    ]


def test_faults_are_what_they_say() -> None:
    model = nn.Linear(3, 2, bias=False)
    before = model.weight.detach().clone()
    spikes.flip(model, 0)
    changed = model.weight.detach()[model.weight.detach() != before]
    assert len(changed) == 1
    assert float(changed.abs()) > 1e30
    model.weight.grad = torch.tensor([[1e-3, -1e-3, 1.0], [0.0, 1e-3, -1.0]])
    spikes.overflow(model)
    assert model.weight.grad.isinf().tolist() == [[False, False, True], [False, False, True]]


def test_a_small_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(spikes, "RESULTS", tmp_path / "spikes.json")
    monkeypatch.setattr(spikes, "WAYS", ("nothing", "guard"))
    arguments = ["--workloads", "digits", "--faults", "overflow", "--seeds", "1", "--runs", "1", "--steps", "40"]
    spikes.main([*arguments, "--write"])
    content = json.loads(spikes.RESULTS.read_text())
    rows = {(row["fault"], row["way"]): row for row in content["rows"]}
    assert list(rows) == list(itertools.product(("none", "overflow"), ("nothing", "guard")))
    assert rows["none", "guard"]["ratios"] == [1.0]
    assert rows["overflow", "nothing"]["ratios"] == [math.inf]
    assert rows["overflow", "guard"]["ratios"][0] < 2
    assert rows["overflow", "guard"]["lost"] == [1], "the gradient was not used"
    assert (content["steps"], content["undisturbed_runs"], content["kept_rollbacks"]) == (40, 1, [])
    spikes.main(["--table"])
    assert "| digits | overflow | lost |" in capsys.readouterr().out


@pytest.mark.parametrize("family", spikes.FAMILIES)
def test_every_family_trains_alike_with_a_guard_that_has_nothing_to_do(family: str) -> None:
    name, ratio, left, times = spikes.alarm((family, "none", "guard", 3, 30))
    assert (name, ratio, left, times) == (family, 1.0, 0, 0)


def test_alarms_are_rollbacks_that_stayed_and_families_that_pay() -> None:
    runs = [("a", 1.0, 0, 1), ("a", 1.05, 0, 1), ("b", 1.3, 1, 2), ("c", 1.5, 0, 0)]
    assert spikes.kept_rollbacks(runs) == [("b", 1.3)]
    assert spikes.costly_families(runs) == [
        ("a (2 runs)", pytest.approx(1.025, abs=1e-3)),
        ("b (1 runs)", pytest.approx(1.3)),
    ]


def test_the_verdict_counts_what_could_be_reached() -> None:
    """A guard may be as far above 1 as the run that leaves the faulty steps out."""

    def row(fault: str, way: str, ratio: float, rollbacks: int = 0) -> dict[str, Any]:
        return {"workload": "regression", "fault": fault, "way": way, "ratios": [ratio], "rollbacks": [rollbacks]}

    rows = [
        row("hot", "guard", 1.09),
        row("hot", "left out", 1.08),
        row("labels", "guard", 1.2),
        row("labels", "left out", 1),
    ]
    rows += [row("high", "guard", 3.0, rollbacks=1), row("high", "left out", 4.0)]
    content = {"rows": rows, "kept_rollbacks": [], "costly_families": [("a", 1.2)], "undisturbed_runs": 2}
    lines = spikes.verdict({**content, "controls": {"wider": 1.0}}).splitlines()
    assert lines[0].startswith("MISS: within 1.02 of left out: 1 of 14")
    assert lines[1] == "MISS: bad data within 1.1; not regression/labels"
    assert lines[2].startswith("PASS: 30 times")
    assert lines[3].startswith("PASS: no rollback kept in 2")
    assert lines[4].endswith("not a/1.200")
    assert lines[5].startswith("PASS: changes that last")


def test_the_page_has_the_figures_of_the_file() -> None:
    page = (Path(spikes.__file__).parents[2] / "docs" / "guard.md").read_text(encoding="utf-8")
    content = json.loads(spikes.RESULTS.read_text())
    faults = dict.fromkeys(row["fault"] for row in content["rows"] if row["fault"] != "none")
    assert len(faults) == 9
    for fault in faults:
        (line,) = (line for line in page.splitlines() if line.startswith(f"| {fault}: "))
        assert line.endswith(f"| {spikes.page_cells(content, fault)} |"), fault
