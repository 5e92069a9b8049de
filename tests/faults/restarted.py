"""A script for torchrun that goes on from the checkpoint in a folder; with ``--dies`` the last rank is killed once."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch.distributed as dist

from tests.faults.training import Plan, train


def main() -> None:
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()

    def before_step(step: int) -> None:
        mark = folder / "killed"
        if "--dies" in sys.argv and step == 20 and rank == ranks - 1 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    end = train(Plan("search", ranks, save_every=3), folder, journal=rank == 0, before_step=before_step)
    if rank == 0:
        (folder / "began").write_text(str(end.began))
        (folder / "end").write_text(end.digest)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
