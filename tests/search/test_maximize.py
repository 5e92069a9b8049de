"""``maximize=True``: of all groups, of each, of some; what is trained on is then a gain, or both a gain and a loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam

import hdet
from tests.problems import Batch, Records, final_loss, loss_of, network
from tests.processes import run_ranks
from tests.setup_runs import FACES, searching, trained

STEPS = 200


def gain_of(model: nn.Module, batch: Batch) -> Tensor:
    return -loss_of(model, batch)


def run(make: Any, guess: float, sign: float, face: str, **maximize: bool) -> tuple[float, list[Any]]:
    """Final loss, and all decisions; trained on the loss times ``sign``."""
    model, journal = network(), Records()
    groups = [{"params": [p], **maximize} for p in model.parameters()]
    optimizer = make(groups, lr=guess)
    loss_fn = loss_of if sign > 0 else gain_of
    trained(model, optimizer, searching(model, optimizer, STEPS, face, journal=journal), STEPS, loss_fn)
    return final_loss(model), [(r["step"], r["event"], r["learned"]) for r in journal.rounds]


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize(("make", "guess"), [(Adam, 1e-6), (Adam, 10.0), (SGD, 1e-6), (SGD, 100.0)])
def test_a_gain_is_maximised_as_its_loss_is_minimised(make: Any, guess: float, face: str) -> None:
    loss, decisions = run(make, guess, 1.0, face)
    assert run(make, guess, -1.0, face, maximize=True) == (pytest.approx(loss, rel=1e-6), decisions)


def test_the_runs_above_go_back_too() -> None:
    events = [str(event) for _, event, _ in run(SGD, 100.0, 1.0, "auto")[1]]
    assert any("rolled_back" in event for event in events)


def test_an_option_of_the_optimizer_counts_as_one_of_its_groups() -> None:
    found = [
        run(lambda groups, lr: Adam(groups, lr=lr, maximize=True), 1e-6, -1.0, "auto"),
        run(Adam, 1e-6, -1.0, "auto", maximize=True),
    ]
    assert found[0] == found[1]


def against(models: Any, batch: Batch) -> Tensor:
    """What the first minimises and the second maximises."""
    return loss_of(models[0], batch) - loss_of(models[1], batch)


def both(models: Any, batch: Batch) -> Tensor:
    return loss_of(models[0], batch) + loss_of(models[1], batch)


def trained_both(opposed: bool, several: bool) -> list[float]:
    """The final losses of two networks; ``several``: each has an optimizer of its own."""
    models = nn.ModuleList([network(), network()])
    rows: list[dict[str, Any]] = [{"params": list(one.parameters())} for one in models]
    rows[1]["maximize"] = opposed
    parts: list[Any] = [Adam([row], lr=1e-6) for row in rows] if several else [Adam(rows, lr=1e-6)]
    loss_fn = against if opposed else both
    trained(models, parts, searching(models, parts, STEPS), STEPS, loss_fn)
    return [final_loss(one) for one in models]


@pytest.mark.parametrize("several", [False, True])
def test_groups_of_which_some_maximise(several: bool) -> None:
    """Their loss goes up and down as it likes: gradients alone tell the rate, and both networks learn."""
    plain, found = trained_both(False, several), trained_both(True, several)
    assert found[0] == found[1]  # they are equal, and one is the mirror of the other
    assert found[0] < 1.5 * plain[0]


# -- replicas that train apart ----------------------------------------------------------------------------------------


def _learned(rank: int, sign: float) -> list[float]:
    """What the corrected controller learns from losses in which one replica is far better."""
    p = nn.Parameter(torch.ones(1))
    optimizer = SGD([p], lr=0.1, maximize=sign < 0)
    scheduler = hdet.OneCycleLR(optimizer, 0.1, 40, sync_every=4, auto_lr_start=4, cycle_momentum=False)
    for _ in range(20):
        p.grad = torch.zeros(1)
        optimizer.step()
        scheduler.step(sign * scheduler.multipliers[0])
    learned: list[float] = scheduler.state_dict()["hdet"]["learned"]
    return learned


def test_replicas_follow_the_higher_gain() -> None:
    by_loss, by_gain = run_ranks(_learned, 2, 1.0)[0], run_ranks(_learned, 2, -1.0)[0]
    assert by_gain == by_loss
    assert by_loss[0] < 0.95
