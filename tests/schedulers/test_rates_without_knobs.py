"""Groups whose rate is no knob train at the plain schedule, whether a journal is kept or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ExponentialLR

import hdet
from tests.processes import run_ranks

STEPS = 12


def begun(journal: Path | None, knob: str = "weight_decay") -> tuple[nn.Linear, hdet.Ensemble]:
    """Rounds of four steps; ``knob``: what is explored, the rate of the first of two groups or another number."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    groups = [{"params": [model.weight], "lr": 1.0}, {"params": [model.bias], "lr": 0.1}]
    optimizer = torch.optim.SGD(groups, weight_decay=1e-3)
    decay = hdet.knobs.optimizer(optimizer, "weight_decay", spread=0.3)
    knobs: list[Any] = [decay] if knob == "weight_decay" else hdet.knobs.lr(optimizer, groups=[0])
    schedule = ExponentialLR(optimizer, 0.9)
    return model, hdet.Ensemble(optimizer, schedule, knobs, sync_every=4, total_steps=STEPS, journal=journal)


def rates_of(ensemble: hdet.Ensemble) -> list[float]:
    return [float(group["lr"]) for group in ensemble.optimizer.param_groups]


@pytest.mark.parametrize("knob", ["weight_decay", "lr"])
@pytest.mark.parametrize("keeps", [True, False])
def test_rates_are_the_schedules_at_every_step(knob: str, keeps: bool, tmp_path: Path) -> None:
    _, ensemble = begun(tmp_path / "run.jsonl" if keeps else None, knob)
    for t in range(STEPS):
        assert rates_of(ensemble) == pytest.approx([0.9**t, 0.1 * 0.9**t], rel=1e-12)
        ensemble.optimizer.step()
        ensemble.step(1.0 / (t + 1))


def test_a_checkpoint_brings_them_along_without_that_of_the_optimizer() -> None:
    _, ensemble = begun(None)
    for _ in range(6):
        ensemble.optimizer.step()
        ensemble.step(1.0)
    _, resumed = begun(None)
    resumed.load_state_dict(ensemble.state_dict())
    assert rates_of(resumed) == rates_of(ensemble)


def test_a_run_of_a_single_step_has_a_checkpoint_too() -> None:
    made = []
    for _ in range(2):
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
        made.append(hdet.Ensemble(optimizer, ExponentialLR(optimizer, 0.9), sync_every=1, total_steps=1))
    made[0].optimizer.step()
    made[0].step(1.0)
    made[1].load_state_dict(made[0].state_dict())
    assert rates_of(made[1]) == rates_of(made[0])


def test_rates_that_no_schedule_writes_are_left_to_others() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=1e-3)
    ensemble = hdet.Ensemble(optimizer, None, [hdet.knobs.optimizer(optimizer, "weight_decay", spread=0.3)])
    beside = ExponentialLR(optimizer, 0.9)
    for t in range(STEPS):
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.9**t, rel=1e-12)
        optimizer.step()
        beside.step()
        ensemble.step(1.0)


def test_the_rank_that_writes_the_journal_trains_like_the_others(tmp_path: Path) -> None:
    """Only rounds average: between them the ranks' weights are equal because their gradients and rates are."""
    first, second = run_ranks(_two_ranks, 2, str(tmp_path / "run.jsonl"))
    assert first["rates"] == second["rates"]
    assert first["apart"] == second["apart"] == [0.0] * STEPS
    assert hdet.read_journal(tmp_path / "run.jsonl").rounds


def _two_ranks(rank: int, path: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, weight_decay=1e-3)
    knobs = [hdet.knobs.optimizer(optimizer, "weight_decay", spread=0.0)]
    schedule = ExponentialLR(optimizer, 0.8)
    ensemble = hdet.Ensemble(
        optimizer, schedule, knobs, controller=False, sync_every=4, total_steps=STEPS, journal=path
    )
    rates, apart = [], []
    for t in range(STEPS):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(10 * t + rank))
        optimizer.zero_grad()
        loss = (ddp(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        rates.append(rates_of(ensemble))
        optimizer.step()
        all_weights = [torch.empty_like(model.weight) for _ in range(2)]
        dist.all_gather(all_weights, model.weight.detach())
        apart.append(float((all_weights[0] - all_weights[1]).norm()))
        ensemble.step(loss.detach())
    return {"rates": rates, "apart": apart}
