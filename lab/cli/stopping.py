"""What a command says that was stopped: how to go on, and an exit code that tells by which signal."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

from hdet.cli.output import Output
from lab.runs.stop import Stop, Terminated

__all__ = ["until_stopped"]


def until_stopped(output: Output, out: Path, go_on: str, work: Callable[[Stop], int | None]) -> int:
    """The exit code of ``work``, or 128 + n where signal n has stopped it.

    Args:
        output: where words go.
        out: the command's folder.
        go_on: how to go on, for people.
        work: gives None where it was stopped in order; a second signal ends it at once.
    """
    stop, how = Stop(), "stopped"
    try:
        code = work(stop)
        if code is not None:
            return code
    except (KeyboardInterrupt, Terminated) as error:
        stop.ask(signal.SIGTERM if isinstance(error, Terminated) else signal.SIGINT)
        how = "stopped at once"
    output.say(f"{how}; {go_on}")
    output.result(outcome="stopped", out=out)
    return stop.code
