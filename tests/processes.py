"""Real replicas for tests: gloo processes that run one function each, with a time-out and no leftovers."""

from __future__ import annotations

import multiprocessing
import pickle
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.patience import GROUP_PATIENCE, PATIENCE

CONTEXT = multiprocessing.get_context("forkserver")
# What every rank would import anew; the first optimizer imports torch._dynamo, which takes seconds.
CONTEXT.set_forkserver_preload(
    [
        "torch._dynamo",
        "torch",
        "torch.distributed",
        "torch.distributed.fsdp",
        "hypothesis",
        "pytest",
        "hdet",
        "tests.processes",
    ]
)
_NOT_CONNECTED = "gloo cannot connect the ranks"


class RankFailed(AssertionError):
    """Some rank raised; carries every rank's traceback."""


def run_ranks(
    fn: Callable[..., Any], n: int, *args: Any, timeout: float = PATIENCE, group_timeout: float = GROUP_PATIENCE
) -> list[Any]:
    """Call ``fn(rank, *args)`` in ``n`` processes of one gloo group and return what each returned.

    ``fn`` must be importable (a function at the top of a test module). A rank that raises fails the test with the
    tracebacks of all ranks; a rank that hangs is killed. Where gloo cannot connect the ranks, which happens on a busy
    machine before ``fn`` is called, they are started once more.
    """
    answers = _answers(fn, n, args, timeout, group_timeout)
    if any(_NOT_CONNECTED in text for ok, text in answers if not ok):
        answers = _answers(fn, n, args, timeout, group_timeout)
    failures = [f"rank {rank}:\n{text}" for rank, (ok, text) in enumerate(answers) if not ok]
    if failures:
        raise RankFailed("\n".join(failures))
    return [value for _, value in answers]


def _answers(
    fn: Callable[..., Any], n: int, args: tuple[Any, ...], timeout: float, group_timeout: float
) -> list[tuple[bool, Any]]:
    """Whether each rank has ended well, and what it returned, or why not."""
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        pipes, processes = [], []
        for rank in range(n):
            ours, theirs = CONTEXT.Pipe(duplex=False)
            process = CONTEXT.Process(target=_main, args=(theirs, fn, rank, n, store, group_timeout, args), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            return [_receive(pipe, timeout) for pipe in pipes]
        finally:
            for process in processes:
                process.join(timeout=5)
                if process.is_alive():
                    process.kill()
                    process.join()


def error_of(fn: Callable[[], Any]) -> Exception:
    """The exception that ``fn`` raises."""
    try:
        fn()
    except Exception as error:
        return error
    raise AssertionError(f"{fn} did not raise")


def _receive(pipe: Connection, timeout: float) -> tuple[bool, Any]:
    try:
        if pipe.poll(timeout):
            return pickle.loads(pipe.recv_bytes())  # plain pickle: tensors travel by value, not as handles
        return False, f"no answer after {timeout} s"
    except EOFError:
        return False, "died without an answer"


def _main(
    pipe: Connection, fn: Callable[..., Any], rank: int, n: int, store: str, group_timeout: float, args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    patience = timedelta(seconds=group_timeout)
    try:
        try:
            dist.init_process_group("gloo", store=dist.FileStore(store, n), rank=rank, world_size=n, timeout=patience)
        except RuntimeError as error:
            raise RuntimeError(f"{_NOT_CONNECTED}: {error}") from error
        answer = True, fn(rank, *args)
    except BaseException:
        answer = False, traceback.format_exc()
    pipe.send_bytes(pickle.dumps(answer))
    pipe.close()
    if dist.is_initialized():
        dist.destroy_process_group()
