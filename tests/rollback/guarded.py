"""A small training under a guard, whose batches are functions of the step, so that it can be cut or spoilt anywhere."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import hdet
from tests.problems import batch_of, final_loss, loss_of, recorded

__all__ = ["EVERY", "STEPS", "Guarded", "Spoil", "adam", "blow_up", "flip", "not_a_number", "run"]

STEPS, EVERY = 240, 10
Spoil = Callable[[nn.Module], None]


def adam(parameters: Any) -> Optimizer:
    return torch.optim.Adam(parameters, lr=3e-3)


class Guarded:
    """Model with BatchNorm, optimizer, schedule and guard."""

    def __init__(self, make: Any = adam, guarded: bool = True, seed: int = 0, **arguments: Any) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.model = nn.Sequential(nn.Linear(6, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 1))
        self.optimizer: Optimizer = make(self.model.parameters())
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.995)
        self.guard = hdet.Guard(self.optimizer, self.model, **{"check_every": EVERY, **arguments}) if guarded else None
        self.rates: list[Any] = []
        self.applied: list[float] = []
        """The rates of the first group as the optimizer's step sees them."""
        self.optimizer.register_step_pre_hook(lambda opt, *_: self.applied.append(float(opt.param_groups[0]["lr"])))

    @property
    def watching(self) -> hdet.Guard:
        assert self.guard is not None
        return self.guard

    @property
    def parts(self) -> dict[str, Any]:
        parts = {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule}
        return parts if self.guard is None else {**parts, "guard": self.guard}

    def go(self, begin: int, end: int, spoilt: dict[int, Spoil] | None = None) -> Guarded:
        """Train. ``spoilt``: what happens to the model after a step."""
        for t in range(begin, end):
            self.optimizer.zero_grad()
            loss = loss_of(self.model, batch_of(t))
            loss.backward()
            self.optimizer.step()
            (spoilt or {}).get(t, lambda model: None)(self.model)
            self.schedule.step()
            self.rates.append([float(rate) for rate in self.schedule.get_last_lr()])
            if self.guard is not None:
                self.guard.step(loss)
        return self

    @property
    def final(self) -> float:
        return final_loss(self.model)

    def save(self, path: Path) -> None:
        hdet.save(path, **self.parts)

    @property
    def numbers(self) -> list[Tensor]:
        """Weights, buffers and the optimizer's memory."""
        memory = [v for state in self.optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
        return [*self.model.state_dict().values(), *memory]

    def equals(self, other: Guarded) -> bool:
        return all(map(torch.equal, self.numbers, other.numbers))


def run(spoilt: dict[int, Spoil] | None = None, steps: int = STEPS, **arguments: Any) -> tuple[Guarded, list[str]]:
    """A whole run, and what people were told."""
    with recorded() as caught:
        ran = Guarded(**arguments).go(0, steps, spoilt)
    return ran, [str(one.message) for one in caught if issubclass(one.category, hdet.RollbackWarning)]


@torch.no_grad()
def flip(model: nn.Module) -> None:
    """The highest bit of a weight's exponent."""
    model[-1].weight.view(torch.int32)[0, 3] ^= 1 << 30  # type: ignore[union-attr,operator]


@torch.no_grad()
def blow_up(model: nn.Module) -> None:
    """As a step that was far too long leaves them: finite, and no good."""
    for p in model.parameters():
        p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(1)), alpha=30)


@torch.no_grad()
def not_a_number(model: nn.Module) -> None:
    next(model.parameters()).view(-1)[0] = math.nan
