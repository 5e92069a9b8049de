"""lab/experiments/beginnings.py and relu_depth.py: problems whose beginnings are hard."""

from __future__ import annotations

import json

import pytest
import relu_depth
import torch
from beginnings import CASES, BeginningTask, case_of
from torch import nn

from lab.tests.experiments.small_tasks import CPU


@pytest.mark.parametrize("name", CASES)
def test_every_problem_has_a_loss_with_gradients(name: str) -> None:
    task = BeginningTask(name)
    model = task.model(0)
    loss = task.loss(model, task.batch(0, 0))
    loss.backward()
    assert loss.isfinite()
    assert sum(float(p.grad.abs().sum()) for p in model.parameters() if p.grad is not None) > 0
    assert torch.equal(task.batch(1, 3)[0], task.batch(1, 3)[0])


def test_no_tensor_decides_how_long_weights_are() -> None:
    """An output bias of 10 000, and a table that is not used: from a guess that was ruin before."""
    for name in ("bias-300", "unused-300"):
        found = case_of(name, 1, CPU)
        assert found["auto"]["ratio"] < 1.6, name
        assert 0.05 < found["auto"]["found"][0] < 20
        assert found["placebo"]["ratio"] > found["auto"]["ratio"]


# ReLU layers without norms -------------------------------------------------------------------------------------------


def test_a_fixed_rate_trains_as_torch_does() -> None:
    model = relu_depth.network(3, 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=20, cycle_momentum=False)
    stream = torch.Generator().manual_seed(0)
    for _ in range(20):
        x, y = relu_depth.batch(stream, relu_depth.BATCH)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        scheduler.step()
    x, y = relu_depth.batch(torch.Generator().manual_seed(10**6), 4096)
    with torch.no_grad():
        expected = float(nn.functional.mse_loss(model(x), y))
    assert relu_depth.trained("sgd", 3, 20, 0.05, 0, auto=False) == (pytest.approx(expected), 0.05)


def test_a_small_case(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relu_depth, "GRID", [1e-3, 1e-2])
    relu_depth.main(["--kinds", "adam", "--depths", "3", "--steps", "40", "--seeds", "2"])
    (row,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert row["best_rate"] == 1e-2
    assert {start: len(found) for start, found in row["ratios"].items()} == {"0.001": 2, "1.0": 2, "100.0": 2}
