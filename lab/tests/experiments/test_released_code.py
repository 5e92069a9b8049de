"""lab/experiments/released_code.py: it tells a scheduler that does what the paper says from one that does not."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.examples.launch import ROOT, output_of, started
from tests.patience import PATIENCE

SCRIPT = ROOT / "lab" / "experiments" / "released_code.py"
RELEASED = "HDET_RELEASED_CODE"
CHECKS = ["fan-out", "averaging without auto-LR", "decay", "epochs", "global RNG", "sigma"]
SHORT = """
import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import OneCycleLR

FAULTY = {faulty}


class OneCycleAutoLR(OneCycleLR):
    def __init__(
        self, optimizer, max_lr, total_steps=None, epochs=None, steps_per_epoch=None, rank=0, world_size=1,
        auto_lr_warmup_steps=0, ensemble_lr_spread_ratio=0.0, model_sync_interval=1, enable_auto_lr=False,
        loss_scale=0.002 if FAULTY else 0.1, momentum_of_lr=0.9,
    ):
        self.every, self.warm, self.spread = model_sync_interval, auto_lr_warmup_steps, ensemble_lr_spread_ratio
        self.auto, self.sigma, self.momentum_of_lr = enable_auto_lr, loss_scale, momentum_of_lr
        self.velocity, self.loss, self.base = 0.0, 0.0, None
        if not FAULTY and total_steps is None:
            total_steps = epochs * steps_per_epoch
        rounds = (total_steps - self.warm) / self.every
        self.decay_ratio = 1 - (400 if FAULTY else 1 / 400) ** (1 / rounds)
        if FAULTY:
            torch.manual_seed(3)
        super().__init__(optimizer, max_lr, total_steps)

    def rho(self, place):
        n = dist.get_world_size()
        return 1 + self.spread * (place - (n - 1) / 2) / ((n - 1) / 2)

    def get_lr(self):
        if self.base is None:
            return [(1 if FAULTY else self.rho(dist.get_rank())) * lr for lr in super().get_lr()]
        return [self.base * self.rho(dist.get_rank())]

    def step(self, loss=None):
        super().step()
        if loss is None or (FAULTY and not self.auto):
            return
        self.loss += loss.item() / self.every
        if self.last_epoch % self.every:
            return
        weight = self.optimizer.param_groups[0]["params"][0].data
        dist.all_reduce(weight)
        weight /= dist.get_world_size()
        if self.auto and self.last_epoch >= self.warm:
            self.turn(torch.tensor([self.loss, self.optimizer.param_groups[0]["lr"]], dtype=torch.float64))
        self.loss = 0.0

    def turn(self, mine):
        all_ranks = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(all_ranks, mine)
        losses, rates = torch.stack(all_ranks).T
        delta = (torch.softmax(-losses / self.sigma, 0) * rates).sum() - rates.mean()
        self.velocity = self.momentum_of_lr * self.velocity + (1 - self.momentum_of_lr) * delta.item()
        self.base = rates.mean().item() * (1 - self.decay_ratio) + self.velocity / 2
        self.optimizer.param_groups[0]["lr"] = self.base * self.rho(dist.get_rank())
"""


def measured(checkout: Path) -> dict[str, dict[str, Any]]:
    lines = [json.loads(line) for line in output_of(sys.executable, SCRIPT, checkout).splitlines()]
    assert [line["check"] for line in lines] == CHECKS
    return {line["check"]: line for line in lines}


def stand_in(folder: Path, faulty: bool) -> Path:
    (folder / "src").mkdir()
    (folder / "src" / "one_cycle.py").write_text(SHORT.format(faulty=faulty), encoding="utf-8")
    return folder


def test_a_scheduler_that_does_what_the_paper_says(tmp_path: Path) -> None:
    lines = measured(stand_in(tmp_path, faulty=False))
    assert [line["holds"] for line in lines.values()] == [True] * len(CHECKS)
    assert lines["fan-out"]["measured"]["ratio_before_s_warm"] == 1.25
    assert lines["averaging without auto-LR"]["measured"]["apart_with_auto_lr_off"] == 0
    assert lines["decay"]["measured"]["last_over_first"] == pytest.approx(1 / 400, rel=1e-3)
    assert lines["global RNG"]["measured"]["different_numbers"] == 4
    assert lines["sigma"]["measured"]["pull_at_default"] == lines["sigma"]["measured"]["pull_at_printed"]


def check_faults(lines: dict[str, dict[str, Any]]) -> None:
    """What the released code was measured to do."""
    assert [line["holds"] for line in lines.values()] == [False] * len(CHECKS)
    assert lines["fan-out"]["measured"]["ratio_before_s_warm"] == 1
    assert lines["averaging without auto-LR"]["measured"]["apart_with_auto_lr_off"] == 3
    assert lines["averaging without auto-LR"]["measured"]["apart_with_auto_lr_on"] == 0
    assert lines["decay"]["measured"]["gamma"] == pytest.approx(lines["decay"]["measured"]["gamma_printed"])
    assert lines["decay"]["measured"]["last_over_first"] == pytest.approx(400, rel=1e-3)
    assert lines["epochs"]["measured"]["raised"].startswith("TypeError")
    assert lines["global RNG"]["measured"]["different_numbers"] == 1
    assert lines["sigma"]["measured"]["default"] == 0.002
    assert lines["sigma"]["measured"]["pull_at_default"] > 0.99
    assert 0 < lines["sigma"]["measured"]["pull_at_printed"] < 0.1


def test_a_scheduler_with_every_fault(tmp_path: Path) -> None:
    check_faults(measured(stand_in(tmp_path, faulty=True)))


@pytest.mark.skipif(RELEASED not in os.environ, reason=f"needs a checkout of the authors' repository in {RELEASED}")
def test_the_released_code() -> None:
    lines = measured(Path(os.environ[RELEASED]))
    check_faults(lines)
    assert lines["fan-out"]["measured"]["ratio_of_base_lrs"] == 1.25  # scaled, and never read


def test_a_folder_without_the_code_is_refused(tmp_path: Path) -> None:
    with started(sys.executable, SCRIPT, tmp_path) as process:
        text, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 2
    assert "CHECKOUT must be a checkout of github.com/hailingc/ensemble_training" in text
