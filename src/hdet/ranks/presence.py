"""Presence: ranks note in the process group's store where they are, so that an error can say which are missing.

A collective that fails does not say which rank was lost. The store still answers then.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_GRACE = 0.5
"""Seconds that other ranks have to notice a failure too, before they count as missing."""
_PATIENCE = timedelta(seconds=10)
"""Time that a store may take to answer before its host counts as lost."""
_STORE_ERRORS = RuntimeError, ValueError, OSError  # of sockets, time-outs, closed files
_NOTICED = "noticed"
_MOST = 16
"""How many ranks or replicas a message lists, since each of a thousand ranks writes it."""


class Presence:
    """What the ranks of a process group know of each other without a collective.

    Each rank has one note: where it is, an error of its own, or that it has noticed a failure. A note costs one message
    to the store. Notes are only for error messages: if one cannot be written, nothing happens.

    Args:
        store: of the default process group; None if torch does not give access to it.
        rank: that of this process.
        size: number of ranks.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size

    def arrive(self, where: str) -> None:
        """Note that this rank begins a collective at ``where``."""
        self._note(f"last seen {_now()} at {where}")

    def leave(self, where: str, error: BaseException) -> None:
        """Note that this rank has left a collective because of its own error."""
        self._note(f"left with {type(error).__name__}: {first_line(error)} ({_now()} at {where})")

    def report(self) -> str:
        """For people: which ranks have not noticed that the collective failed, and when each was last seen.

        These ranks are dead, silent, late, or in another call.
        """
        if self._store is None:
            return "Which rank is missing is not known, since torch gives no access to the store of the process group."
        self._note(_NOTICED)
        time.sleep(_GRACE)
        before = self._store.timeout
        self._store.set_timeout(_PATIENCE)  # a lost store is not waited for as long as a lost rank
        try:
            notes = {rank: self._read(rank) for rank in range(self._size) if rank != self._rank}
        except _STORE_ERRORS as error:
            return (
                f"The store does not answer ({first_line(error)}): its host was lost, the launcher's machine or rank 0."
            )
        finally:
            self._store.set_timeout(before)
        missing = [f"rank {rank}: {note}" for rank, note in notes.items() if note != _NOTICED]
        if not missing:
            return "Every rank has noticed: the network between them was lost."
        return f"Missing ranks:\n{listed(missing)}"

    def _note(self, text: str) -> None:
        if self._store is not None:
            with suppress(*_STORE_ERRORS):  # the collective fails too, and says so
                self._store.set(_key(self._rank), text)

    def _read(self, rank: int) -> str:
        if not self._store.check([_key(rank)]):  # get() would wait for it
            return "never seen"
        return str(self._store.get(_key(rank)).decode())


def presence() -> Presence:
    """The presence of the default process group, which must exist."""
    store = None
    with suppress(AttributeError, ValueError):  # a private function of torch, and some backends have no store
        store = dist.distributed_c10d._get_default_store()
    return Presence(store, dist.get_rank(), dist.get_world_size())


def _key(rank: int) -> str:
    return f"hdet/presence/{rank}"


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())


def first_line(error: BaseException) -> str:
    """What an error says, for a message of one line."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def listed(lines: Sequence[str], separator: str = "\n", indent: str = "  ") -> str:
    """The first 16 lines of a message, and how many more there are.

    >>> listed([str(rank) for rank in range(20)], separator=", ", indent="")
    '0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, and 4 more'
    """
    rest = [f"and {len(lines) - _MOST} more"] if len(lines) > _MOST else []
    return separator.join(indent + line for line in [*lines[:_MOST], *rest])
