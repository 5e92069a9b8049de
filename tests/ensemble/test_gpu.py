"""On a GPU: no step inside a round synchronises, and a tensor rate does not recompile."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import hdet

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_no_step_inside_a_round_synchronises() -> None:
    model = nn.Linear(8, 8).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    scheduler = hdet.OneCycleLR(optimizer, 0.1, 1000, sync_every=100)
    x = torch.randn(4, 8, device="cuda")
    for t in range(60):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        torch.cuda.set_sync_debug_mode("error" if t > 5 else "default")
        try:
            scheduler.step(loss)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert math.isfinite(scheduler._run.losses.mean())


def test_mean_of_device_losses() -> None:
    optimizer = torch.optim.Adam(nn.Linear(2, 2).cuda().parameters(), lr=0.1)
    scheduler = hdet.OneCycleLR(optimizer, 0.1, 1000)
    loss = torch.tensor(1.0, device="cuda", dtype=torch.float64)
    scheduler.observe(loss)
    loss.fill_(5.0)
    scheduler.observe(loss)
    scheduler.observe(3.0)
    assert scheduler._run.losses.mean() == 3.0
