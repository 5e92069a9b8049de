"""A replica in a process of its own, with torchft's manager; it kills itself where it is told to."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from tests.elastic.training import trained

__all__ = ["Trapped", "lighthouse_command", "live", "managed"]

SUM_TIMEOUT = timedelta(seconds=20)
_HEARTBEATS = 0.3
"""Seconds after which the lighthouse knows a manager: it sends ten heartbeats a second."""


class Trapped:
    """A manager that tells what it is about to do."""

    def __init__(self, manager: Any, passing: Callable[[str], None]) -> None:
        self._manager, self._passing = manager, passing

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    def start_quorum(self, **given: Any) -> None:
        self._passing("quorum")
        self._manager.start_quorum(**given)

    def allreduce(self, *given: Any, **more: Any) -> Any:
        self._passing("allreduce")
        return self._manager.allreduce(*given, **more)

    def should_commit(self) -> bool:
        self._passing("commit")
        agreed: bool = self._manager.should_commit()
        self._passing("committed")
        return agreed


def lighthouse_command() -> str:
    """torchft's own, of this environment."""
    here = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    found = shutil.which("torchft_lighthouse", path=here)
    assert found is not None
    return found


def managed(name: str, lighthouse: str, store: tuple[str, int], rank: int = 0, ranks: int = 1, **more: Any) -> Any:
    """torchft's manager of a replica, whose ranks share a store."""
    from torchft import Manager, ProcessGroupGloo

    return Manager(
        pg=ProcessGroupGloo(timeout=SUM_TIMEOUT),
        load_state_dict=None,
        state_dict=None,
        use_async_quorum=False,
        timeout=SUM_TIMEOUT,
        rank=rank,
        world_size=ranks,
        store_addr=store[0],
        store_port=store[1],
        lighthouse_addr=lighthouse,
        replica_id=name,
        hostname="localhost",
        **{"min_replica_size": 1, **more},
    )


def live(
    name: str,
    lighthouse: str,
    folder: Path,
    trap: tuple[str, int] | None,
    pause: float,
    timeout: float,
    rank: int,
    ranks: int,
    beside: Sequence[str],
    more: dict[str, Any],
) -> None:
    """Train to the end, and leave what came out in the folder. Until ``folder/hurry`` is there, steps are slow.

    Those ``beside`` it are waited for before the first quorum.
    """
    log = (folder / f"{name}.{rank}.log").open("a", buffering=1)
    sys.stdout = sys.stderr = log
    os.dup2(log.fileno(), 2)
    torch.set_num_threads(1)
    passed: dict[str, int] = {}

    def passing(where: str, *_: Any) -> None:
        if where == "step" and not (folder / "hurry").exists():
            time.sleep(pause)
        if (where, passed.get(where, 0)) == trap:
            os.kill(os.getpid(), signal.SIGKILL)
        passed[where] = passed.get(where, 0) + 1

    try:
        store = _store_of(folder / f"{name}.store", rank)
        if ranks > 1:
            dist.init_process_group("gloo", store=dist.PrefixStore("inside", store), rank=rank, world_size=ranks)
        manager = Trapped(managed(name, lighthouse, ("localhost", store.port), rank, ranks), passing)
        if rank == 0:
            (folder / f"{name}.here").touch()
        while not all((folder / f"{other}.here").exists() for other in beside):
            time.sleep(0.02)
        time.sleep(_HEARTBEATS)
        result = trained(manager, name, folder / f"{name}.jsonl", timeout=timeout, passing=passing, rank=rank, **more)
        torch.save(result, folder / f"{name}.{rank}.pt")
        time.sleep(1.0)  # others may still be in their last meeting
        manager.shutdown(wait=False)
    except BaseException:
        traceback.print_exc()
        log.flush()
        os._exit(1)
    os._exit(0)  # torchft's threads would be waited for


def _store_of(note: Path, rank: int) -> TCPStore:
    """Rank 0 holds it, and notes its port for the others."""
    if rank == 0:
        store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        note.with_suffix(".new").write_text(str(store.port))
        note.with_suffix(".new").replace(note)
        return store
    while not note.exists():
        time.sleep(0.05)
    return TCPStore("localhost", int(note.read_text()), is_master=False, wait_for_workers=False)
