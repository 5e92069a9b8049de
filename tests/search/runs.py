"""Small runs that search, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import hdet
from hdet.search.search import Search
from tests.problems import Batch, batch_of, network

__all__ = [
    "built",
    "final_loss",
    "fixed",
    "loss_of",
    "momentum",
    "search_of",
    "train",
    "two_groups",
]


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


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
        loss = loss_of(model, batch_of(t + own))
        loss.backward()
        optimizer.step()
        rates.append([float(group["lr"]) for group in optimizer.param_groups])
        told = tells(loss, t)
        scheduler.step(*([] if told is None else [told]))
    return rates


def final_loss(model: nn.Module) -> float:
    with torch.no_grad():
        return float(loss_of(model, batch_of(999_999, 2000)))


def built(
    guess: float = 1e-3, steps: int = 300, make: Any = torch.optim.Adam, **arguments: Any
) -> tuple[nn.Module, torch.optim.Optimizer, hdet.AutoScheduler]:
    model = network()
    optimizer = make(model.parameters(), lr=guess)
    return model, optimizer, hdet.auto(optimizer, total_steps=steps, **arguments)


def search_of(scheduler: hdet.AutoScheduler) -> Search:
    return scheduler.search


def fixed(rate: float, steps: int = 300, make: Any = torch.optim.Adam) -> float:
    model = network()
    optimizer = make(model.parameters(), lr=rate)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    train(model, optimizer, scheduler, range(steps - 1), tells=lambda loss, t: None)
    return final_loss(model)


def momentum(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)
