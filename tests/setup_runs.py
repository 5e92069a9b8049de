"""Building a run that finds its rate, and the plain loop whose final loss every set-up is compared with.

The one place that knows what such a run needs beside model and optimizer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR

import hdet
from tests.problems import batch_of, final_loss, loss_of, network, train

__all__ = ["FACES", "fixed_loss", "plain_loss", "searching", "trained"]

HELD = 0.3
"""The least part of its highest value that a rate has while a schedule is held: the search lowers it by 3 at most."""
FACES = ("auto", "schedule")
"""What users build such a run with; "schedule": :func:`hdet.auto` on a schedule of their own."""
Make = Callable[..., Optimizer]
LossFn = Callable[[Any, Any], Tensor]


def searching(
    model: nn.Module, optimizer: Any, steps: int, face: str = "auto", *, known: bool = False, **more: Any
) -> Any:
    """The scheduler of a run that finds its rate.

    Args:
        model: what trains.
        optimizer: of it; ``hdet.auto`` takes several.
        steps: of the run.
        face: one of FACES.
        known: whether the scheduler is told of the model.
        more: further arguments of the face.
    """
    given = {"total_steps": steps, **({"model": model} if known else {}), **more}
    if face == "schedule":
        return hdet.auto(optimizer, schedule=lambda one: CosineAnnealingLR(one, steps), **given)
    return hdet.auto(optimizer, **given)


def trained(model: nn.Module, optimizers: Any, scheduler: Any, steps: int, loss_fn: LossFn = loss_of) -> None:
    """A loop with one optimizer or several, on any loss of the batches."""
    parts = optimizers if isinstance(optimizers, list) else [optimizers]
    for t in range(steps):
        model.zero_grad()
        loss = loss_fn(model, batch_of(t))
        loss.backward()
        for part in parts:
            part.step()
        scheduler.step(loss.detach())


@cache
def plain_loss(make: Make = torch.optim.Adam, guess: float = 1e-6, steps: int = 200, face: str = "auto") -> float:
    """The final loss of the plain loop in one process: the small network, one optimizer, nothing special."""
    model = network()
    optimizer = make(model.parameters(), lr=guess)
    train(model, optimizer, searching(model, optimizer, steps, face), range(steps))
    return final_loss(model)


@cache
def fixed_loss(make: Make, rate: float, steps: int = 200, build: Callable[[], nn.Module] = network) -> float:
    """The final loss of a loop with torch's OneCycleLR at a rate that is known to be good."""
    model = build()
    optimizer = make(model.parameters(), lr=rate)
    scheduler = OneCycleLR(optimizer, rate, total_steps=steps + 1, cycle_momentum=False)
    train(model, optimizer, scheduler, range(steps))
    return final_loss(model)
