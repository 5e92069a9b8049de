"""Workloads as processes of their own, several at a time on one device."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

GRACE = 120.0
"""Seconds after the end for the pass that was begun before it."""


def in_processes(script: Path, words: list[str], workloads: Sequence[str], together: int, until: float) -> int:
    """``script`` with ``words`` for each workload, some at a time; how many failed. One that is late is ended."""

    def one(name: str) -> int:
        left = until - time.time()
        if left <= 0:
            print(f"{name}: no time left", flush=True)
            return 0
        limited = math.isfinite(left)
        command = [sys.executable, str(script), *words, "--workloads", name]
        command += ["--seconds", f"{left:.0f}"] if limited else []
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        try:
            done = subprocess.run(command, env=environment, timeout=left + GRACE if limited else None, check=False)
        except subprocess.TimeoutExpired:
            print(f"{name}: ended after its time", flush=True)
            return 1
        return done.returncode

    with ThreadPoolExecutor(together) as pool:
        return sum(code != 0 for code in pool.map(one, workloads))


def without(words: Sequence[str], *options: str) -> list[str]:
    """A command line without some options that have a value.

    >>> without(["--again", "--seconds", "9", "--processes=4", "--rows", "auto"], "--seconds", "--processes")
    ['--again', '--rows', 'auto']
    """
    kept, skip = [], False
    for word in words:
        if skip or word.partition("=")[0] in options:
            skip = not skip and "=" not in word
        else:
            kept.append(word)
    return kept


def run_each(
    script: Path, words: list[str], workloads: Sequence[str], together: int, until: float, one: Callable[[str], None]
) -> None:
    """``one`` for each workload until the time is over; or, if some are run together, ``script`` for each."""
    if together > 1:
        own = without(words, "--processes", "--workloads", "--seconds")
        sys.exit(in_processes(script, own, workloads, together, until))
    for name in workloads:
        if time.time() > until:
            print(f"{name}: no time left", flush=True)
            continue
        one(name)
