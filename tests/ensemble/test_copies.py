"""A copy of an ensemble, by deepcopy or pickle, is one of its own: its knobs act on the copy's optimizer and model."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hdet

pytestmark = pytest.mark.quick
Copying = Callable[[Any], Any]
Parts = tuple[nn.Sequential, torch.optim.Optimizer, hdet.Ensemble]


class Held:
    """A value behind methods."""

    def __init__(self) -> None:
        self.value = 0.1

    def get(self) -> float:
        return self.value

    def set(self, value: float) -> None:
        self.value = value


def constant() -> float:
    return 1.0


def build() -> Parts:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.2), nn.Linear(3, 1))
    rate = torch.tensor(1e-3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.1, foreach=False)
    held = Held()
    knobs = [
        hdet.knobs.lr(optimizer),
        hdet.knobs.optimizer(optimizer, "weight_decay", spread=0.3),
        hdet.knobs.optimizer(optimizer, "betas", index=0, spread=0.01, scale="linear"),
        hdet.knobs.module(model, nn.Dropout, "p", spread=0.05),
        hdet.knobs.scalar("smoothing", 0.1, spread=0.05),
        hdet.knobs.custom("mine", held.get, held.set, spread=0.05),
    ]
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
    more: dict[str, Any] = {"signal": hdet.ProbeLoss(constant), "sync_every": 2, "allow_uninformative": True}
    return model, optimizer, hdet.Ensemble(optimizer, schedule, knobs, **more)


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def values_of(parts: Parts) -> dict[str, float]:
    """What the knobs act on, read where it acts."""
    model, optimizer, ensemble = parts
    group, mine = optimizer.param_groups[0], ensemble._knobs[-1].read.__self__  # type: ignore[attr-defined]
    found = {"lr[0]": group["lr"], "weight_decay": group["weight_decay"], "betas.0": group["betas"][0]}
    return {key: float(v) for key, v in {**found, "Dropout.p": model[1].p, "mine": mine.value}.items()}


def train(parts: Parts, steps: int) -> list[Tensor]:
    model, optimizer, ensemble = parts
    model.eval()  # dropout would draw from the global generator
    for step in range(steps):
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        ensemble.step(loss)
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_a_copy_reads_and_writes_its_own(copied: Copying) -> None:
    parts = build()
    train(parts, 3)
    before = values_of(parts)
    other = copied(parts)
    assert values_of(other) == before
    assert other[2].optimizer is other[1]
    for number, name in enumerate(["weight_decay", "betas.0", "Dropout.p", "smoothing", "mine"]):
        knob = next(knob for knob in other[2]._knobs if knob.spec.name == name)
        knob.write(0.3 + 0.1 * number)
        assert other[2][name] == pytest.approx(0.3 + 0.1 * number)
        if name != "smoothing":
            assert values_of(other)[name] == pytest.approx(0.3 + 0.1 * number)
        assert other[2][name] != parts[2][name]
    assert values_of(parts) == before


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
@pytest.mark.filterwarnings("ignore:Seems like `optimizer.step:UserWarning")  # torch, of a copied optimizer
def test_both_train_on_alike_and_alone(copied: Copying) -> None:
    parts = build()
    train(parts, 5)
    other = copied(parts)
    ours = train(parts, 7)
    at_the_end = values_of(parts)
    theirs = train(other, 7)
    assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))
    assert values_of(other) == values_of(parts) == at_the_end


def test_a_copy_shares_functions() -> None:
    """As a copy of torch's LambdaLR does. pickle refuses a function without a name."""
    cell = {"value": 0.1}
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    knob = hdet.knobs.custom("mine", lambda: cell["value"], lambda v: cell.update(value=v), spread=0.05)
    ensemble = hdet.Ensemble(optimizer, knobs=[knob], allow_uninformative=True)
    assert copy.deepcopy(ensemble)["mine"] == cell["value"] == ensemble["mine"]
    with pytest.raises((AttributeError, pickle.PicklingError), match="lambda"):
        pickle.dumps(ensemble)
