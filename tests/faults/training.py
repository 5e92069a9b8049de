"""A small run on several ranks that saves as it goes, and goes on from its checkpoint where there is one."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import hdet

__all__ = ["ROUND", "STEPS", "WAYS", "End", "Plan", "train"]

STEPS, ROUND = 48, 8
WAYS = ("trained", "search", "arms")


@dataclass(frozen=True)
class Plan:
    """What is trained, and when it is saved."""

    way: str
    """ "trained": replicas at rates of their own, with shared gradients; "arms": with gradients of their own; "search":
    a search for the rate."""
    ranks: int
    save_every: int
    seed: int = 0

    @property
    def saves_inside_rounds(self) -> bool:
        """Where replicas train apart, a run that is cut there goes on from their mean: close, but not bit-equal."""
        return self.way != "search" and self.save_every % ROUND != 0


@dataclass(frozen=True)
class End:
    """What a rank has at the end."""

    digest: str
    """Of weights, the optimizer's memory and the scheduler's state, bit by bit."""
    buffers: str
    """Of running statistics, bit by bit: inside a round they are each rank's own, and a checkpoint has their mean."""
    loss: float
    """On data that nobody trained on."""
    began: int
    """The step at which it began: 0, or that of the checkpoint."""


def train(plan: Plan, folder: Path, *, journal: bool, before_step: Callable[[int], None] = lambda _: None) -> End:
    """Train to the end. ``journal``: whether this rank writes it."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", hdet.ResumeWarning)  # inside a round: expected
    model, replica, optimizer, scheduler = _built(plan, folder / "journal" / "run.jsonl" if journal else None)
    file = folder / "checkpoint" / "run.pt"
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    if hdet.exists(file):
        hdet.load(file, **parts)
    began = scheduler.last_epoch
    for step in range(began, STEPS):
        before_step(step)
        loss = _loss(replica, _batch(plan.seed, step, dist.get_rank()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step(loss)
        if (step + 1) % plan.save_every == 0:
            hdet.save(file, **parts)
    with torch.no_grad():
        validation = _loss(model.eval(), _batch(0, STEPS, 0, size=1000)).item()
    memory = [value for state in optimizer.state.values() for value in state.values()]
    digest = _digest([*model.parameters(), *memory], repr(scheduler.state_dict()))
    return End(digest, _digest(list(model.buffers())), validation, began)


def _built(plan: Plan, journal: Path | None) -> tuple[nn.Module, nn.Module, torch.optim.Optimizer, Any]:
    model = _network(plan.seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    if plan.way == "search":
        scheduler = hdet.auto(optimizer, STEPS, model=model, journal=journal)
        return model, _shared(model, dist.group.WORLD), optimizer, scheduler
    arms = hdet.arms(2 if plan.ranks == 4 else plan.ranks) if plan.way == "arms" else None
    shared = dist.group.WORLD if arms is None else arms.gradients
    settings: Any = {"sync_every": ROUND, "model": model, "group": arms, "journal": journal}
    return model, _shared(model, shared), optimizer, hdet.OneCycleLR(optimizer, 0.03, STEPS, **settings)


def _shared(model: nn.Module, ranks: dist.ProcessGroup | None) -> nn.Module:
    """With gradients in the same order in every step.

    Without ``find_unused_parameters`` DDP puts them in another order after its first step. From three ranks on the
    order decides how sums are rounded, so that a run that is resumed would not be bit-equal, with hdet or without.
    """
    return DistributedDataParallel(model, process_group=ranks, find_unused_parameters=True)


def _network(seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Linear(12, 1))


def _batch(seed: int, step: int, rank: int, size: int = 32) -> Tensor:
    return torch.randn(size, 6, generator=torch.Generator().manual_seed(100_000 * seed + 10 * step + rank + 1000))


def _loss(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x.sin().sum(1, keepdim=True)).square().mean()


def _digest(tensors: list[Tensor], text: str = "") -> str:
    found = sha256(text.encode())
    for tensor in tensors:
        found.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
