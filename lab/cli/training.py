"""What the commands share: they start their ranks themselves, and say how to go on if a signal stops them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from hdet.cli.output import Output
from hdet.errors import ArgumentError
from hdet.report.page import check_packages
from lab.cli.display import display_for
from lab.runs.folder import Folder
from lab.runs.launch import execute
from lab.runs.plan import Plan

__all__ = ["check_surroundings", "train", "until_stopped"]


def check_surroundings(command: str) -> None:
    """Raise if the command cannot end well here: the report's packages are missing, or torchrun has started it."""
    if "RANK" in os.environ:
        raise ArgumentError(f"{command} starts its ranks itself, but torchrun has started this; run it without")
    check_packages()


def train(folders: Sequence[Folder], plans: Sequence[Plan], output: Output) -> None:
    """Run the plans in new folders, one after another, and show how they go on."""
    for folder, plan in zip(folders, plans, strict=True):
        folder.begin(plan)
    with display_for(output.console, plans) as show:
        execute(folders, plans, show)


def until_stopped(output: Output, out: Path, go_on: str, work: Callable[[], None]) -> int:
    """Do the work. The exit code is 0, or 128 + n if signal n has stopped it.

    Args:
        output: where words go.
        out: the command's folder.
        go_on: how to go on, for people.
        work: what the command does.
    """
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        work()
    except KeyboardInterrupt as stopped:
        output.say(f"stopped; {go_on}")
        output.result(outcome="stopped", out=out)
        return 128 + (stopped.args[0] if stopped.args else signal.SIGINT)
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt(number)
