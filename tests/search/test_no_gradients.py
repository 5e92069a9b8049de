"""Rounds without gradients: nobody sees them, or they are zero. They raise nothing, and in the end it is said."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Adam

from tests.problems import Records, batch_of, final_loss, loss_of, network, quiet, recorded, said
from tests.setup_runs import plain_loss, searching

STEPS = 200
GUESS = 1e-3


class Deaf(Adam):
    """Steps as Adam does, and calls no hooks."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        self._own = Adam(self.param_groups, lr=lr)

    def step(self, closure: Any = None) -> Any:
        return self._own.step(closure)

    step.hooked = True  # type: ignore[attr-defined]  # torch adds them to a step that has no such mark


def run(clears: bool, set_to_none: bool = True) -> tuple[nn.Module, list[float], Records]:
    """``clears``: gradients are gone when the scheduler steps."""
    model, journal, rates = network(), Records(), []
    optimizer = Deaf(model.parameters(), lr=0.02)
    scheduler = searching(model, optimizer, STEPS, journal=journal)
    for t in range(STEPS):
        loss = loss_of(model, batch_of(t))
        loss.backward()
        optimizer.step()
        rates.append(float(optimizer.param_groups[0]["lr"]))
        if clears:
            optimizer.zero_grad(set_to_none)
        scheduler.step(loss.detach())
        optimizer.zero_grad()
    return model, rates, journal


@pytest.mark.parametrize("set_to_none", [True, False])
def test_steps_of_which_no_gradient_was_ever_seen_are_alarmed(set_to_none: bool) -> None:
    """The guess is kept to, and that is said."""
    with recorded() as caught:
        model, rates, journal = run(True, set_to_none)
    assert len(said(caught)) == 1
    assert "gradient" in said(caught)[0]
    assert [record["why"] for record in journal.rounds if record["event"] == "stopped"] == ["no_gradient"]
    assert 0.01 < max(rates) <= 0.02
    assert final_loss(model) < 0.2 * final_loss(network())


def test_steps_that_are_not_told_of_are_noticed_where_gradients_can_be_seen() -> None:
    with quiet():
        model, _, journal = run(False)
    assert not any(record["event"] == "stopped" for record in journal.rounds)
    assert final_loss(model) < 1.5 * plain_loss(Adam, 0.02, STEPS)


# -- gradients that are zero for a while ------------------------------------------------------------------------------


def silent(make: Any, begin: int, end: int, guess: float = GUESS) -> tuple[float, Records]:
    """Zero gradients from step ``begin`` to ``end`` of 400, as a mask on the loss makes them."""
    model, journal = network(), Records()
    optimizer = make(model.parameters(), lr=guess)
    scheduler = searching(model, optimizer, 400, journal=journal)
    for t in range(400):
        optimizer.zero_grad()
        loss = loss_of(model, batch_of(t)) * (0.0 if begin <= t < end else 1.0)
        loss.backward()
        optimizer.step()
        scheduler.step(loss.detach())
    return final_loss(model), journal


MAKES = {
    "Adam": Adam,
    "SGD": torch.optim.SGD,
    "AdamW, whose weights decay all the same": torch.optim.AdamW,
}


@pytest.mark.parametrize("name", MAKES)
def test_a_hundred_steps_without_a_gradient_at_first_do_no_harm(name: str) -> None:
    """The first gradient meets the rate that the first step would have met, and a search begins late.

    The loss was 0 so long: the next one may look like ruin, once, and that is taken back.
    """
    loss, journal = silent(MAKES[name], 0, 100)
    assert all(r["learned"][0] == pytest.approx(1e-3) for r in journal.rounds if r["step"] < 100)
    events = [r["event"] for r in journal.rounds if r["event"]]
    assert events[0] == "first_step"
    later = [event for event in events if event != "first_step"]
    assert later in ([], ["rolled_back", "false_alarm"])
    assert loss < 0.6 * final_loss(network())


@pytest.mark.parametrize("name", MAKES)
def test_a_hundred_steps_without_a_gradient_later_raise_nothing(name: str) -> None:
    """The loss, which was 0 so long, is soon known to be no worse than before.

    Until then training goes back, SGD twice, to the weights of before: little more than 200 steps are left.
    """
    with quiet():
        loss, journal = silent(MAKES[name], 10, 110)
    within = {r["learned"][0] for r in journal.rounds if 12 <= r["step"] <= 110}
    assert len(within) == 1
    assert loss < 2 * plain_loss(MAKES[name], GUESS, 200)


def test_gradients_that_come_after_the_peak_are_told_of() -> None:
    with recorded() as caught:
        _, journal = silent(Adam, 0, 200)
    assert any("moved the weights" in words for words in said(caught))
    assert [r["why"] for r in journal.rounds if r["event"] == "stopped"] == ["never_moved"]
