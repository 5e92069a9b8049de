"""Starting ranks, and passing on what they tell."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing.queues import SimpleQueue
from pathlib import Path

import torch
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes

from hdet.errors import HdetError
from lab.runs.folder import Folder
from lab.runs.plan import Plan
from lab.runs.ranks import Ranks, joined
from lab.runs.run import Run
from lab.runs.simulated import simulate
from lab.runs.teller import Message, Tell, Teller, silent

__all__ = ["RanksFailed", "execute"]

_PAUSE = 0.1
"""Seconds between two looks at what the ranks have told."""


class RanksFailed(HdetError, RuntimeError):
    """The ranks ended before their work was done."""


def execute(folders: Sequence[Folder], plans: Sequence[Plan], tell: Tell) -> None:
    """Run the plans in their folders from the beginning, one after another. All have the same number of replicas.

    One replica runs in this process. More are processes of their own, none of which outlives the call. Plans that are
    simulated go first, together.

    Args:
        folders: in which the plans were begun.
        plans: one for each folder.
        tell: gets the messages of :mod:`lab.runs.teller`.
    """
    simulated = [number for number, plan in enumerate(plans) if plan.simulated]
    if simulated:
        others = [number for number, plan in enumerate(plans) if not plan.simulated]
        simulate([folders[i] for i in simulated], [plans[i] for i in simulated], _renumbered(tell, simulated))
        if others:
            execute([folders[i] for i in others], [plans[i] for i in others], _renumbered(tell, others))
        return
    if plans[0].replicas > 1:
        _in_ranks(folders, plans, tell)
        return
    before = torch.get_num_threads()
    if plans[0].task != "text" and "OMP_NUM_THREADS" not in os.environ:
        # Two threads gain a small model little, and on a busy machine they wait for each other at every operation.
        torch.set_num_threads(1)
    try:
        with joined(0, 1, store="") as ranks:
            run_all(folders, plans, ranks, tell)
    finally:
        torch.set_num_threads(before)


def _renumbered(tell: Tell, numbers: Sequence[int]) -> Tell:
    """Messages of some runs, with their numbers among all."""
    return lambda message: tell({**message, "run": numbers[message["run"]]})


def run_all(folders: Sequence[Folder], plans: Sequence[Plan], ranks: Ranks, tell: Tell) -> None:
    """One run after another on the same ranks, as each of them does it."""
    for number, (folder, plan) in enumerate(zip(folders, plans, strict=True)):
        Run(plan, folder, ranks, Teller(tell, number)).go()
        ranks.mean(0.0)  # nobody reads what rank 0 has not written yet


def _in_ranks(folders: Sequence[Folder], plans: Sequence[Plan], tell: Tell) -> None:
    """Start the ranks, and pass on what they tell until all have ended."""
    messages: SimpleQueue[Message] = multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (list(folders), list(plans), str(Path(folder) / "store"), messages)
        ranks = start_processes(_rank, arguments, plans[0].replicas, join=False, start_method="spawn")
        try:
            while not ranks.join(_PAUSE):
                _pass_on(messages, tell)
            _pass_on(messages, tell)
        except (ProcessRaisedException, ProcessExitedException) as error:
            log = folders[0].log
            with log.open("a", encoding="utf-8") as file:
                file.write(error.msg)
            reason = error.msg.strip().splitlines()[-1]
            raise RanksFailed(f"replica {error.error_index} failed: {reason}; {log} has details") from error
        finally:
            for process in ranks.processes:
                process.kill()
                process.join()


def _pass_on(messages: SimpleQueue[Message], tell: Tell) -> None:
    while not messages.empty():
        tell(messages.get())


def _rank(
    rank: int, folders: Sequence[Folder], plans: Sequence[Plan], store: str, messages: SimpleQueue[Message]
) -> None:
    """A process of its own. What it writes to stderr goes into the log, because the terminal shows the progress."""
    size = plans[0].replicas
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))
    with folders[0].log.open("a") as log:
        os.dup2(log.fileno(), sys.stderr.fileno())
    with joined(rank, size, store) as ranks:
        run_all(folders, plans, ranks, messages.put if rank == 0 else silent)
