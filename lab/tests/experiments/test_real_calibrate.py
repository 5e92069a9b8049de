"""AdamW and NadamW at one setting for all workloads: the steps, the choice, and the rows that use it."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import real.calibrated
import real_calibrate
import real_lr
import torch
from real.calibrated import Calibrated, Setting
from real.rows import Best, calibrated
from stacked import Stack
from torch import nn

from lab.tests.experiments.small_tasks import CPU, bench, small

ADAMW = Setting(False, 0.01, 0.1, (0.8, 0.95), 0.1)
NADAMW = ADAMW._replace(nesterov=True, betas=(0.9, 0.99))
FAR, FARTHER = ADAMW._replace(rate=100.0), NADAMW._replace(rate=1000.0)


def test_every_column_has_its_setting() -> None:
    stack = Stack(small("digits"), [0, 1], 2, CPU)
    first = stack.theta.clone()
    optimizer, rate = Calibrated(stack.theta, [ADAMW, NADAMW]), torch.full_like(stack.theta, 0.01)
    assert all(not tensor.any() for tensor in optimizer.state)
    generator = torch.Generator().manual_seed(4)
    gradients = torch.randn(12, *first.shape, generator=generator, dtype=first.dtype)
    for gradient in gradients:
        optimizer.step_(stack.theta, gradient, rate)
    plain = nn.Parameter(first[1, 0].clone())
    reference = torch.optim.AdamW([plain], 0.01, ADAMW.betas, weight_decay=ADAMW.decay)
    for plain.grad in gradients[:, 1, 0]:
        reference.step()
    torch.testing.assert_close(stack.theta[1, 0], plain.detach())
    w, m, v, (b1, b2) = first[1, 1], 0.0, 0.0, NADAMW.betas
    for t, g in enumerate(gradients[:, 1, 1], 1):
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
        ahead = (b1 * m + (1 - b1) * g) / (1 - b1**t)
        w = (1 - 0.01 * NADAMW.decay) * w - 0.01 * ahead / ((v / (1 - b2**t)).sqrt() + 1e-8)
    torch.testing.assert_close(stack.theta[1, 1], w)


def test_ratios_by_hand() -> None:
    content = {"initial": 5.0, "grid": {"losses": [[4.0, None], [2.0, 3.0], [3.0, 3.0]]}}
    curves = [[[9.0, 2.0], [9.0, 4.0]], [[1.0, math.nan], [1.0, 6.0]]]
    assert real_calibrate.ratios_of(content, curves) == [3.0 / 2.5, 5.0 / 2.5]


def test_calibration_and_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = small("text")
    tiny = SimpleNamespace(
        name="tiny", split="dev", optimizer="adamw", steps=60, customary=1e-2, task=lambda synthetic=False: task
    )
    words = ["--workloads", "dev", "--quick", "--rows", "onecycle", "--results", str(tmp_path)]
    plan, _ = real_lr.parsed(words, {"tiny": tiny})
    with pytest.raises(SystemExit, match="Run first"):
        real_calibrate.calibrate(plan, {"tiny": tiny}, [FAR, ADAMW])
    real_lr.run_workload(plan, tiny)
    found = real_calibrate.calibrate(plan, {"tiny": tiny}, [FAR, ADAMW, FARTHER, NADAMW])
    assert {row: Setting(**one["setting"]) for row, one in found["chosen"].items()} == {
        "adamw-calibrated": ADAMW,
        "nadamw-calibrated": NADAMW,
    }
    monkeypatch.setattr(real_calibrate, "trained", None)  # nothing is trained again
    again = real_calibrate.calibrate(plan, {"tiny": tiny}, [FAR, ADAMW, FARTHER, NADAMW])
    assert again["ratios"]["tiny"] == pytest.approx(found["ratios"]["tiny"], rel=1e-5)

    here, best, wanted = bench("momentum", "text"), Best(1e-2, None), ["adamw-calibrated", "nadamw-calibrated"]
    monkeypatch.setattr(real.calibrated, "FILE", tmp_path / "none.json")
    assert calibrated(here, best, [], [], wanted) == dict.fromkeys(wanted, "run real_calibrate.py first")
    monkeypatch.setattr(real.calibrated, "FILE", tmp_path / "calibrated.json")
    rows = calibrated(here, best, [], [], wanted)
    finals = [outcome.curves[0][0][-1] for outcome in rows.values() if not isinstance(outcome, str)]
    assert len(finals) == 2
    assert finals[0] != finals[1]
    assert max(finals) < here.initial()


def test_only_dev_is_tuned_on() -> None:
    with pytest.raises(SystemExit, match="mnist-cnn"):
        real_calibrate.main(["--workloads", "dev,mnist-cnn", "--quick", "--synthetic"])
