"""A small search for the rate whose batches are functions of the step, so that it can be cut anywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hdet

__all__ = ["STEPS", "Searching", "squared"]

STEPS = 60


def squared(model: nn.Module, x: Tensor) -> Tensor:
    """How far the model is from a sum of sines."""
    return (model(x) - x.sin().sum(1, keepdim=True)).square().mean()


class Searching:
    """Model, optimizer and scheduler; ``seed`` is of the first weights, which a checkpoint replaces."""

    def __init__(self, seed: int = 0, optimizer: str = "adam", steps: int | None = STEPS, **arguments: Any) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.model = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Linear(12, 1))
        if optimizer == "adam":
            self.optimizer: torch.optim.Optimizer = torch.optim.Adam(self.model.parameters(), 1e-5)
        else:
            self.optimizer = torch.optim.SGD(self.model.parameters(), 10.0, momentum=0.9)
        self.scheduler = hdet.auto(self.optimizer, **{"total_steps": steps, **arguments})
        self.rates: list[float] = []

    @property
    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def go(self, begin: int, end: int) -> Searching:
        """Train."""
        for step in range(begin, end):
            loss = squared(self.model, _batch(step))
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step(loss)
            self.rates.append(float(self.scheduler.get_last_lr()[0]))
        return self

    def save(self, path: Path, **more: Any) -> None:
        hdet.save(path, **self.parts, rates=self.rates, **more)

    @classmethod
    def loaded(cls, path: Path, **arguments: Any) -> Searching:
        """One that was built from other weights, and goes on from a checkpoint."""
        found = cls(seed=1, **arguments)
        found.rates = hdet.load(path, **found.parts)["rates"]
        return found

    @property
    def numbers(self) -> list[Tensor]:
        """Weights, buffers and the optimizer's memory."""
        memory = [v for state in self.optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
        return [*self.model.state_dict().values(), *memory]

    def equals(self, other: Searching) -> bool:
        """Bit by bit, and in what the search has learned."""
        same = all(torch.equal(a, b) for a, b in zip(self.numbers, other.numbers, strict=True))
        learned = [repr(one.scheduler.state_dict()["hdet"]) for one in (self, other)]
        return same and self.rates == other.rates and learned[0] == learned[1]


def _batch(step: int) -> Tensor:
    return torch.randn(32, 6, generator=torch.Generator().manual_seed(1000 + step))
