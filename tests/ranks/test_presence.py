"""A rank that does not come is named, with when it was last seen; an error of a rank's own stays what it is."""

from __future__ import annotations

import os
import signal
import socket
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hdet
from hdet.ranks.presence import Presence
from tests.processes import RankFailed, error_of, run_ranks

STEPS, ROUND = 40, 10


def train(before_step: Any) -> None:
    """Arms of one rank each: only the ends of rounds bring them together."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    arms = hdet.arms(dist.get_world_size())
    scheduler = hdet.OneCycleLR(optimizer, 0.1, STEPS, sync_every=ROUND, cycle_momentum=False, group=arms)
    for t in range(STEPS):
        before_step(t)
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        scheduler.step(0.5)


def _lost(rank: int, fault: str) -> tuple[str, str]:
    def before_step(t: int) -> None:
        if rank == 1 and t == 15:
            if fault == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(4)

    error = error_of(lambda: train(before_step))
    raise error


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["killed", "silent"])
def test_a_rank_that_is_killed_or_silent_is_named(fault: str) -> None:
    with pytest.raises(RankFailed) as caught:
        run_ranks(_lost, 3, fault, group_timeout=2)
    by_rank = str(caught.value).split("rank 2:\n")
    assert len(by_rank) == 2
    for told in (by_rank[0], by_rank[1]):
        assert "LostReplicaError: a collective failed in round 1, at step 20" in told
        assert "Missing ranks:" in told
        assert "  rank 1: last seen" in told
        assert "step(), at the end of a round, step 9" in told


class WithoutMemory(nn.Linear):
    """Its weights cannot be looked at from step 15 on, as if memory had run out there."""

    full = False

    def named_buffers(self, *args: Any, **kwargs: Any) -> Any:
        if self.full:
            raise torch.OutOfMemoryError("no memory left")
        return super().named_buffers(*args, **kwargs)


def _out_of_memory(rank: int) -> tuple[str, str]:
    model = WithoutMemory(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = hdet.OneCycleLR(
        optimizer, 0.1, STEPS, sync_every=ROUND, cycle_momentum=False, model=model, group=hdet.arms(2)
    )

    def loop() -> None:
        for t in range(STEPS):
            model.full = rank == 1 and t > 15
            optimizer.step()
            scheduler.step(0.5)

    error = error_of(loop)
    if rank == 1:
        time.sleep(4)  # longer than the others wait
    return type(error).__name__, str(error)


@pytest.mark.slow
def test_want_of_memory_on_one_rank_stays_one_and_the_others_hear_of_it() -> None:
    (waiting, told), (failed, own) = run_ranks(_out_of_memory, 2, group_timeout=2)
    assert (failed, own) == ("OutOfMemoryError", "no memory left")
    assert waiting == "LostReplicaError"
    assert "rank 1: left with OutOfMemoryError: no memory left" in told


def _host_lost(rank: int) -> str:
    """The store lives in rank 0's process, which is killed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        ports = [free.getsockname()[1]]
    dist.broadcast_object_list(ports)
    dist.destroy_process_group()
    where = f"tcp://127.0.0.1:{ports[0]}"
    dist.init_process_group("gloo", where, timeout=timedelta(seconds=5), rank=rank, world_size=2)

    def before_step(t: int) -> None:
        if rank == 0 and t == 15:
            os.kill(os.getpid(), signal.SIGKILL)

    raise error_of(lambda: train(before_step))


def test_a_store_that_is_gone_means_that_its_host_was_lost() -> None:
    with pytest.raises(RankFailed) as caught:
        run_ranks(_host_lost, 2, group_timeout=5)
    told = str(caught.value).split("rank 1:\n")[1]
    assert "LostReplicaError: a collective failed in round 1, at step 20" in told
    assert "its host was lost" in told


def test_without_a_store_nothing_is_noted_and_nobody_is_blamed() -> None:
    nobody = Presence(None, 0, 2)
    nobody.arrive("somewhere")
    assert "Which rank is missing is not known" in nobody.report()


@pytest.mark.slow
def test_the_ranks_that_have_not_noticed_are_missing() -> None:
    store = dist.HashStore()
    all_three = [Presence(store, rank, 3) for rank in range(3)]
    for one in all_three:
        one.arrive("step 9")
    told = all_three[0].report()
    assert "Missing ranks:" in told
    assert "  rank 1: last seen" in told
    assert "  rank 2: last seen" in told
    told = all_three[2].report()
    assert "rank 1: last seen" in told
    assert "rank 0" not in told
    assert "the network between them" in all_three[1].report()
    all_three[1].arrive("step 19")
    assert "  rank 1: last seen" in all_three[0].report()
    assert "never seen" in Presence(store, 0, 4).report()
    assert Presence(store, 0, 1024).report().endswith("  and 1006 more")  # rank 2 has noticed
