"""A rank that hdet has started: ``python -m lab.runs.worker FOLDER ...``, under torch's launcher.

It runs the plans in the folders one after another and tells its parent on stdout, in JSON lines.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import nullcontext

from lab.runs.folder import Folder
from lab.runs.ranks import Ranks, joined
from lab.runs.run import Outcome, Run
from lab.runs.stop import Stop, on_signals
from lab.runs.teller import Message, Tell, Teller, silent

__all__ = ["run_all"]


def run_all(folders: Sequence[Folder], ranks: Ranks, tell: Tell, stop: Stop) -> Outcome:
    """One run after another on the same ranks, until all are complete or somebody asks to stop."""
    outcome: Outcome = "complete"
    for number, folder in enumerate(folders):
        with folder.held() if ranks.rank == 0 else nullcontext():
            outcome = Run(folder.plan(), folder, ranks, Teller(tell, number)).go(stop)
        ranks.meet()  # nobody reads what rank 0 has not written yet
        if outcome == "stopped":
            break
    return outcome


class Pipe:
    """Messages to the parent, a line each. A parent that is gone counts as a request to stop."""

    def __init__(self, stop: Stop) -> None:
        self._stop = stop

    def __call__(self, message: Message) -> None:
        try:
            os.write(1, (json.dumps(dict(message)) + "\n").encode())
        except OSError:
            self._stop.ask()


def main() -> None:
    """One rank. Its exit code is 0 also where it was stopped: the parent has been told."""
    folders = [Folder(path) for path in sys.argv[1:]]
    stop = Stop()
    pipe = Pipe(stop)
    pipe({"kind": "rank", "pid": os.getpid()})
    with on_signals(stop.ask, only_once=True):
        try:
            with joined(folders[0].plan().device) as ranks:
                run_all(folders, ranks, pipe if ranks.rank == 0 else silent, stop)
        except Exception as error:
            pipe({"kind": "failed", "rank": int(os.environ["RANK"]), "error": f"{type(error).__name__}: {error}"})
            traceback.print_exc()  # to the log
            sys.exit(1)


if __name__ == "__main__":
    main()
