"""The ranks that train together: who this process is, where its model lives, and what all of them agree on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["Ranks", "joined"]


@dataclass(frozen=True)
class Ranks:
    """This process among the ranks of a run."""

    rank: int
    size: int
    device: torch.device
    control: Any = None
    """A gloo group for what is agreed on the CPU; None: there are no others."""

    def wrapped(self, model: nn.Module) -> nn.Module:
        """With shared gradients. Buffers stay each rank's own: the scheduler averages them."""
        if self.control is None:
            return model
        newer = "forward_sync_buffers" in signature(DistributedDataParallel).parameters  # torch renames it
        keep: dict[str, Any] = {"forward_sync_buffers" if newer else "broadcast_buffers": False}
        return DistributedDataParallel(model, **keep)

    def mean(self, value: float) -> float:
        """Over all ranks, which wait for each other here. A collective."""
        if self.control is None:
            return value
        total = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(total, group=self.control)
        return float(total) / self.size


@contextmanager
def joined(rank: int, size: int, store: str) -> Iterator[Ranks]:
    """One of ``size`` ranks of this machine, which meet at the file ``store``; each has a GPU if there are enough."""
    enough = torch.cuda.is_available() and torch.cuda.device_count() >= size
    device = torch.device("cuda", rank) if enough else torch.device("cpu")
    if size == 1:
        yield Ranks(rank, size, device)
        return
    if enough:
        torch.cuda.set_device(device)
    backend = "nccl" if enough else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size)
    try:
        yield Ranks(rank, size, device, dist.new_group(backend="gloo") if enough else dist.group.WORLD)
    finally:
        dist.destroy_process_group()
