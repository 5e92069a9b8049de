"""What the benchmarks share: ranks on this machine, contestants taken in turn, one JSON line or a table."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "torch.distributed", "hdet"])


class RankFailed(RuntimeError):
    """Some rank raised, died or did not answer in time; carries what each of those has to say."""


def parser(description: str | None) -> argparse.ArgumentParser:
    """A command line with ``--json``."""
    line = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    line.add_argument("--json", action="store_true", help="print one JSON line, last on stdout, instead of a table")
    return line


def show(result: Mapping[str, Any], targets: Mapping[str, str], as_json: bool) -> None:
    """Print the figures: all on one JSON line, or a row each with its target."""
    if as_json:
        print(json.dumps(result), flush=True)
        return
    width = max(map(len, result))
    for name, value in result.items():
        number = f"{value:.3f}" if isinstance(value, float) else str(value)
        print(f"{name:<{width}}  {number:>12}  {targets.get(name, '')}".rstrip())


def ratio(seconds: Sequence[float], other: Sequence[float]) -> float:
    """Median of the ratios of neighbours in time: what slows the machine for a while slows both and drops out."""
    return median(mine / yours for mine, yours in zip(seconds, other, strict=True))


def run_ranks(fn: Callable[..., Any], ranks: int, *args: Any, timeout: float, backend: str = "gloo") -> list[Any]:
    """Call ``fn(rank, *args)`` in ``ranks`` processes of one process group and return what each returned.

    One thread each, as torchrun sets it. ``fn`` must be at the top of a module. No process outlives the call.
    """
    deadline = time.monotonic() + timeout
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        pipes, processes = [], []
        for rank in range(ranks):
            ours, theirs = _CONTEXT.Pipe(duplex=False)
            process = _CONTEXT.Process(target=_rank, args=(theirs, fn, rank, ranks, store, backend, args), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            answers = [_receive(pipe, max(0.0, deadline - time.monotonic()), timeout) for pipe in pipes]
        finally:
            for process in processes:
                process.join(timeout=5)
                if process.is_alive():
                    process.kill()
                    process.join()
    failures = [f"rank {rank}: {text}" for rank, (ok, text) in enumerate(answers) if not ok]
    if failures:
        raise RankFailed("\n".join(failures))
    return [value for _, value in answers]


def _receive(pipe: Connection, seconds: float, timeout: float) -> tuple[bool, Any]:
    try:
        if pipe.poll(seconds):
            ok, value = pickle.loads(pipe.recv_bytes())
            return ok, value
        return (
            False,
            f"no answer within {timeout:.0f} s; ask for less (see --help) or raise --timeout",
        )
    except EOFError:
        return False, "died without an answer"


def _rank(
    pipe: Connection, fn: Callable[..., Any], rank: int, ranks: int, store: str, backend: str, args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            backend,
            store=dist.FileStore(store, ranks),
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=120),
        )
        answer = True, fn(rank, *args)
    except BaseException:  # whatever it was, the parent must hear of it
        answer = False, traceback.format_exc()
    pipe.send_bytes(pickle.dumps(answer))
    pipe.close()
    if dist.is_initialized():
        dist.destroy_process_group()
