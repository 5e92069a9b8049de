"""What Accelerate does to a scheduler and its optimizer, done by hand: these run where it is not installed, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.integrations.loops import auto_on, loss_of_plain_loop, train
from tests.problems import batch_of, network, quiet
from tests.processes import run_ranks

GUESS, STEPS = 1e-4, 100


class Often:
    """So many steps of the scheduler for each of the optimizer: Accelerate makes one for each process."""

    def __init__(self, scheduler: Any, calls: int) -> None:
        self.scheduler, self.calls = scheduler, calls

    def step(self, *loss: Any) -> None:
        for _ in range(self.calls):
            self.scheduler.step(*loss)


class Counted:
    """Between the steps of an accumulation torch's count goes up, and it is looked at before a step is made."""

    def __init__(self, scheduler: Any, batches: int) -> None:
        self.scheduler, self.batches = scheduler, batches

    def step(self, *loss: Any) -> None:
        self.scheduler._step_count += self.batches - 1
        if self.scheduler._step_count <= self.scheduler.total_steps:
            self.scheduler.step(*loss)


@pytest.mark.parametrize("gives_loss", [True, False])
@pytest.mark.parametrize("processes", [2, 8, 64])
def test_the_number_of_processes_changes_nothing(processes: int, gives_loss: bool) -> None:
    net = network()
    optimizer = torch.optim.Adam(net.parameters(), lr=GUESS)
    scheduler = Often(auto_on(optimizer, 300 * processes), processes)
    with quiet():
        loss = train(net, optimizer, scheduler, (batch_of(t) for t in range(300)), gives_loss=gives_loss)
    plain = loss_of_plain_loop(guess=GUESS, steps=300, gives_loss=gives_loss)
    assert loss / plain == pytest.approx(1, abs=0.1)


def test_batches_of_an_accumulation_do_not_end_the_schedule() -> None:
    net = network()
    optimizer = torch.optim.Adam(net.parameters(), lr=GUESS)
    scheduler = auto_on(optimizer, STEPS)
    loss = train(net, optimizer, Counted(scheduler, 4), (batch_of(t) for t in range(STEPS)))
    assert scheduler.last_epoch == STEPS  # hdet counts its own steps: none is left out
    assert loss / loss_of_plain_loop(guess=GUESS, steps=STEPS) == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("gives_loss", [True, False])
def test_parameters_that_fsdp2_has_replaced(gives_loss: bool) -> None:
    """The optimizer gets the sharded parameters in place of its own, after the scheduler was built."""
    losses = run_ranks(_sharded, 2, gives_loss)
    assert losses[0] == losses[1]
    plain = loss_of_plain_loop(guess=GUESS, steps=STEPS, gives_loss=gives_loss)
    assert losses[0] / plain == pytest.approx(1, abs=0.02)


def _sharded(rank: int, gives_loss: bool) -> float:
    from torch.distributed.fsdp import fully_shard

    from tests import sharded_nets  # makes FSDP2 of old torch run on a CPU

    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=GUESS)
    scheduler = auto_on(optimizer, STEPS, model=model)
    fully_shard(model, mesh=sharded_nets.mesh_of(2))
    optimizer.param_groups[0]["params"] = list(model.parameters())
    with quiet():
        return train(model, optimizer, scheduler, (batch_of(t) for t in range(STEPS)), gives_loss=gives_loss)
