"""Several optimizers, one search: their rates have one common factor."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

import hdet
from tests.problems import batch_of, final_loss, loss_of, network, weights_of

STEPS = 200


def matrices_and_vectors(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    parameters = list(model.parameters())
    return [p for p in parameters if p.ndim == 2], [p for p in parameters if p.ndim < 2]


def train(model: nn.Module, optimizers: list[torch.optim.Optimizer], scheduler: Any, steps: range) -> list[list[float]]:
    rates = []
    for t in steps:
        rates.append([float(group["lr"]) for optimizer in optimizers for group in optimizer.param_groups])
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = loss_of(model, batch_of(t))
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        scheduler.step(loss.detach())
    return rates


@pytest.mark.covers("frameworks", "plain loop with two optimizers, search", "one process", "fp32")
@pytest.mark.parametrize("wrong_by", [1e-4, 1e4])
@pytest.mark.filterwarnings("error")
@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_muon_and_adamw_find_one_factor(wrong_by: float) -> None:
    model = network()
    matrices, vectors = matrices_and_vectors(model)
    optimizers = [torch.optim.Muon(matrices, lr=0.02 * wrong_by), torch.optim.AdamW(vectors, lr=0.003 * wrong_by)]
    scheduler = hdet.auto(optimizers, total_steps=STEPS)
    rates = train(model, optimizers, scheduler, range(STEPS))
    assert all(a / b == pytest.approx(0.02 / 0.003) for a, b in rates)
    assert final_loss(model) < 4 * _at_fixed_rates()  # so small a network is trained too fast


def _at_fixed_rates() -> float:
    """Without a search, at the rates that the ones above are wrong by a factor of; three times of them is best here."""
    model = network()
    matrices, vectors = matrices_and_vectors(model)
    optimizers = [torch.optim.Muon(matrices, lr=0.06), torch.optim.AdamW(vectors, lr=0.009)]
    schedules = [OneCycleLR(one, one.param_groups[0]["lr"], STEPS + 1, cycle_momentum=False) for one in optimizers]
    for t in range(STEPS):
        model.zero_grad()
        loss_of(model, batch_of(t)).backward()
        for part in (*optimizers, *schedules):
            part.step()
    return final_loss(model)


def test_two_halves_are_as_good_as_one_optimizer(tmp_path: Path) -> None:
    """Adam treats coordinates alike: two of them on halves of the weights make the very same steps."""
    found = []
    for split in (False, True):
        model = network()
        parameters = list(model.parameters())
        whole = [{"params": [p]} for p in parameters]
        parts = [parameters[:1], parameters[1:]] if split else [whole]
        optimizers = [torch.optim.Adam(part, lr=1e-6) for part in parts]
        journal = tmp_path / f"{split}.jsonl"
        scheduler = hdet.auto(optimizers, total_steps=STEPS, journal=journal)
        train(model, optimizers, scheduler, range(STEPS))
        rounds = hdet.read_journal(journal).rounds
        found.append((weights_of(model), [(r["step"], r["event"], r["learned"][0]) for r in rounds]))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


def test_going_back_puts_the_memory_of_all_of_them_back(tmp_path: Path) -> None:
    model = network()
    matrices, vectors = matrices_and_vectors(model)
    optimizers = [torch.optim.SGD(matrices, lr=1e-3, momentum=0.9), torch.optim.Adam(vectors, lr=1e-3)]
    journal = tmp_path / "run.jsonl"
    scheduler = hdet.auto(optimizers, total_steps=STEPS, journal=journal)
    train(model, optimizers, scheduler, range(60))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(30)
        for optimizer, name in zip(optimizers, ("momentum_buffer", "exp_avg"), strict=True):
            for state in optimizer.state.values():
                state[name].fill_(1e6)
    train(model, optimizers, scheduler, range(60, 80))
    assert any("rolled_back" in (r["event"] or "") for r in hdet.read_journal(journal).rounds)
    for optimizer, name in zip(optimizers, ("momentum_buffer", "exp_avg"), strict=True):
        assert all(state[name].abs().max() < 1e3 for state in optimizer.state.values())
    train(model, optimizers, scheduler, range(80, STEPS))
    assert final_loss(model) < 0.5 * final_loss(network())


def test_a_search_is_resumed() -> None:
    def begun() -> tuple[nn.Module, list[torch.optim.Optimizer], hdet.AutoScheduler]:
        model = network()
        matrices, vectors = matrices_and_vectors(model)
        optimizers: list[torch.optim.Optimizer] = [
            torch.optim.SGD(matrices, lr=1e-3),
            torch.optim.Adam(vectors, lr=1e-3),
        ]
        return model, optimizers, hdet.auto(optimizers, total_steps=STEPS)

    model, optimizers, scheduler = begun()
    train(model, optimizers, scheduler, range(150))
    saved = copy.deepcopy([part.state_dict() for part in (model, *optimizers, scheduler)])
    again, others, resumed = begun()
    for part, state in zip((again, *others, resumed), saved, strict=True):
        part.load_state_dict(state)
    assert train(again, others, resumed, range(150, STEPS)) == train(model, optimizers, scheduler, range(150, STEPS))
    assert torch.equal(weights_of(again), weights_of(model))


def test_one_optimizer_is_onecycle() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for given in (optimizer, [optimizer]):
        assert hdet.auto(given, total_steps=100).optimizer is optimizer


def test_bad_input_is_refused() -> None:
    model = network()
    one, two = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.Adam(list(model.parameters())[:1], lr=0.1)
    for given, match in (
        ([], "optimizer of torch"),
        ([one, "adam"], "optimizer of torch"),
        ([one, two], "one optimizer only"),
    ):
        with pytest.raises(hdet.ArgumentError, match=match):
            hdet.auto(given, total_steps=100)  # type: ignore[arg-type]
    rest = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
    together = hdet.auto([two, rest], total_steps=100).optimizer
    with pytest.raises(hdet.ArgumentError, match="step each one yourself"):
        together.step()


class Halves(torch.optim.SGD):
    """An optimizer of a user's, whose attributes have the names that hdet gives to several optimizers seen as one."""

    parts = ("left", "right")
    leading = "left"
    step_is_over = True


def test_one_optimizer_with_parts_of_its_own_is_one() -> None:
    model = network()
    optimizer = Halves(model.parameters(), lr=1e-3)
    scheduler = hdet.auto(optimizer, total_steps=STEPS)
    rates = train(model, [optimizer], scheduler, range(20))
    assert rates[-1][0] > 10 * rates[0][0]  # its steps are measured
