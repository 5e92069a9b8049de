"""Optimizers whose steps do not follow the rate, or only some of them: that is seen once the rate was raised, and said.

That ordinary ones are not told of is tested on the problems of the zoo: ``lab/tests/experiments/test_zoo.py``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer

from tests.problems import Records, network, recorded, said, train
from tests.setup_runs import searching

STEPS = 300


class FixedForVectors(Optimizer):
    """Adam with a rate of its own for everything that is no matrix."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(step=0, first=torch.zeros_like(p), second=torch.zeros_like(p))
                state["step"] += 1
                state["first"].lerp_(p.grad, 0.1)
                state["second"].lerp_(p.grad.square(), 0.001)
                first = state["first"] / (1 - 0.9 ** state["step"])
                second = state["second"] / (1 - 0.999 ** state["step"])
                p.addcdiv_(first, second.sqrt().add_(1e-8), value=-(group["lr"] if p.ndim == 2 else 3e-3))


class OwnRate(SGD):
    """Steps as it likes."""

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p.sub_(p.grad, alpha=0.01)


def run(make: Any, guess: float, face: str = "auto") -> tuple[nn.Module, Records, list[str]]:
    """Model, journal, and what was said."""
    model, journal = network(), Records()
    with recorded() as caught:
        optimizer = make(model.parameters(), lr=guess)
        train(model, optimizer, searching(model, optimizer, STEPS, face, journal=journal), range(STEPS))
    return model, journal, said(caught)


@pytest.mark.parametrize(
    ("make", "guess"),
    [
        (FixedForVectors, 1e-6),
        (FixedForVectors, 1e-3),
        (FixedForVectors, 1e-2),
        (OwnRate, 1e-6),
        (OwnRate, 1e-2),
        (OwnRate, 10.0),
    ],
)
def test_steps_that_do_not_follow_the_rate_are_said(make: Any, guess: float) -> None:
    _, journal, said = run(make, guess)
    assert len(said) == 1
    assert "update size does not scale with the learning rate" in said[0]
    assert "proportional to lr" in said[0]
    assert [r["why"] for r in journal.rounds if r["event"] == "stopped"] == ["rate_ignored"]
    at = next(r["step"] for r in journal.rounds if r["event"] == "stopped")
    assert at <= 65


@pytest.mark.parametrize("face", ["auto", "schedule"])
def test_by_any_face(face: str) -> None:
    assert len(run(OwnRate, 1e-3, face)[2]) == 1


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["Adagrad", "AdamW", "Adafactor", "RMSprop", "SGD"])
def test_others_are_built_without_a_word(name: str) -> None:
    model = network()
    more = {"lr_decay": 0.01} if name == "Adagrad" else {}
    searching(model, getattr(torch.optim, name)(model.parameters(), lr=1e-6, **more), STEPS)
