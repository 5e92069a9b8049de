"""A rank that makes one step more or less than the others is named, with the counts of all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hdet
from tests.ranks import error_of, run_ranks

STEPS, ROUND, ODD = 20, 5, 2
"""The third of three ranks is the odd one."""


class Loop:
    """Gradient-isolated arms, each of one rank: nothing but the ends of rounds brings them together."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.model = nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.scheduler = hdet.OneCycleLR(
            self.optimizer, 0.1, STEPS, sync_every=ROUND, cycle_momentum=False, group=hdet.arms(3)
        )

    def run(self, fault: str) -> None:
        for t in range(STEPS):
            odd = self.rank == ODD and t == 7
            self.optimizer.zero_grad()
            self.model(torch.ones(1, 2)).sum().backward()
            if odd and fault == "overflow":
                for p in self.model.parameters():
                    assert p.grad is not None
                    p.grad.fill_(float("inf"))
            if not (odd and fault in ("no optimizer step", "overflow")):
                self.optimizer.step()
            if odd and fault == "two optimizer steps":
                self.optimizer.step()
            if odd and fault == "two scheduler steps":
                self.scheduler.step(0.5)
            if not (odd and fault == "no scheduler step"):
                self.scheduler.step(0.5)


def _with_fault(rank: int, fault: str) -> str:
    torch.manual_seed(0)
    loop = Loop(rank)
    error = error_of(lambda: loop.run(fault))
    assert isinstance(error, hdet.DisagreementError)
    return str(error)


@pytest.mark.parametrize(
    ("fault", "usual", "odd"),
    [
        ("two optimizer steps", 5, 6),
        ("no optimizer step", 5, 4),
        ("two scheduler steps", 5, 4),
        ("no scheduler step", 5, 6),
    ],
)
def test_the_rank_with_another_number_of_steps_is_named(fault: str, usual: int, odd: int) -> None:
    told = run_ranks(_with_fault, 3, fault, group_timeout=10)
    assert len(set(told)) == 1
    assert "optimizer steps in this round" in told[0]
    assert "look at rank 2" in told[0]
    for rank, count in ((0, usual), (1, usual), (2, odd)):
        assert f"rank {rank}: optimizer steps in this round = {count}" in told[0]


def _without_fault(rank: int, fault: str) -> int:
    torch.manual_seed(0)
    loop = Loop(rank)
    loop.run(fault)
    return int(loop.scheduler.last_epoch)


def test_a_step_that_a_grad_scaler_leaves_out_is_no_disagreement() -> None:
    assert run_ranks(_without_fault, 3, "overflow", group_timeout=10) == [STEPS] * 3


def _two_per_step(rank: int) -> Any:
    """As Accelerate does on two processes: each optimizer step is followed by two of the scheduler."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = hdet.OneCycleLR(optimizer, 0.1, STEPS, sync_every=ROUND, cycle_momentum=False)
    looked: list[int] = []
    for t in range(STEPS):
        if t % 2 == 0:
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        scheduler.step(0.5)
        looked.append(len(scheduler._run.meeting._tally._left_out))
    return looked


def test_gradients_are_looked_at_no_more_once_all_ranks_leave_out_steps() -> None:
    for looked in run_ranks(_two_per_step, 2, group_timeout=10):
        assert max(looked[: ROUND - 1]) > 0
        assert not any(looked[ROUND:])
