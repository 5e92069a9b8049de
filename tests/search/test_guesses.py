"""Guesses: parameter groups at 0 are left alone, and what is too far off to be found is refused."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch.optim import Adam

import hdet
from tests.problems import batch_of, final_loss, loss_of, network, train
from tests.setup_runs import FACES, plain_loss, searching, trained

STEPS = 200
GUESS = 1e-6


@cache
def last_layer_alone(face: str) -> tuple[float, list[float]]:
    """The first layer is not in the optimizer."""
    model: Any = network()
    model[0].requires_grad_(False)
    optimizer = Adam(model[2].parameters(), lr=GUESS)
    rates = train(model, optimizer, searching(model, optimizer, STEPS, face), range(STEPS))
    return final_loss(model), rates


@pytest.mark.parametrize("zero", [0.0, torch.tensor(0.0)], ids=["number", "tensor"])
@pytest.mark.parametrize("face", FACES)
def test_a_first_group_at_0_is_left_alone(face: str, zero: Any) -> None:
    model: Any = network()
    groups = [{"params": model[0].parameters(), "lr": zero}, {"params": model[2].parameters()}]
    optimizer = Adam(groups, lr=GUESS, foreach=False)
    scheduler = searching(model, optimizer, STEPS, face)
    rates = []
    for t in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, batch_of(t))
        loss.backward()
        optimizer.step()
        rates.append(float(optimizer.param_groups[1]["lr"]))
        assert optimizer.param_groups[0]["lr"] == 0
        scheduler.step(loss.detach())
    loss, expected = last_layer_alone(face)
    assert rates == pytest.approx(expected, rel=1e-6)
    assert final_loss(model) == pytest.approx(loss, rel=1e-6)
    assert torch.equal(model[0].weight, network()[0].weight)  # type: ignore[arg-type]


def test_a_first_optimizer_at_0_is_left_alone() -> None:
    model: Any = network()
    still, moving = Adam(model[0].parameters(), lr=0.0), Adam(model[2].parameters(), lr=GUESS)
    trained(model, [still, moving], searching(model, [still, moving], STEPS), STEPS)
    assert final_loss(model) == pytest.approx(last_layer_alone("auto")[0], rel=1e-6)


@pytest.mark.parametrize("guesses", [[0.0], [0.0, 0.0], [1e-15], [1e-3, 1e15], [-1e-3]])
@pytest.mark.parametrize("face", FACES)
def test_guesses_of_which_nothing_can_be_found_are_refused(face: str, guesses: list[float]) -> None:
    model: Any = network()
    parts = [model.parameters()] if len(guesses) == 1 else [model[0].parameters(), model[2].parameters()]
    optimizer = Adam([{"params": part} for part in parts], lr=1e-3)
    for group, guess in zip(optimizer.param_groups, guesses, strict=True):
        group["lr"] = guess
    before = [dict(group) for group in optimizer.param_groups]
    with pytest.raises(hdet.ArgumentError, match=r"from 1e-14 to 1e\+14.* but got .*; .*1e-3"):
        searching(model, optimizer, STEPS, face)
    assert [dict(group) for group in optimizer.param_groups] == before


@pytest.mark.parametrize("guess", [1e-14, 1e14])
def test_the_farthest_guesses_end_where_others_do(guess: float) -> None:
    model = network()
    optimizer = Adam(model.parameters(), lr=guess)
    train(model, optimizer, searching(model, optimizer, 300), range(300))
    assert final_loss(model) < 1.5 * plain_loss(Adam, 1e-3, 300)
