"""Small runs that search, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import hdet
from hdet.auto.search import Search

__all__ = [
    "built",
    "final_loss",
    "fixed",
    "loss_of",
    "momentum",
    "network",
    "problem",
    "search_of",
    "train",
    "two_groups",
]

Batch = tuple[Tensor, Tensor]


def problem(k: int, size: int = 64) -> Batch:
    """Batch ``k`` of an endless stream: a smooth target with a little noise."""
    g = torch.Generator().manual_seed(1000 + k)
    x = torch.randn(size, 6, generator=g)
    y = torch.sin(x[:, :1]) + 0.5 * x[:, 1:2] * x[:, 2:3]
    return x, y + 0.05 * torch.randn(size, 1, generator=g)


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def network(batch_norm: bool = False) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        middle = [nn.BatchNorm1d(32)] if batch_norm else []
        return nn.Sequential(nn.Linear(6, 32), *middle, nn.Tanh(), nn.Linear(32, 1))


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    layers = list(model.children())
    return [{"params": layers[0].parameters()}, {"params": layers[-1].parameters()}]


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Any,
    steps: range,
    own: int = 0,
    tells: Callable[[Tensor, int], Any] = lambda loss, t: loss,
) -> list[list[float]]:
    """The rates of all steps. ``tells``: what the scheduler is given."""
    rates = []
    for t in steps:
        optimizer.zero_grad()
        loss = loss_of(model, problem(t + own))
        loss.backward()
        optimizer.step()
        rates.append([float(group["lr"]) for group in optimizer.param_groups])
        told = tells(loss, t)
        scheduler.step(*([] if told is None else [told]))
    return rates


def final_loss(model: nn.Module) -> float:
    with torch.no_grad():
        return float(loss_of(model, problem(999_999, 2000)))


def built(
    guess: float = 1e-3, steps: int = 300, make: Any = torch.optim.Adam, **arguments: Any
) -> tuple[nn.Module, torch.optim.Optimizer, hdet.OneCycleLR]:
    model = network()
    optimizer = make(model.parameters(), lr=guess)
    return model, optimizer, hdet.OneCycleLR(optimizer, max_lr="auto", total_steps=steps, **arguments)


def search_of(scheduler: hdet.OneCycleLR) -> Search:
    search = scheduler._run.way
    assert isinstance(search, Search)
    return search


def fixed(rate: float, steps: int = 300, make: Any = torch.optim.Adam) -> float:
    model = network()
    optimizer = make(model.parameters(), lr=rate)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    train(model, optimizer, scheduler, range(steps - 1), tells=lambda loss, t: None)
    return final_loss(model)


def momentum(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)
