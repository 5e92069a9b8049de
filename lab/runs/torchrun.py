"""torch's launcher, which also tells its parent which rank was the first to fail: ``python -m lab.runs.torchrun ...``.

Its arguments are torchrun's own.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping
from typing import Any

from torch.distributed import run as torch_launcher
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

__all__ = ["first_failure"]


def main() -> None:
    """Launch, and wait for the end."""
    try:
        torch_launcher.main(sys.argv[1:])
    except ChildFailedError as error:
        os.write(1, (json.dumps({"kind": "lost", **first_failure(error.failures)}) + "\n").encode())
        raise  # torch's own words go to the log


def first_failure(failures: Mapping[int, Any]) -> dict[str, Any]:
    """The rank that failed first, and the name of the signal that ended it, or None.

    Times are known to a second: of ranks that fail in one, one that was killed has not followed another. SIGTERM is
    what the launcher ends the rest with.

    >>> from types import SimpleNamespace as Failure
    >>> first_failure({0: Failure(timestamp=7, exitcode=1), 1: Failure(timestamp=7, exitcode=-9)})
    {'rank': 1, 'signal': 'SIGKILL'}
    """

    def order(rank: int) -> tuple[int, bool]:
        failure = failures[rank]
        return failure.timestamp, not (failure.exitcode < 0 and -failure.exitcode != signal.SIGTERM)

    rank = min(failures, key=order)
    code = failures[rank].exitcode
    return {"rank": rank, "signal": signal.Signals(-code).name if code < 0 else None}


if __name__ == "__main__":
    main()
