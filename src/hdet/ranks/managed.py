"""The replicas of one quorum of torchft, as a replica group: everything is a sum by the manager's ``allreduce``."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from hdet.ranks.group import ReplicaGroup, ReplicaIndex
from hdet.ranks.torchft import FailedTry, Manager

Value = TypeVar("Value")
_HOST = torch.device("cpu")


class ManagedGroup(ReplicaGroup):
    """Whoever is there, until the next quorum. Whatever fails raises a :class:`FailedTry`. Nothing is broadcast.

    Args:
        manager: torchft's, after a quorum.
        replica_index: this replica's place among them.
        device: where rows travel, which is where the weights are: a backend may reach only devices.
    """

    def __init__(self, manager: Manager, replica_index: ReplicaIndex, device: torch.device = _HOST) -> None:
        self._manager, self._device = manager, device
        self.replica_index = replica_index
        self.rank = replica_index.replica
        self.members = [[rank] for rank in range(replica_index.size)]

    def gather(self, row: Sequence[float], device: torch.device = _HOST) -> list[list[float]]:
        return self._gathered(torch.tensor(row, dtype=torch.float64)).tolist()

    def gather_objects(self, value: Value) -> list[Value]:
        mine = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = [int(size) for (size,) in self.gather([float(len(mine))])]
        rows = self._gathered(torch.nn.functional.pad(mine, (0, max(sizes) - len(mine))))
        return [pickle.loads(row[:size].numpy().tobytes()) for row, size in zip(rows, sizes, strict=True)]

    def start_sum(self, flat: Tensor) -> Callable[[], object]:
        work = self._manager.allreduce(flat, reduce_op=ReduceOp.SUM)

        def wait() -> None:
            work.wait()  # torchft swallows what it raises
            error = self._manager.errored()
            if error is not None:
                raise FailedTry((str(error).splitlines() or [repr(error)])[0]) from error

        return wait

    def _gathered(self, mine: Tensor) -> Tensor:
        """Every replica's tensor, on the host: the sum of tables in which each has filled a row."""
        table = torch.zeros(self.replica_index.size, *mine.shape, dtype=mine.dtype)
        table[self.rank] = mine
        table = table.to(self._device)
        self.start_sum(table)()
        return table.cpu()
