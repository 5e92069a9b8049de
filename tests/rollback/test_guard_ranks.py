"""Ranks of a guarded run make the same decision, whichever has seen the fault: DDP, FSDP2, losses of one rank."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import hdet
from tests import sharded_nets as sharded
from tests.problems import batch_of, loss_of, network, recorded
from tests.processes import error_of, run_ranks

EVERY, STEPS = 10, 120


def _guarded(rank: int, spoil: str, tells: bool = True) -> tuple[Tensor, int, list[str]]:
    """Weights at the end, rollbacks, and what this rank has told people."""
    model = DistributedDataParallel(network(torch.nn.BatchNorm1d(32)))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    guard = hdet.Guard(optimizer, model, check_every=EVERY)
    with recorded() as caught:
        for t in range(STEPS):
            optimizer.zero_grad()
            loss = loss_of(model, batch_of(2 * t + rank))
            loss.backward()
            optimizer.step()
            if t == 83 and rank == 1 and spoil == "weights":  # this rank's copy alone
                _spoil(model)
            if t >= 83 and guard._state.hold is None and not guard.rollbacks and rank == 1 and spoil == "losses":
                loss = torch.tensor(math.nan)
            guard.step(loss if tells or rank == 1 else None)
    words = [str(one.message) for one in caught if issubclass(one.category, hdet.RollbackWarning)]
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]), guard.rollbacks, words


@torch.no_grad()
def _spoil(model: Any) -> None:
    next(model.parameters()).view(-1)[3] = math.nan


@pytest.mark.parametrize(("spoil", "tells"), [("weights", True), ("losses", False), ("none", True)])
def test_ranks_go_back_together(spoil: str, tells: bool) -> None:
    """A NaN in one rank's weights; the only losses that are given are NaN, on one rank."""
    (first, times, words), (second, others, silence) = run_ranks(_guarded, 2, spoil, tells)
    assert times == others == (0 if spoil == "none" else 1)
    assert len(words) == times
    assert silence == []
    assert torch.equal(first, second)
    assert first.isfinite().all()


def _resumed(rank: int, folder: Path, cut: int) -> tuple[Tensor, str]:
    """From a checkpoint inside a round, with losses that differ between ranks; or in one piece."""
    model, guard, optimizer = _built()
    for begin, end in ((0, cut), (cut, STEPS)):
        if begin:
            hdet.save(folder / f"{cut}.pt", model=model, optimizer=optimizer, guard=guard)
            model, guard, optimizer = _built()
            hdet.load(folder / f"{cut}.pt", model=model, optimizer=optimizer, guard=guard)
        for t in range(begin, end):
            optimizer.zero_grad()
            loss_of(model, batch_of(t)).backward()  # equal gradients: sums over ranks are laid out again by DDP
            optimizer.step()
            if t == 83:
                _spoil(model)
            guard.step(float(loss_of(model, batch_of(5000 + 2 * t + rank)).detach()))
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]), repr(
        [guard.state_dict()[name] for name in ("looks", "rounds", "usual", "losses")]
    )


def _built() -> tuple[Any, hdet.Guard, torch.optim.Optimizer]:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    return model, hdet.Guard(optimizer, model, check_every=EVERY), optimizer


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::hdet.RollbackWarning")
def test_three_ranks_resume_bit_equal(tmp_path: Path) -> None:
    whole = run_ranks(_resumed, 3, tmp_path, 0)
    for cut in (47, 88):
        for ours, theirs in zip(run_ranks(_resumed, 3, tmp_path, cut), whole, strict=True):
            assert torch.equal(ours[0], theirs[0]), cut
            assert ours[1] == theirs[1], "the losses of this round on other ranks were lost"


def _disagreeing(rank: int) -> str:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = hdet.Guard(optimizer, model, check_every=EVERY, factor=0.5 + 0.25 * rank)
    optimizer.step()
    return str(error_of(lambda: guard.step(1.0)))


def test_ranks_with_other_arguments_are_told() -> None:
    for text in run_ranks(_disagreeing, 2):
        assert "replicas disagree on factor" in text
        assert "rank 1: factor = 0.75" in text


# -- FSDP2 ------------------------------------------------------------------------------------------------------------


class _Before:
    """What happens between a step of the optimizer and one of the guard."""

    def __init__(self, guard: hdet.Guard, model: Any) -> None:
        self.guard, self.model, self.t, self.rollbacks = guard, model, 0, 0

    @torch.no_grad()
    def step(self, loss: Tensor) -> None:
        if self.t == 50:  # noticed by the look that follows the next step, on one rank as on two
            for p in (p for p in self.model.parameters() if p.requires_grad):
                getattr(p, "_local_tensor", p).mul_(math.nan)
        sharded.loss_of(self.model, sharded.batch_of(50_000))  # FSDP2 now holds weights that it was not told of
        self.t += 1
        self.guard.step(loss)
        self.rollbacks = self.guard.rollbacks
        if self.t in (37, 53):  # inside a round, and while the rate recovers: this rank's state in another guard
            state = copy.deepcopy(self.guard.state_dict())
            self.guard = hdet.Guard(self.guard._optimizer, self.model, check_every=EVERY)
            self.guard.load_state_dict(state)


def _sharded(rank: int, parts: int = 2) -> tuple[list[Tensor], int]:
    model: Any = sharded.Net()
    if parts > 1:
        model = sharded.sharded(model, sharded.mesh_of(2), reshard_after_forward=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    before = _Before(hdet.Guard(optimizer, model, check_every=EVERY), model)
    with recorded():
        sharded.train(model, optimizer, before, range(90), rank, parts)
    return sharded.whole(model), before.rollbacks


def test_a_sharded_run_is_the_run_of_one_process() -> None:
    expected, times = _sharded(0, parts=1)
    assert times == 1
    for weights, ours in run_ranks(_sharded, 2):
        assert ours == 1
        for one, other in zip(weights, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def _one_bad_shard(rank: int, bad: int) -> list[float]:
    """How many steps were made of each parameter; one rank's shards of one step's gradients are NaN."""
    model: Any = sharded.sharded(sharded.Net(), sharded.mesh_of(2))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    guard = hdet.Guard(optimizer, model, check_every=EVERY)
    with recorded():
        for t in range(24):
            optimizer.zero_grad()
            loss = sharded.loss_of(model, sharded.batch_of(t))
            loss.backward()
            held = [p for p in model.body.parameters() if p.grad is not None and t == bad and rank == 1]
            for p in held:
                p.grad.to_local().mul_(math.nan)
            optimizer.step()
            guard.step(loss)
    assert guard.held == 1
    assert all(weights.isfinite().all() for weights in sharded.whole(model))
    return [float(state["step"]) for state in optimizer.state.values()]


@pytest.mark.parametrize("bad", [0, 20])
def test_a_bad_gradient_in_one_shard_is_used_by_no_rank(bad: int) -> None:
    assert {step for steps in run_ranks(_one_bad_shard, 2, bad) for step in steps} == {23.0}
