"""The replica group: which ranks the replicas are, and their few collectives.

A replica is one rank, or an arm: several ranks that share gradients and hold the same weights.
"""

from __future__ import annotations

import atexit
import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import islice
from typing import Any, NamedTuple, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from hdet.checks import must_be
from hdet.errors import ArgumentError, HdetError, LostReplicaError
from hdet.ranks.arms import Arms, backend_of_device, new_group
from hdet.ranks.presence import first_line, presence
from hdet.ranks.torchft import FailedTry, Torchft

Value = TypeVar("Value")
_HOST = torch.device("cpu")


class ReplicaIndex(NamedTuple):
    """This replica's number and how many there are. Found without a collective."""

    replica: int
    size: int

    def own(self, rows: Sequence[Sequence[Value]]) -> list[Value]:
        """This replica's row, of those saved for each; all of them, joined, if the number of replicas has changed."""
        return list(rows[self.replica]) if len(rows) == self.size else [value for row in rows for value in row]


class ReplicaGroup:
    """The collectives of replicas; this class itself is one replica alone.

    Every method is a collective: all replicas call it, in the same order.
    """

    replica_index: ReplicaIndex = ReplicaIndex(0, 1)
    """This replica's place."""
    rank: int = 0
    """The row of :meth:`gather` that is this process's."""
    members: Sequence[Sequence[int]] = ((0,),)
    """``members[r]``: the rows of :meth:`gather` that come from replica r's ranks."""

    def gather(self, row: Sequence[float], device: torch.device = _HOST) -> list[list[float]]:
        """Every rank's ``row``. ``device``: that of the weights, for backends that work on devices only."""
        return [list(row)]

    def gather_objects(self, value: Value) -> list[Value]:
        """Every rank's ``value``, pickled. Slow: for error messages."""
        mine = pickle.dumps(value)
        longest = max(int(size) for (size,) in self.gather([float(len(mine))]))
        rows = self.gather([float(byte) for byte in mine.ljust(longest)])  # pickle ignores what follows
        return [pickle.loads(bytes(map(int, row))) for row in rows]

    def broadcast_object(self, value: Value) -> Value:
        """Rank 0's ``value``, pickled."""
        return value

    def start_sum(self, flat: Tensor) -> Callable[[], object]:
        """Begin to replace ``flat`` by its sum over the replicas; call the result to wait for the end."""
        return lambda: flat


Solo = ReplicaGroup
"""One replica alone, so that callers have no ``if distributed``."""


class Distributed(ReplicaGroup):
    """Replicas in a process group of our own, so our collectives cannot pair with DDP's.

    Args:
        process_group: over all ranks of all replicas.
        members: the ranks of each replica, by their place in the group; None: every rank is a replica.
    """

    def __init__(self, process_group: dist.ProcessGroup, members: list[list[int]] | None = None) -> None:
        self._group = process_group
        self.rank, self._ranks = dist.get_rank(process_group), dist.get_world_size(process_group)
        self.members = members if members is not None else [[rank] for rank in range(self._ranks)]
        replica = next(r for r, own in enumerate(self.members) if self.rank in own)
        self.replica_index = ReplicaIndex(replica, len(self.members))
        self._backends = backend_of_device(process_group)
        if "gloo" in self._backends.values():
            _pause_at_exit()

    def gather(self, row: Sequence[float], device: torch.device = _HOST) -> list[list[float]]:
        # As bytes: not every device has float64.
        mine = torch.tensor(row, dtype=torch.float64).view(torch.uint8).to(self._gathering_device(device))
        rows = mine.new_empty(self._ranks, mine.numel())
        with _communicating():
            dist.all_gather(list(rows.unbind()), mine, group=self._group)
        return rows.cpu().view(torch.float64).tolist()

    def broadcast_object(self, value: Value) -> Value:
        values = [value]
        with _communicating():
            dist.broadcast_object_list(values, src=dist.get_global_rank(self._group, 0), group=self._group)
        return values[0]

    def start_sum(self, flat: Tensor) -> Callable[[], object]:
        with _communicating():
            work = dist.all_reduce(flat, group=self._group, async_op=True)
        waited: Callable[[], object] = _communicating()(work.wait)
        return waited

    def _gathering_device(self, device: torch.device) -> torch.device:
        """The device of a small row: gloo copies device memory to the host anyway, nccl takes device memory only."""
        if self._backends.get(device.type, "gloo") != "gloo":
            return device
        return torch.device("cpu" if "cpu" in self._backends else next(iter(self._backends)))


class ManagedGroup(ReplicaGroup):
    """The replicas of one quorum of torchft: whoever is there until the next. Nothing is broadcast.

    Everything is a sum by the manager's ``allreduce``. Whatever fails raises a :class:`FailedTry`.

    Args:
        manager: torchft's, after a quorum.
        replica_index: this replica's place among them.
        device: where rows travel, which is where the weights are: a backend may reach only devices.
    """

    def __init__(self, manager: Any, replica_index: ReplicaIndex, device: torch.device = _HOST) -> None:
        self._manager, self._device = manager, device
        self.replica_index = replica_index
        self.rank = replica_index.replica
        self.members = [[rank] for rank in range(replica_index.size)]

    def gather(self, row: Sequence[float], device: torch.device = _HOST) -> list[list[float]]:
        # The sum of tables in which each has filled a row.
        table = torch.zeros(self.replica_index.size, len(row), dtype=torch.float64)
        table[self.rank] = torch.tensor(row, dtype=torch.float64)
        table = table.to(self._device)
        self.start_sum(table)()
        return table.tolist()

    def start_sum(self, flat: Tensor) -> Callable[[], object]:
        work = self._manager.allreduce(flat, reduce_op=dist.ReduceOp.SUM)

        def wait() -> None:
            work.wait()  # torchft swallows what it raises
            error = self._manager.errored()
            if error is not None:
                raise FailedTry(first_line(error)) from error

        return wait


Group: TypeAlias = "dist.ProcessGroup | Arms | Torchft | None"
"""What a user may give as ``group=``."""


def gather_named(
    group: ReplicaGroup, row: Mapping[str, Sequence[float]], device: torch.device = _HOST
) -> list[dict[str, list[float]]]:
    """Every rank's numbers, by name; each rank must have equally many of a name. Collective."""
    rows = [iter(found) for found in group.gather([number for part in row.values() for number in part], device)]
    return [{name: list(islice(found, len(part))) for name, part in row.items()} for found in rows]


def find_replica_index(group: Group) -> ReplicaIndex:
    """This replica's place in ``group`` (None: the default group; a single replica if there is none yet)."""
    if isinstance(group, Torchft) or not (dist.is_available() and dist.is_initialized()):
        return Solo.replica_index
    if isinstance(group, Arms):
        return ReplicaIndex(group.index, len(group.members))
    return ReplicaIndex(dist.get_rank(group), dist.get_world_size(group))


def check_group(group: Any) -> None:
    """Raise for what cannot be ``group=``, such as a process group without some of the ranks.

    The values of those ranks would not follow the ensemble's decisions.
    """
    if group is None or isinstance(group, (Arms, Torchft)):
        return
    rule = "a process group, hdet.arms(n), hdet.torchft(manager) or None"
    must_be(rule, isinstance(group, dist.ProcessGroup), "None means all ranks", group=group)
    if dist.get_world_size(group) < dist.get_world_size():
        raise ArgumentError(
            f"group= must have all {dist.get_world_size()} ranks, but got {dist.get_world_size(group)} of them; for "
            "replicas of several ranks use group=hdet.arms(n) and DDP(model, process_group=arms.gradients)"
        )


_own_groups: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


def connect(group: Group) -> ReplicaGroup:
    """The replica group over the same ranks as ``group``. A collective the first time for these ranks."""
    if find_replica_index(group).size == 1:
        return Solo()
    parent = group if isinstance(group, dist.ProcessGroup) else dist.group.WORLD
    assert parent is not None  # torch.distributed is initialised: find_replica_index saw more than one replica
    if parent not in _own_groups:
        ranks = dist.get_process_group_ranks(parent)
        with _communicating():
            _own_groups[parent] = new_group(ranks, parent)
    return Distributed(_own_groups[parent], group.members if isinstance(group, Arms) else None)


def connect_alike(group: ReplicaGroup, held: Sequence[float]) -> ReplicaGroup:
    """The replica group of those ranks that hold the same parts of the weights as this one. A collective of all ranks.

    ``held[rank]``: a number for the parts; each replica holds all of them.
    """
    parent = dist.group.WORLD
    assert parent is not None  # the caller is connected to other replicas: torch.distributed is initialised
    groups = {}
    for part in sorted(set(held)):
        ranks = [rank for rank, own in enumerate(held) if own == part]
        groups[part] = new_group(ranks, parent), ranks
    process_group, ranks = groups[held[group.rank]]
    members = [[ranks.index(rank) for rank in own if rank in ranks] for own in group.members]
    return Distributed(process_group, members)


@contextmanager
def arriving(what: str) -> Iterator[None]:
    """If a collective inside fails, say in which call, and which ranks are missing.

    Another error of this rank is raised as it is, and noted for the other ranks, which will wait for this one in vain.
    """
    try:
        yield
    except _CollectiveFailed as failure:
        raise LostReplicaError(
            f"a collective failed in {what}: {failure}\n{presence().report()}\n"
            "A rank was lost, or did not come within the process group's time-out: look for the first error on any "
            "rank, and start again from the last checkpoint. Every rank must call step(), converge(), consensus(), "
            "hdet.save(), hdet.load() and hdet.exists() equally often (an uneven loader? a call on rank 0 alone?)."
        ) from failure.__cause__
    except HdetError:  # has its own message, and is raised on all ranks
        raise
    except Exception as error:
        if dist.is_available() and dist.is_initialized():
            presence().leave(what, error)
        raise


class _CollectiveFailed(LostReplicaError):
    """A collective failed: :func:`arriving` adds what is known about it."""


@contextmanager
def _communicating() -> Iterator[None]:
    """Around a collective and nothing else: what it raises is a failed collective, unless memory has run out."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise _CollectiveFailed(str(error)) from error


_EXIT_PAUSE = 0.1
"""Seconds to wait at exit, so that gloo's threads can release their tensors."""


@cache
def _pause_at_exit() -> None:
    """Have the interpreter wait a moment before it ends.

    A thread of gloo drops its tensors shortly after their collective has ended, and needs the interpreter for that. On
    a busy machine a program may be gone by then; torch then ends it by SIGABRT, after all its work was done
    (pytorch/pytorch pull request 179291). DDP alone does the same; our collectives at the last step make it likelier.
    """
    atexit.register(lambda: time.sleep(_EXIT_PAUSE))
