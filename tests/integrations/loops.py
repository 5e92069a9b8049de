"""The loop that people write without a framework. Frameworks are judged by its final loss, not by its every step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import torch
from torch.optim import Optimizer

import hdet
from tests.problems import Batch, batch_of, final_loss, loss_of, network, quiet

__all__ = ["auto_on", "loss_of_plain_loop", "slices", "train"]

Make = Callable[..., Optimizer]


def auto_on(optimizer: Any, steps: int, **more: Any) -> Any:
    """What users of a framework write: the scheduler, and nothing else."""
    return hdet.auto(optimizer, total_steps=steps, **more)


def train(
    net: torch.nn.Module,
    optimizers: Optimizer | Sequence[Optimizer],
    scheduler: Any,
    batches: Iterable[Batch],
    *,
    clip: float | None = None,
    gives_loss: bool = True,
) -> float:
    """One step a batch; the final loss."""
    parts = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
    for batch in batches:
        net.zero_grad()
        loss = loss_of(net, batch)
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
        for part in parts:
            part.step()
        scheduler.step(*([loss.detach()] if gives_loss else []))
    return final_loss(net)


@cache
def loss_of_plain_loop(
    make: Make = torch.optim.Adam,
    guess: float = 1e-5,
    steps: int = 200,
    size: int = 64,
    clip: float | None = None,
    *,
    gives_loss: bool = True,
) -> float:
    """The final loss of the plain loop in one process, on batches 0, 1, 2, ... of ``size``.

    A search that is given losses climbs faster until they have fallen: one without them is another run.
    """
    net = network()
    optimizer = make(net.parameters(), lr=guess)
    batches = (batch_of(t, size) for t in range(steps))
    with quiet():
        return train(net, optimizer, auto_on(optimizer, steps), batches, clip=clip, gives_loss=gives_loss)


def slices(samples: int, size: int, steps: int) -> Iterable[Batch]:
    """The batches that a DataLoader makes of one large batch, in order."""
    x, y = batch_of(0, samples)
    return ((x[t * size : (t + 1) * size], y[t * size : (t + 1) * size]) for t in range(steps))
