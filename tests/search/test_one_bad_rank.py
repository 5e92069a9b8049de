"""Weights that are no numbers on one rank alone: nobody copies them, and training goes back on all ranks."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adam

from tests.problems import Records, batch_of, final_loss, loss_of, network, quiet, weights_of
from tests.processes import run_ranks
from tests.setup_runs import searching

STEPS = 200
GUESS = 1e-4
ENDS = [1, 2, 3, 5, 7, 9, 11, 13, 15, 18, 21, 25, 30, 36, 43, 51, 61, 73, 87, 104, 124, 148, 177, 199, 200]
"""Of the rounds of a run of 200 steps. The first step is lost in rounding: a second one is measured."""


def pair(t: int) -> list[Any]:
    """What the two ranks see at step ``t``."""
    return [batch_of(2 * t), batch_of(2 * t + 1)]


@cache
def in_one_process() -> float:
    model, journal = network(), Records()
    optimizer = Adam(model.parameters(), lr=GUESS)
    scheduler = searching(model, optimizer, STEPS, journal=journal)
    for t in range(STEPS):
        optimizer.zero_grad()
        loss = torch.stack([loss_of(model, batch) for batch in pair(t)]).mean()
        loss.backward()
        optimizer.step()
        scheduler.step(loss.detach())
    assert [r["step"] for r in journal.rounds] == ENDS
    return final_loss(model)


def _trained(rank: int, at: int, memory: bool) -> tuple[float, Tensor, list[str]]:
    """Two ranks; after step ``at``, the weights of one are no numbers, and if told so what the optimizer remembers."""
    model, journal = network(), Records()
    ddp = DistributedDataParallel(model)
    optimizer = Adam(ddp.parameters(), lr=GUESS)
    with quiet():
        scheduler = searching(ddp, optimizer, STEPS, journal=journal)
        for t in range(STEPS):
            optimizer.zero_grad()
            loss = loss_of(ddp, pair(t)[rank])
            loss.backward()
            optimizer.step()
            if (t + 1, rank) == (at, 1):
                _spoil(model, optimizer, memory)
            scheduler.step(loss.detach())
    return final_loss(model), weights_of(model), [r["event"] for r in journal.rounds if r["event"]]


@torch.no_grad()
def _spoil(model: nn.Module, optimizer: Adam, memory: bool) -> None:
    p = next(model.parameters())
    p[0, 0] = math.nan
    if memory:
        optimizer.state[p]["exp_avg"][0, 0] = math.nan


@pytest.mark.slow
@pytest.mark.parametrize("memory", [False, True])
@pytest.mark.parametrize("at", [1, 13, 61, 62, 148])
def test_a_rank_whose_weights_are_no_numbers_is_put_right(at: int, memory: bool) -> None:
    """At the end of a round, of the first one too, and inside."""
    (loss, weights, events), (other_loss, other_weights, _) = run_ranks(_trained, 2, at, memory)
    assert math.isfinite(loss)
    assert loss == other_loss
    assert torch.equal(weights, other_weights)
    later = [event for event in events if event != "first_step"]
    assert later == ["restarted" if at == 1 else "bad_batch"]
    assert loss < 1.5 * in_one_process()  # the rate stays
