"""lab/experiments/real/calibrated.py and real_calibrate.py: one setting for all workloads, chosen on dev and kin."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import real.calibrated
import real_calibrate
import real_table
import torch
from real.calibrated import GRID, LABELS, Setting, best_of, trained, warmed
from real.rows import NOT_CALIBRATED, Best, one_setting
from real.workloads import WORKLOADS

from lab.tests.experiments.small_tasks import bench

SETTING = Setting(1e-2, 0.9, 0.99, 0.1, 0.2)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_column_is_torchs_optimizer(ahead: bool) -> None:
    """torch's NAdam changes its momentum in the course of a run, unless that is over at once."""
    here = bench(steps=12, seeds=(0,))
    curves, _ = trained(here, [SETTING, SETTING._replace(rate=1e-3)], [ahead, not ahead])
    model = here.task.model(0)
    parameters = [p for group in here.task.groups(model) for p in group["params"]]
    options: dict[str, Any] = {"betas": (SETTING.first, SETTING.second), "weight_decay": SETTING.decay}
    if ahead:
        options |= {"momentum_decay": 1e4, "decoupled_weight_decay": True}
    optimizer = (torch.optim.NAdam if ahead else torch.optim.AdamW)(parameters, lr=1.0, **options)
    for t in range(12):
        optimizer.param_groups[0]["lr"] = SETTING.rate * float(warmed(12, SETTING.warm_up)[t])
        optimizer.zero_grad()
        here.task.loss(model, here.task.batch(0, t)).backward()
        optimizer.step()
    stack = here.stack(1)
    stack.theta[0, 0] = torch.cat([p.detach().flatten() for p in parameters])
    assert curves[0][0][-1] == pytest.approx(stack.validation(stack.theta).item(), rel=1e-5)


def test_a_rate_rises_and_falls() -> None:
    found = warmed(100, 0.1)
    assert found[:100].argmax() == 9
    assert found.max() == 1
    assert found[0] == pytest.approx(0.1)
    assert found[99] == 0
    assert warmed(10, 0.0)[0] == 1


def test_the_best_setting_is_best_in_the_mean_of_logarithms() -> None:
    assert best_of({"a": [1.0, 1.1], "b": [100.0, 80.0]}) == 1
    assert best_of({"a": [1.0, 2.0], "b": [100.0, 80.0]}) == 0


def test_only_dev_and_kin_are_open() -> None:
    known = {split: SimpleNamespace(split=split) for split in ("dev", "kin", "seen", "test")}
    assert real_calibrate.names_of("dev,kin", known) == ["dev", "kin"]
    for closed in ("seen", "test", "dev,test", "unknown"):
        with pytest.raises(SystemExit, match="dev and kin only"):
            real_calibrate.names_of(closed, known)
    names = real_calibrate.names_of("dev,kin", WORKLOADS)
    assert len(names) == 34  # all but sorting
    assert {WORKLOADS[name].split for name in names} == {"dev", "kin"}


def test_a_calibration_is_kept_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "calibrated.json"
    words = ["--quick", "--synthetic", "--workloads", "mnist-softmax,narrow-likelihood", "--file", str(file)]
    real_calibrate.main(words)
    found = json.loads(file.read_text())
    assert [*found["losses"]] == ["mnist-softmax", "narrow-likelihood"]
    assert found["chosen"].keys() == LABELS.keys()
    for row in LABELS:
        own = best_of({name: rows[row] for name, rows in found["losses"].items()})
        assert real.calibrated.chosen(row, file) == Setting(*found["grid"][own]) == GRID[::8][own]
    monkeypatch.setattr(real_calibrate, "losses_of", lambda *_: pytest.fail("it was trained again"))
    real_calibrate.main(words)


def test_runs_that_fail_count_as_the_first_weights() -> None:
    here = bench(steps=20, seeds=(0,))
    here.evaluations = 1
    good, bad = real_calibrate.losses_of(here, [SETTING._replace(rate=r) for r in (3e-3, 1e30)], False)[
        "adamw-calibrated"
    ]
    stack = here.stack(1)
    assert bad == pytest.approx(stack.validation(stack.theta).item())
    assert good < bad


def test_rows_wait_for_the_calibration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "calibrated.json"
    monkeypatch.setattr(real.calibrated, "FILE", file)
    here, best = bench(steps=6), Best(1e-2, None)
    assert one_setting(here, best, [], [], [*LABELS]) == dict.fromkeys(LABELS, NOT_CALIBRATED)
    file.write_text(json.dumps({"chosen": {row: SETTING._asdict() for row in LABELS}}))
    found = one_setting(here, best, [], [], [*LABELS])
    curves = {name: outcome.curves for name, outcome in found.items() if not isinstance(outcome, str)}
    assert curves.keys() == LABELS.keys()
    assert curves["adamw-calibrated"] != curves["nadamw-calibrated"]
    assert all(math.isfinite(loss) for rows in curves.values() for row in rows for curve in row for loss in curve)
    assert real_table.read(tmp_path, "dev") == []  # the file is no workload's
