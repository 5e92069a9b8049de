"""Golden histories: constant gradients, so that a person can check every number.

Two replicas, spread 1/2 (multipliers 1/2 and 3/2), plain SGD on one number with gradient 1, so that a step subtracts
the rate. ``pytest --regenerate`` writes the file anew; read the difference before you commit it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import hdet
from tests.processes import run_ranks

pytestmark = pytest.mark.quick

GOLDEN = Path(__file__).parent / "golden"
CASES: dict[str, dict[str, Any]] = {
    "fixed": {"auto_lr": False},
    "schedule": {"auto_lr_start": 3},
    "exponential": {"auto_lr_start": 3, "decay": "exponential"},
}


@pytest.mark.parametrize("case", CASES)
def test_history(case: str, regenerate: bool) -> None:
    history = {"arguments": CASES[case], "replicas": run_ranks(_train, 2, CASES[case])}
    path = GOLDEN / f"{case}.json"
    if regenerate:
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(history, indent=1) + "\n")
    expected = json.loads(path.read_text())
    for ours, theirs in zip(history["replicas"], expected["replicas"], strict=True):
        for key in ours:
            assert ours[key] == pytest.approx(theirs[key], rel=1e-12), key


def test_what_a_person_can_check() -> None:
    """At constant gradient 1 the mean of the replicas is the path of the base rate, whatever the spread."""
    first, second = run_ranks(_train, 2, CASES["fixed"])
    base = [(a + b) / 2 for a, b in zip(first["rate"], second["rate"], strict=True)]
    assert [a / b for a, b in zip(first["rate"][:3], base[:3], strict=True)] == pytest.approx([0.5] * 3)
    at_the_ends = [first["theta"][t - 1] for t in (3, 6, 8, 9)]
    assert at_the_ends == pytest.approx([-sum(base[:t]) for t in (3, 6, 8, 9)])
    assert first["theta"] != second["theta"]


def _train(rank: int, arguments: dict[str, Any]) -> dict[str, list[float]]:
    theta = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))
    optimizer = torch.optim.SGD([theta], lr=1.0)
    scheduler = hdet.OneCycleLR(
        optimizer,
        max_lr=1.0,
        total_steps=9,
        spread=0.5,
        sync_every=3,
        cycle_momentum=False,
        anneal_strategy="linear",
        div_factor=2.0,
        final_div_factor=2.0,
        **{"auto_lr": hdet.Corrected(sigma=1.0, meta_momentum=0.0, meta_lr=1.0), **arguments},
    )
    history: dict[str, list[float]] = {"rate": [], "theta": [], "base": []}
    for t in range(9):
        theta.grad = torch.ones_like(theta)
        history["rate"].append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step(float(abs(3 - t)) + rank)  # replica 1 is always worse by 1
        history["theta"].append(theta.item())
        history["base"].append(float(scheduler.base_lrs_now[0]))
    return history
