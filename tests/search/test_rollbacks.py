"""Going back: when it is done, what is put back, that it is said, and what happens without it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

import hdet
from tests import sharded_nets as sharded
from tests.problems import (
    Batch,
    Records,
    batch_of,
    final_loss,
    is_finite,
    loss_of,
    network,
    quiet,
    recorded,
    said,
    train,
)
from tests.processes import run_ranks
from tests.setup_runs import FACES, fixed_loss, plain_loss, searching

STEPS = 200
GUESS = 1e-4
SPOILT = 80
"""The step after which something goes wrong."""


class Ran(NamedTuple):
    model: Any
    words: list[str]
    """What was said."""
    rounds: list[dict[str, Any]]


def run(
    spoil: Callable[[nn.Module], None] | None = None,
    model: nn.Module | None = None,
    told: bool = True,
    loss_fn: Callable[[nn.Module, Batch], Tensor] = loss_of,
    **more: Any,
) -> Ran:
    """The plain loop; ``spoil`` is called in its middle. ``told``: whether the scheduler is told the loss."""
    model, journal = model or network(), Records()
    optimizer: Optimizer = Adam(model.parameters(), lr=GUESS)
    with recorded() as caught:
        scheduler = searching(model, optimizer, STEPS, journal=journal, **more)
        for t in range(STEPS):
            optimizer.zero_grad()
            loss = loss_fn(model, batch_of(t))
            loss.backward()
            optimizer.step()
            if t == SPOILT and spoil is not None:
                spoil(model)
            scheduler.step(*([loss.detach()] if told else []))
    return Ran(model, said(caught), journal.rounds)


@torch.no_grad()
def not_a_number(model: nn.Module) -> None:
    next(model.parameters())[0, 0] = math.nan


@torch.no_grad()
def far_away(model: nn.Module) -> None:
    for p in model.parameters():
        p.mul_(1e4)


def back(ran: Ran) -> list[int]:
    """Steps whose weights were put back."""
    return [r["rolled_back_to"] for r in ran.rounds if r["rolled_back_to"] is not None]


# -- it is said -------------------------------------------------------------------------------------------------------


def test_every_going_back_is_said() -> None:
    """Plain SGD has to go back by itself here, and somebody ruins the weights once more."""
    model, journal = network(), Records()
    optimizer = SGD(model.parameters(), lr=100.0)
    with recorded() as caught:
        scheduler = searching(model, optimizer, STEPS, journal=journal)
        for t in range(STEPS):
            train(model, optimizer, scheduler, range(t, t + 1))
            if t == SPOILT:
                not_a_number(model)
    ran = Ran(model, said(caught), journal.rounds)
    assert len(back(ran)) >= 2
    assert len(ran.words) == len(back(ran))
    for words, step in zip(ran.words, back(ran), strict=True):
        assert f"rolled back to step {step}," in words
    assert final_loss(model) < 4 * fixed_loss(SGD, 0.3, STEPS)


@pytest.mark.parametrize("face", FACES)
def test_it_is_said_of_the_users_own_line(face: str) -> None:
    model = network()
    optimizer = Adam(model.parameters(), lr=GUESS)
    with recorded() as caught:
        scheduler = searching(model, optimizer, STEPS, face)
        for t in range(30):
            loss_of(model, batch_of(t)).backward()
            optimizer.step()
            if t == 20:
                not_a_number(model)
            scheduler.step()
    assert len(said(caught)) == 1  # back; that there is no loss is logged
    assert {w.filename for w in caught} == {__file__}


@pytest.mark.parametrize("spoil", [not_a_number, far_away])
def test_without_a_loss_it_is_logged_once_and_gone_back_all_the_same(
    spoil: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Where weights or gradients show it."""
    for ruin in (None, spoil):
        caplog.clear()
        with caplog.at_level("INFO", logger="hdet"):
            ran = run(ruin, told=False)
        assert caplog.text.count("no loss was given") == 1
        assert "scheduler.step(loss)" in caplog.text
        assert len(ran.words) == len(back(ran))
        assert bool(back(ran)) == (ruin is not None)
        worse = 2 if ruin is None else 3  # without losses no batch is excused: the rate is a third
        assert final_loss(ran.model) < worse * fixed_loss(Adam, 0.03, STEPS)


def test_a_loss_that_comes_late_is_enough() -> None:
    """As from a callback that logs every ten steps."""
    model, journal = network(), Records()
    optimizer = Adam(model.parameters(), lr=GUESS)
    with quiet():
        scheduler = searching(model, optimizer, STEPS, journal=journal)
        for t in range(STEPS):
            optimizer.zero_grad()
            loss = loss_of(model, batch_of(t))
            loss.backward()
            optimizer.step()
            if t % 10 == 9:
                scheduler.observe(float(loss.detach()))
            scheduler.step()
    assert {r["event"] for r in journal.rounds if r["event"]} == {"first_step"}
    assert final_loss(model) < 1.5 * plain_loss(Adam, GUESS, STEPS)


# -- rollback=False ----------------------------------------------------------------------------------------------------


def test_who_never_has_to_go_back_needs_no_snapshots() -> None:
    ran = run(rollback=False)
    assert ran.words == []
    assert final_loss(ran.model) == pytest.approx(plain_loss(Adam, GUESS, STEPS), rel=1e-6)


def test_nothing_is_kept() -> None:
    """The second snapshot is that of a loss that has fallen."""
    held = []
    for rollback in (True, False):
        model = network()
        optimizer = Adam(model.parameters(), lr=GUESS)
        scheduler = searching(model, optimizer, STEPS, rollback=rollback)
        train(model, optimizer, scheduler, range(40))
        held.append(len(scheduler.search_state_dict()["snapshots"]))
    assert held == [2, 0]


@pytest.mark.parametrize("told", [True, False])
def test_weights_that_are_no_numbers_are_an_error(told: bool) -> None:
    with pytest.raises(hdet.DivergedError, match=r"NaN or infinite at step \d+.*rollback=False"):
        run(not_a_number, told=told, rollback=False)


def test_an_explosion_lowers_the_rate_and_training_goes_on() -> None:
    ran = run(lambda model: far_away(model[2]), rollback=False)  # type: ignore[index]
    assert any(r["event"] == "slowed_down" for r in ran.rounds)
    assert is_finite(ran.model)


# -- buffers ----------------------------------------------------------------------------------------------------------


def normalised() -> nn.Module:
    return network(nn.BatchNorm1d(32))


def by_batch(model: nn.Module) -> float:
    """The final loss with the statistics of the batch."""
    with torch.no_grad():
        return float(loss_of(model.train(), batch_of(999_999, 2000)))


def bad_batch(model: nn.Module, batch: Batch) -> Tensor:
    """One batch of all has a number that is none: loss, gradients, weights and statistics follow."""
    x, y = batch
    return loss_of(model, (torch.full_like(x, math.nan), y) if x is batch_of(SPOILT)[0] else batch)


@torch.no_grad()
def statistics(model: Any) -> None:
    model[1].running_mean[0] = math.nan


@pytest.mark.parametrize("known", [True, False])
def test_a_batch_that_makes_everything_nan(known: bool) -> None:
    """A model that the scheduler knows is as before; of others, only what the optimizer holds."""
    ran = run(model=normalised(), loss_fn=bad_batch, known=known)
    assert back(ran)
    assert by_batch(ran.model) < 3 * by_batch(run(model=normalised()).model)  # a third of the rate, where it was right
    assert all(buffer.isfinite().all() for buffer in ran.model.buffers()) == known
    left = "Averages of the weights are not" if known else "Buffers, as in BatchNorm, are rolled back only with model="
    assert sum(left in words for words in ran.words) == len(back(ran))
    if known:
        assert final_loss(ran.model) < 2 * fixed_loss(Adam, 0.03, STEPS, normalised)


@pytest.mark.parametrize("known", [True, False])
def test_statistics_that_became_nan(known: bool) -> None:
    """Training does not use them, so nobody else would tell before the model is evaluated."""
    ran = run(statistics, model=normalised(), known=known)
    assert bool(back(ran)) == known
    assert all(buffer.isfinite().all() for buffer in ran.model.buffers()) == known
    if known:
        assert final_loss(ran.model) < 2 * fixed_loss(Adam, 0.03, STEPS, normalised)
    else:
        plain = run(model=normalised()).model
        assert all(map(torch.equal, ran.model.parameters(), plain.parameters()))


def test_a_buffer_that_is_nan_from_the_beginning_says_nothing() -> None:
    model = network()
    model.register_buffer("unknown", torch.full((3,), math.nan))
    ran = run(model=model, known=True)
    assert ran.words == []
    assert final_loss(ran.model) == pytest.approx(plain_loss(Adam, GUESS, STEPS), rel=1e-6)


# -- FSDP2 that keeps what it has gathered ----------------------------------------------------------------------------

SHARDED = 60
CASES = [(False, False), (False, True), (True, False), (True, True)]
"""Whether the scheduler knows the model, and whether it is evaluated before every step of the scheduler: FSDP2 then
holds weights that nobody told it have changed."""


def trained(model: Any, known: bool, evaluates: bool, number: int = 0, parts: int = 1) -> tuple[list[Tensor], int]:
    """Its weights are no numbers after half the run. The weights at the end, and how often training went back."""
    optimizer, journal = Adam(model.parameters(), lr=1e-6), Records()
    scheduler: Any
    with quiet():
        scheduler = searching(model, optimizer, SHARDED, known=known, journal=journal)
        for t in range(SHARDED):
            sharded.train(model, optimizer, _Before(scheduler, model, t, evaluates), range(t, t + 1), number, parts)
    return sharded.whole(model), len([r for r in journal.rounds if r["rolled_back_to"] is not None])


class _Before:
    """What happens between a step of the optimizer and one of the scheduler."""

    def __init__(self, scheduler: Any, model: Any, t: int, evaluates: bool) -> None:
        self.scheduler, self.model, self.t, self.evaluates = scheduler, model, t, evaluates

    @torch.no_grad()
    def step(self, loss: Tensor) -> None:
        if self.t == SHARDED // 2:
            for p in (p for p in self.model.parameters() if p.requires_grad):
                getattr(p, "_local_tensor", p).mul_(math.nan)
        if self.evaluates:
            sharded.loss_of(self.model, sharded.batch_of(50_000))
        self.scheduler.step(loss)


def _fsdp(rank: int) -> list[tuple[list[Tensor], int]]:
    def model() -> Any:
        return sharded.sharded(sharded.Net(), sharded.mesh_of(2), reshard_after_forward=False)

    return [trained(model(), *case, rank, 2) for case in CASES]


@pytest.mark.slow
def test_fsdp_that_does_not_reshard_after_its_forward_pass() -> None:
    expected, times = trained(sharded.Net(), False, False)
    assert times >= 1
    for answer in run_ranks(_fsdp, 2):
        for case, (weights, ours) in zip(CASES, answer, strict=True):
            assert ours == times or ours == 0, case  # rank 0 keeps the journal
            for one, other in zip(weights, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12, msg=lambda m, c=case: f"{c}: {m}")
