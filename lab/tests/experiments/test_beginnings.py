"""lab/experiments/beginnings.py: problems whose beginnings are hard, as rows of a stack."""

from __future__ import annotations

import pytest
import torch
from beginnings import CASES, BeginningTask, case_of

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
