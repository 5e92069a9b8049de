"""Traps: what makes a rank die, stop or sleep at a named point. They stand in the rank's own process, not in hdet."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hdet.checkpoint import file as checkpoint_file
from hdet.checkpoint import saving
from hdet.journal import Journal
from hdet.ranks.group import Distributed
from tests.faults.disks import SPOILS, spoil

__all__ = ["POINTS", "Trap"]

POINTS = ("converge", "checkpoint", "journal", "take-off", "between rounds")
"""While weights are exchanged, a checkpoint or a journal is written, in the first rounds of a search, in any step."""


@dataclass(frozen=True)
class Trap:
    """What happens to one rank, and where."""

    rank: int
    point: str
    step: int
    """From this step on: it happens at the first occasion."""
    fault: str = "killed"
    """ "killed", "silent" (stopped by SIGSTOP), "late" (sleeps ``seconds``), or one of the disk under ``folder``."""
    share: float = 0.5
    """Of a file's bytes that are written by then; 1: all of them, and the file is about to get its name."""
    seconds: float = 0.0
    folder: str = ""

    def set(self, step: int, tell: Callable[[float], None]) -> None:
        """Called by the rank before every step. ``tell`` hears the time when the trap springs."""
        if step != self.step:
            return

        def spring() -> None:
            tell(time.time())
            if self.fault == "late":
                time.sleep(self.seconds)
            elif self.fault in SPOILS:
                spoil(self.fault, Path(self.folder))
            else:
                os.kill(os.getpid(), signal.SIGKILL if self.fault == "killed" else signal.SIGSTOP)

        if self.fault in SPOILS:
            spring()
        else:
            _SETTERS[self.point](self, spring)


Spring = Callable[[], None]


def _in_a_step(trap: Trap, spring: Spring) -> None:
    spring()


def _in_converge(trap: Trap, spring: Spring) -> None:
    """When this rank's weights are under way."""
    start_sum = Distributed.start_sum

    def start_and_die(self: Distributed, flat: Any) -> Any:
        wait = start_sum(self, flat)
        Distributed.start_sum = start_sum
        spring()
        return wait

    Distributed.start_sum = start_and_die  # type: ignore[method-assign]


def _in_checkpoint(trap: Trap, spring: Spring) -> None:
    """Rank 0: in the file, or before it gets its name. The others: when rank 0 is about to write."""
    if trap.rank == 0:
        _in_the_file(trap, spring)
        return
    together = saving._together

    def die_together(group: Any, what: str, action: Any) -> Any:
        if what.startswith("writing"):
            saving._together = together
            spring()
        return together(group, what, action)

    saving._together = die_together


def _in_the_file(trap: Trap, spring: Spring) -> None:
    if trap.share >= 1.0:
        checkpoint_file._move_on = _then_spring(checkpoint_file._move_on, spring)
        return
    write, wanted = checkpoint_file._Hashed.write, int(trap.share * 10_000)

    def write_a_part(self: Any, data: Any) -> int:
        if self._file.tell() + len(data) < wanted:
            return write(self, data)
        self._file.write(bytes(data)[: wanted - self._file.tell()])
        self._file.flush()
        checkpoint_file._Hashed.write = write
        spring()
        return len(data)

    checkpoint_file._Hashed.write = write_a_part  # type: ignore[method-assign]


def _then_spring(action: Callable[..., Any], spring: Spring) -> Callable[..., Any]:
    def both(*args: Any) -> None:
        action(*args)
        spring()

    return both


def _in_journal(trap: Trap, spring: Spring) -> None:
    """With a part of the line written."""
    write = Journal.write

    def write_a_part(self: Journal, record: Any) -> None:
        if record["kind"] != "round":
            write(self, record)
            return
        Journal.write = write  # type: ignore[method-assign]
        before = self.path.stat().st_size
        write(self, record)
        os.truncate(self.path, before + int(trap.share * (self.path.stat().st_size - before)))
        spring()

    Journal.write = write_a_part  # type: ignore[method-assign]


_SETTERS: dict[str, Callable[[Trap, Spring], None]] = {
    "converge": _in_converge,
    "checkpoint": _in_checkpoint,
    "journal": _in_journal,
    "take-off": _in_a_step,
    "between rounds": _in_a_step,
}
