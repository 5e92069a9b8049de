"""Runs the scripts in examples/ as a user would, with a time-out and no processes left over."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")


@contextmanager
def started(*command: object, apart: bool = False) -> Iterator[subprocess.Popen[str]]:
    """The command as a process, stderr in stdout's pipe or ``apart``. On leaving it and its children have ended."""
    # What a launcher around the tests may have set must not reach the scripts.
    clean = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    process = subprocess.Popen(
        [str(part) for part in command],
        env={**clean, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if apart else subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()  # torchrun and the demo stop their workers, which live in sessions of their own
            try:
                process.wait(timeout=PATIENCE)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


def output_of(*command: object, timeout: float = PATIENCE) -> str:
    """What the command prints. Fails if it does not end well in time."""
    with started(*command) as process:
        text, _ = process.communicate(timeout=timeout)
    assert process.returncode == 0, text
    return text
