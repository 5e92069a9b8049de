"""One small model in float64, plain or sharded over a mesh, and its training. Through the public API only."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import hdet

__all__ = ["Net", "Ran", "batch_of", "found", "loss_of", "mesh_of", "part_of", "sharded", "train", "whole"]

Batch = tuple[Tensor, Tensor]

if torch.__version__ < "2.8":  # there FSDP2 on the CPU asks its streams for events, which they do not have
    torch.cpu.Stream.record_event = lambda self, event=None: torch.cpu.Event()
    torch.cpu.Stream.wait_event = lambda self, event: None


class Net(nn.Module):
    """Two layers share one weight, one bias is frozen, and ``scale`` stays outside of what is sharded."""

    def __init__(self, width: int = 9) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            layers = [nn.Linear(6, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()]
            twin = nn.Linear(width, width)
            self.body = nn.Sequential(*layers, twin, nn.Tanh(), nn.Linear(width, 1)).double()
        self.body[4].weight = self.body[2].weight
        self.body[2].bias.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.body(x)
        return self.scale * made


def batch_of(k: int, size: int = 32) -> Batch:
    """Batch ``k`` of an endless stream."""
    g = torch.Generator().manual_seed(1000 + k)
    x = torch.randn(size, 6, generator=g, dtype=torch.float64)
    return x, torch.sin(x[:, :1]) + 0.5 * x[:, 1:2] * x[:, 2:3]


def part_of(batch: Batch, number: int, parts: int) -> Batch:
    x, y = (tensor.chunk(parts)[number] for tensor in batch)
    return x, y


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def mesh_of(*shape: int) -> DeviceMesh:
    """Of one dimension, ``shard``, or with ``replicate`` before it."""
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


def sharded(model: Net, mesh: DeviceMesh, **policy: Any) -> Net:
    """The body's weights in shards; ``scale`` is plain."""
    from torch.distributed.fsdp import fully_shard

    fully_shard(model.body, mesh=mesh, **policy)
    return model


def whole(model: nn.Module) -> list[Tensor]:
    """All weights, put together again. Collective where they are sharded."""
    values: list[Any] = [p.detach() for p in model.parameters()]
    return [(value.full_tensor() if hasattr(value, "full_tensor") else value).clone() for value in values]


class Ran(NamedTuple):
    """What a run came to."""

    weights: list[Tensor]
    rates: list[float]
    rounds: list[dict[str, Any]]
    """Of the journal, on the rank that writes it."""


def train(
    model: nn.Module, optimizer: Any, scheduler: Any, steps: range, number: int = 0, parts: int = 1, shares: Any = None
) -> list[float]:
    """The rate of each step, on part ``number`` of every batch. ``shares``: the ranks that share gradients."""
    rates = []
    for t in steps:
        optimizer.zero_grad()
        loss = loss_of(model, part_of(batch_of(t), number, parts))
        loss.backward()
        alone = getattr(model, "scale", None)
        if parts > 1 and alone is not None:
            dist.all_reduce(alone.grad, group=shares)
            alone.grad /= dist.get_world_size(shares)
        optimizer.step()
        rates.append(float(optimizer.param_groups[0]["lr"]))
        scheduler.step(loss.detach())
    return rates


def found(
    model: nn.Module, guess: float, steps: int, journal: Path, number: int = 0, parts: int = 1, **more: Any
) -> Ran:
    """One search from its beginning to its end."""
    optimizer = torch.optim.Adam(model.parameters(), lr=guess)
    writes = not dist.is_initialized() or dist.get_rank() == 0
    scheduler = hdet.auto(optimizer, total_steps=steps, journal=journal if writes else None, **more)
    rates = train(model, optimizer, scheduler, range(steps), number, parts)
    return Ran(whole(model), rates, hdet.read_journal(journal).rounds if writes else [])
