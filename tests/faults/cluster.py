"""A cluster of ranks that may be lost: processes from a fork server, with a rendezvous of their own each time."""

from __future__ import annotations

import multiprocessing.connection
import os
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch.distributed as dist

from tests.faults.training import End, Plan, train
from tests.faults.traps import Trap
from tests.patience import GROUP_PATIENCE
from tests.processes import CONTEXT

__all__ = ["Outcome", "start"]


@dataclass
class Outcome:
    """What became of a start."""

    ends: dict[int, End] = field(default_factory=dict)
    """Of the ranks that came to the end."""
    errors: dict[int, str] = field(default_factory=dict)
    """The tracebacks of those that raised."""
    sprung_at: float | None = None
    """When something went wrong."""
    noticed_at: dict[int, float] = field(default_factory=dict)
    """When each of the ranks that raised did so."""

    def seconds_without(self, trapped: int) -> list[float]:
        """From the fault until each of the others noticed."""
        assert self.sprung_at is not None
        return [moment - self.sprung_at for rank, moment in self.noticed_at.items() if rank != trapped]


def start(plan: Plan, folder: Path, trap: Trap | None = None, *, group_timeout: float = GROUP_PATIENCE) -> Outcome:
    """Start all ranks and wait until each has ended, is dead, or has said nothing for longer than the group waits."""
    folder.mkdir(parents=True, exist_ok=True)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # here, as torchrun's is in torchrun
    pipes, processes = [], []
    for rank in range(plan.ranks):
        ours, theirs = CONTEXT.Pipe(duplex=False)
        args = (theirs, rank, plan, str(folder), trap, store.port, group_timeout)
        process = CONTEXT.Process(target=_rank, args=args, daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        silent = trap.rank if trap is not None and trap.fault in ("silent", "late") else None
        return _heard(dict(zip(pipes, range(plan.ranks), strict=True)), silent, group_timeout + 60.0)
    finally:
        for process, pipe in zip(processes, pipes, strict=True):
            process.kill()
            process.join()
            pipe.close()


def _heard(pipes: dict[Connection, int], silent: int | None, patience: float) -> Outcome:
    """What the ranks tell until their pipes close. The one that is ``silent`` is not waited for."""
    outcome, until = Outcome(), time.monotonic() + 2 * patience
    while pipes and time.monotonic() < until:
        for pipe in multiprocessing.connection.wait(list(pipes), timeout=1.0):
            assert isinstance(pipe, Connection)
            try:
                rank, (kind, value) = pipes[pipe], pipe.recv()
            except EOFError:
                del pipes[pipe]
                continue
            if kind == "sprung":
                outcome.sprung_at = value
                until = time.monotonic() + patience
            elif kind == "end":
                outcome.ends[rank] = value
            else:
                outcome.noticed_at[rank], outcome.errors[rank] = value
        if list(pipes.values()) == [silent]:
            break
    return outcome


def _rank(
    pipe: Connection, rank: int, plan: Plan, folder: str, trap: Trap | None, port: int, group_timeout: float
) -> None:
    """A rank's whole life. Whatever happens it ends at once: nobody is waited for."""

    def before_step(step: int) -> None:
        if trap is not None and trap.rank == rank:
            trap.set(step, lambda moment: pipe.send(("sprung", moment)))

    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # torch's warnings: what matters goes through the pipe
    with suppress(BrokenPipeError):
        try:
            wait = timedelta(seconds=group_timeout)
            store = dist.TCPStore("127.0.0.1", port, timeout=wait)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=plan.ranks, timeout=wait)
            writes = rank == (trap.rank if trap is not None else 0)
            end = train(plan, Path(folder), journal=writes, before_step=before_step)
            dist.barrier()  # nobody leaves while others still exchange numbers
            pipe.send(("end", end))
        except BaseException:
            moment = time.time()
            pipe.send(("error", (moment, traceback.format_exc())))
    pipe.close()
    os._exit(0)
