"""Starting ranks: torch's own launcher, and what the ranks tell."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from hdet.errors import ArgumentError, HdetError
from lab.runs.folder import Folder
from lab.runs.plan import Plan
from lab.runs.ranks import joined, launched_ranks, place_for
from lab.runs.run import Outcome
from lab.runs.stop import Stop, Terminated, on_signals
from lab.runs.teller import Message, Tell, silent
from lab.runs.worker import run_all

__all__ = ["RanksFailed", "execute", "refuse_torchrun"]


class RanksFailed(HdetError, RuntimeError):
    """The ranks ended before their work was done."""


def refuse_torchrun(command: str) -> None:
    """For commands that start ranks themselves, several times and of different numbers."""
    if launched_ranks() is not None:
        raise ArgumentError(f"{command} starts its ranks itself, but torchrun has started this; run it without")


def execute(
    folders: Sequence[Folder],
    plan: Plan,
    tell: Tell,
    begin: Callable[[], None] = lambda: None,
    stop: Stop | None = None,
) -> Outcome:
    """Run the plans in the folders, one after another.

    One replica runs in this process. More are started by torch's launcher, unless this process is one of them already.
    Ctrl-C and SIGTERM end the work in order, a second one at once. What comes back is how the last run ended.

    Args:
        folders: with plans, once ``begin`` was called.
        plan: one of them; all have its number of replicas and its device.
        tell: gets the messages of :mod:`lab.runs.teller`; in a process that torchrun started, only on rank 0.
        begin: prepares the folders; called once, by one process.
        stop: gets to know of a signal.
    """
    stop = stop or Stop()
    if plan.replicas > 1 and launched_ranks() is None:
        place_for(plan.device, plan.replicas)  # raises here rather than in every rank
        begin()
        return _in_ranks(folders, plan.replicas, tell, stop)
    only_once = launched_ranks() is not None  # the launcher passes on what this rank got as well
    with on_signals(stop.ask, only_once=only_once), _threads_for(plan.task), joined(plan.device) as ranks:
        ranks.first(begin)
        return run_all(folders, ranks, tell if ranks.rank == 0 else silent, stop)


def _in_ranks(folders: Sequence[Folder], replicas: int, tell: Tell, stop: Stop) -> Outcome:
    """Start the ranks, pass on what they tell, and say how it ended."""
    log = folders[0].log
    process = _launched(folders, replicas, log)
    pids: list[int] = []

    def end(number: int) -> None:
        stop.ask(number)
        if not _signalled(pids, signal.SIGTERM):  # none has begun
            process.terminate()

    try:
        with on_signals(end):
            last, failed = _listen(process, tell, pids)
        code = process.wait()
    except (KeyboardInterrupt, Terminated):  # asked for the second time
        _signalled(pids, signal.SIGKILL)
        process.kill()
        raise
    finally:
        _make_sure_it_ends(process)
    told = any(message["kind"] == "failed" for message in failed)
    if not told and last["kind"] == "end" and (last["outcome"] == "stopped" or last["run"] == len(folders) - 1):
        return last["outcome"]  # type: ignore[no-any-return]
    if stop.asked:  # before they had begun
        return "stopped"
    raise RanksFailed(f"the replicas failed: {_reason(failed, code)}; {log} has details")


def _launched(folders: Sequence[Folder], replicas: int, log: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "lab.runs.torchrun", "--standalone", f"--nproc-per-node={replicas}"]
    command += ["-m", "lab.runs.worker", *(str(folder.path) for folder in folders)]
    with log.open("a") as errors:
        return subprocess.Popen(
            command,
            env={**os.environ, "OMP_NUM_THREADS": _threads(replicas)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,  # Ctrl-C reaches this process alone, which then stops the others in order
        )


def _signalled(pids: Sequence[int], which: signal.Signals) -> bool:
    """Send a signal to ranks; whether one of them is there. They agree on what follows."""
    reached = False
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, which)
            reached = True
    return reached


def _listen(process: subprocess.Popen[str], tell: Tell, pids: list[int]) -> tuple[Message, list[Message]]:
    """Pass messages on until the ranks have ended. The last end of a run, and what was told of failures.

    ``pids`` gets the ranks' processes.
    """
    assert process.stdout is not None
    last: Message = {"kind": "nothing"}
    failed: list[Message] = []
    for line in process.stdout:
        if not line.startswith("{"):
            continue
        message: Message = json.loads(line)
        if message["kind"] == "rank":
            pids.append(message["pid"])
            continue
        if message["kind"] in ("failed", "lost"):
            failed.append(message)
            continue
        if message["kind"] == "end":
            last = message
        tell(message)
    return last, failed


def _reason(failed: Sequence[Message], code: int) -> str:
    """The first rank that failed, by its own words or by the signal that ended it. Others fail because of it."""
    lost = next((message for message in failed if message["kind"] == "lost"), None)
    if lost is not None and lost["signal"] is not None:
        return f"rank {lost['rank']} was ended by {lost['signal']}"
    told = [message for message in failed if message["kind"] == "failed"]
    told.sort(key=lambda message: lost is None or message["rank"] != lost["rank"])  # the first to fail comes first
    if not told:
        return f"exit code {code}" if lost is None else f"rank {lost['rank']} ended without a word, exit code {code}"
    return f"rank {told[0]['rank']}: {told[0]['error'].splitlines()[0]}"


def _make_sure_it_ends(process: subprocess.Popen[str]) -> None:
    """Whatever happened here, no rank is left."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout=40)  # the launcher gives its ranks 30
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if process.stdout is not None:
        process.stdout.close()


@contextmanager
def _threads_for(task: str) -> Iterator[None]:
    """One thread for the small models, unless the user says how many.

    Two gain them little; on a busy machine they wait for each other at every operation, and take twenty times as long.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(before if task == "text" or "OMP_NUM_THREADS" in os.environ else 1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _threads(replicas: int) -> str:
    """Threads per rank: what the user says, or a fair share of the cores."""
    return os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1) // replicas))
