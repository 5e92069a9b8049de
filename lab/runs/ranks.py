"""The ranks that train together: who this process is, where its model lives, and what all of them agree on."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hdet.errors import ArgumentError

__all__ = ["Ranks", "joined", "launched_ranks", "place_for"]


def launched_ranks() -> int | None:
    """How many ranks a launcher such as torchrun has started, this process being one of them; None: it has not."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else None


def place_for(device: str, ranks: int, place: int = 0) -> torch.device:
    """Where rank number ``place`` of a machine's ``ranks`` trains: on a GPU of its own, if there are enough."""
    enough = torch.cuda.is_available() and torch.cuda.device_count() >= ranks
    if device == "cuda" and not enough:
        found = torch.cuda.device_count() if torch.cuda.is_available() else 0
        raise ArgumentError(
            f"device=cuda needs a GPU per replica, here {ranks}, but found {found}; use fewer replicas, or device=cpu"
        )
    return torch.device("cuda", place) if enough and device != "cpu" else torch.device("cpu")


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

    def first(self, action: Callable[[], None]) -> None:
        """Do something on rank 0 before anybody goes on. Its error is everybody's. A collective."""
        failure: Exception | None = None
        if self.rank == 0:
            try:
                action()
            except Exception as error:
                failure = error
        reason = [None if failure is None else str(failure)]
        if self.control is not None:
            dist.broadcast_object_list(reason, src=0, group=self.control)
        if failure is not None:
            raise failure
        if reason[0] is not None:
            raise ArgumentError(f"rank 0: {reason[0]}")

    def meet(self) -> None:
        """Wait for the others. A collective."""
        self.agree(False, False, 0.0)

    def agree(self, stop: bool, save: bool, loss: float) -> tuple[bool, bool, float]:
        """Whether anybody was asked to stop, and to save, and everybody's mean loss. A collective, of three numbers."""
        if self.control is None:
            return stop, save, loss
        sums = torch.tensor([float(stop), float(save), loss], dtype=torch.float64)
        dist.all_reduce(sums, group=self.control)
        return bool(sums[0] > 0), bool(sums[1] > 0), float(sums[2]) / self.size


@contextmanager
def joined(device: str) -> Iterator[Ranks]:
    """The ranks that a launcher has started; without one, this process alone."""
    size = launched_ranks()
    if size is None:
        yield Ranks(0, 1, place_for(device, 1))
        return
    local, place = int(os.environ.get("LOCAL_WORLD_SIZE", size)), int(os.environ.get("LOCAL_RANK", "0"))
    where = place_for(device, local, place)
    if where.type == "cuda":
        torch.cuda.set_device(where)
    dist.init_process_group("nccl" if where.type == "cuda" else "gloo")
    try:
        control = dist.new_group(backend="gloo") if where.type == "cuda" else dist.group.WORLD
        yield Ranks(dist.get_rank(), size, where, control)
    finally:
        dist.destroy_process_group()
