"""torchft: replicas that come and go. Who is there is decided by its managers and their lighthouse."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

from hdet.checks import is_real, must_be, shown
from hdet.errors import ArgumentError, HdetError, LostReplicaError

_LONGEST = 3.2e8
"""Seconds, ten years: what clocks can wait for."""
_PAUSE = 0.5
"""Seconds between two tries where nothing failed and there are too few replicas."""
_READ = ("_group_world_size", "_use_async_quorum", "errored", "num_participants", "participating_rank")
_CALLED = ("allreduce", "load_state_dict", "register_state_dict_fn", "report_error", "should_commit", "start_quorum")
"""What is used of ``torchft.Manager``."""


class FailedTry(HdetError):
    """A meeting failed because a replica is gone or was elsewhere: the next try is made by those that are there."""


class Torchft:
    """Replicas that are torchft's replica groups. Made by :func:`torchft`; give it as ``group=``.

    Attributes:
        manager: torchft's.
        name: this replica's, for journal and report.
        timeout: seconds for one meeting.
    """

    def __init__(self, manager: Any, name: str, timeout: float) -> None:
        self.manager = manager
        self.name = name
        self.timeout = timeout
        self.ranks: int = manager._group_world_size
        """How many processes are one replica."""
        self._joins: WeakKeyDictionary[Any, Callable[[Any], None]] = WeakKeyDictionary()

    def __repr__(self) -> str:
        return f"Torchft({self.name!r})"

    def join(self, scheduler: Any) -> None:
        """Meet the other replicas, before the first step of training. Blocks until they meet next.

        If they are training already, this replica gets weights, optimizer state, controller and schedule from one of
        them, and trains from their next round on: begin the loop at the scheduler's step.

        Args:
            scheduler: the ``hdet.OneCycleLR`` or ``hdet.Ensemble`` that was made with this ``group=``.
        """
        if scheduler not in self._joins:
            raise ArgumentError(
                f"join() takes the scheduler that was made with this group=, as hdet.OneCycleLR(..., group=group), but "
                f"got {shown(scheduler)}"
            )
        self._joins[scheduler](scheduler)

    def enrol(self, scheduler: Any, join: Callable[[Any], None]) -> None:
        """A scheduler was made with this group: :meth:`join` will call ``join`` with it. It is held weakly."""
        self._joins[scheduler] = join

    def quorum(self, deadline: float) -> tuple[int, int]:
        """This replica's number among those who are there, and how many they are. Loads a peer's state if it is behind.

        Args:
            deadline: of the whole meeting, by ``time.monotonic``.
        """
        left = deadline - time.monotonic()
        try:
            if left <= 0:
                few = f"{self.manager.num_participants()} replicas are too few to go on"
                raise TimeoutError(self.manager.errored() or few)
            self.manager.start_quorum(timeout=timedelta(seconds=left))
        except HdetError:
            raise
        except (RuntimeError, OSError) as error:
            raise LostReplicaError(
                f"replica {self.name!r} has not met the others within {self.timeout:g} s: {error}\nLook whether the "
                "lighthouse runs (TORCHFT_LIGHTHOUSE) and enough replicas do (--min_replicas, min_replica_size), and "
                "start this replica again; hdet.torchft(manager, timeout=...) must be longer than a round takes"
            ) from error
        rank = self.manager.participating_rank()
        if rank is None:
            raise ArgumentError(
                "every replica takes part in the ensemble, but this one is a spare of torchft's; make the manager with "
                "world_size_mode=WorldSizeMode.DYNAMIC"
            )
        return rank, self.manager.num_participants()

    def commit(self, failure: FailedTry | None) -> bool:
        """Whether the try counts: not after a failure, nor with fewer replicas than ``min_replica_size``."""
        if failure is not None and self.manager.errored() is None:
            self.manager.report_error(failure)
        agreed = bool(self.manager.should_commit())
        if not agreed and failure is None:
            time.sleep(_PAUSE)
        return agreed

    def request_state(self) -> None:
        """This replica's state is not that of the others: it is to be loaded from one of them at the next quorum."""
        self.manager.load_state_dict({"step": 0, "batches_committed": 0})


def torchft(manager: Any, *, name: str | None = None, timeout: float = 3600.0) -> Torchft:
    """Replicas that come and go: give it as ``group=``, and call ``join`` before the loop.

    .. code-block:: python

        group = hdet.torchft(torchft.Manager(..., use_async_quorum=False))
        scheduler = hdet.OneCycleLR(optimizer, max_lr=0.1, total_steps=10_000, group=group, model=model)
        group.join(scheduler)
        while scheduler.last_epoch < 10_000:
            loss = train_step(next(batches))
            optimizer.step()
            scheduler.step(loss)

    Each replica trains with gradients of its own. One that is gone is left out where its round ends, and multipliers
    are dealt over the rest; one that comes gets everything from a peer. Registers a state of its own with the manager,
    which holds weights, optimizer and scheduler: what else a newcomer needs is yours to register.

    Args:
        manager: a ``torchft.Manager`` made with ``use_async_quorum=False``.
        name: of this replica, for journal and report. None: host and process.
        timeout: seconds for one meeting of the replicas, whatever happens. Longer than a round takes: one that comes
            waits for its end.
    """
    lacks = [name for name in _READ + _CALLED if not hasattr(manager, name)]  # a later torchft may have renamed one
    cure = f"this one has no {', '.join(lacks)}; pip install 'torchft==0.2.*'"
    must_be("a torchft.Manager as in torchft 0.2", not lacks, cure, manager=manager)
    if manager._use_async_quorum:  # as torchft's DiLoCo looks
        raise ArgumentError(
            "a replica that heals must have its state before the others go on, but the manager's quorum is "
            "asynchronous; make it with use_async_quorum=False"
        )
    fits = name is None or (isinstance(name, str) and name != "")
    must_be("a text that is not empty", fits, "leave it out for host and process", name=name)
    fits = is_real(timeout) and 0 < timeout <= _LONGEST
    must_be("a number of seconds above 0", fits, "leave it out for an hour", timeout=timeout)
    return Torchft(manager, name or f"{socket.gethostname()}-{os.getpid()}", float(timeout))
