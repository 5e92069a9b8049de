"""The replica group: who the replicas are, and the three things they do together.

:class:`Solo` is the twin for one replica, so that callers have no ``if distributed``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple, Protocol, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from hdet.errors import ArgumentError, HdetError, LostReplicaError

__all__ = ["Distributed", "ReplicaGroup", "Seat", "Solo", "arriving", "connect", "find_seat"]

Value = TypeVar("Value")


class Seat(NamedTuple):
    """This replica's number and how many there are. Found without a collective."""

    replica: int
    size: int


class ReplicaGroup(Protocol):
    """What replicas do together. Every method is a collective: all replicas call it, in the same order."""

    @property
    def seat(self) -> Seat:
        """This replica's place."""

    def gather(self, row: Tensor) -> list[list[float]]:
        """Every replica's ``row`` (1-d, float64), as numbers. Synchronises host and device once."""

    def gather_objects(self, value: Value) -> list[Value]:
        """Every replica's ``value``, pickled. Slow: for error messages."""

    def start_sum(self, flat: Tensor) -> Callable[[], object]:
        """Begin to replace ``flat`` by its sum over the replicas; call the result to wait for the end."""


class Solo:
    """One replica alone."""

    seat = Seat(0, 1)

    def gather(self, row: Tensor) -> list[list[float]]:
        return [row.tolist()]

    def gather_objects(self, value: Value) -> list[Value]:
        return [value]

    def start_sum(self, flat: Tensor) -> Callable[[], object]:
        return lambda: flat


class Distributed:
    """Replicas are the ranks of a process group of our own, so our collectives cannot pair with DDP's."""

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self._group = process_group
        self.seat = Seat(dist.get_rank(process_group), dist.get_world_size(process_group))
        self._backends = _backend_of_device(process_group)

    def gather(self, row: Tensor) -> list[list[float]]:
        row = row.to(self._gathering_device(row.device))
        rows = [torch.empty_like(row) for _ in range(self.seat.size)]
        dist.all_gather(rows, row, group=self._group)
        return torch.stack(rows).tolist()

    def gather_objects(self, value: Value) -> list[Value]:
        values: list[Any] = [None] * self.seat.size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def start_sum(self, flat: Tensor) -> Callable[[], object]:
        work = dist.all_reduce(flat, group=self._group, async_op=True)
        return work.wait  # type: ignore[no-any-return]

    def _gathering_device(self, device: torch.device) -> torch.device:
        """Where a small row travels: gloo copies device memory to the host anyway, nccl takes nothing else."""
        if self._backends.get(device.type, "gloo") != "gloo":
            return device
        return torch.device("cpu" if "cpu" in self._backends else next(iter(self._backends)))


def find_seat(group: dist.ProcessGroup | None) -> Seat:
    """This replica's place in ``group`` (None: the default group; a single replica if there is none yet)."""
    if not (dist.is_available() and dist.is_initialized()):
        return Solo.seat
    seat = Seat(dist.get_rank(group), dist.get_world_size(group))
    if seat.replica < 0:
        raise ArgumentError(
            f"this process (rank {dist.get_rank()}) is not in the replica group given as group=, whose ranks are "
            f"{dist.get_process_group_ranks(group)}; give each rank a group that contains it, or group=None for all"
        )
    return seat


_own_groups: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


def connect(group: dist.ProcessGroup | None) -> ReplicaGroup:
    """The replica group over the same ranks as ``group``. A collective the first time for these ranks."""
    if find_seat(group).size == 1:
        return Solo()
    parent = group if group is not None else dist.group.WORLD
    assert parent is not None  # torch.distributed is initialised: find_seat saw more than one replica
    if parent not in _own_groups:
        ranks = dist.get_process_group_ranks(parent)
        whole_world = len(ranks) == dist.get_world_size()
        _own_groups[parent] = dist.new_group(
            ranks,
            timeout=_timeout_of(parent),
            backend=_backend_text(parent),
            use_local_synchronization=not whole_world,  # then ranks outside the group need not take part
        )
    return Distributed(_own_groups[parent])


@contextmanager
def arriving(what: str) -> Iterator[None]:
    """Name what was going on when a collective failed: usually some replica never arrived."""
    try:
        yield
    except HdetError:  # has its own words
        raise
    except RuntimeError as error:
        raise LostReplicaError(
            f"a collective failed in {what}: {error}\nSome replica did not arrive within the process group's time-out, "
            "or left. Every rank must call step(), converge() and consensus() equally often; look for the first error "
            "on the other ranks, and for a rank that skips steps (an uneven loader, a skipped GradScaler step)."
        ) from error


def _backend_text(group: dist.ProcessGroup) -> str:
    return str(dist.get_backend_config(group))


def _backend_of_device(group: dist.ProcessGroup) -> dict[str, str]:
    """For instance {"cpu": "gloo", "cuda": "nccl"}."""
    pairs = (part.split(":", 1) for part in _backend_text(group).split(",") if ":" in part)
    return {device.strip(): backend.strip() for device, backend in pairs}


def _timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """The user's time-out, which a new group would not inherit. None (torch's default) where torch hides it."""
    for device in _backend_of_device(group):
        try:
            options = group._get_backend(torch.device(device)).options
            return timedelta(seconds=options._timeout.total_seconds())
        except (AttributeError, RuntimeError):
            continue
    return None
