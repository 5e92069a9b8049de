"""A guard in the loop and in the checkpoints of a framework."""

from __future__ import annotations

import os
import warnings
from typing import Any

from torch import Tensor

from hdet.checks import users_level
from hdet.errors import ResumeWarning
from hdet.integrations.checkpoints import read, write
from hdet.ranks.group import connect
from hdet.rollback.guard import Guard

GUARD = "hdet_guard"
"""The name of a guard in a checkpoint of all ranks."""


class AccumulatingGuard(Guard):
    """Judges the mean loss of the batches of every step. A checkpoint has a file of it."""

    _accumulated: tuple[float | Tensor, ...] = ()
    """The losses of the batches since the last step."""

    def observe(self, loss: float | Tensor | None) -> None:
        """Count the loss of a batch, if this rank has one."""
        if loss is not None:
            self._accumulated += (loss.detach() if isinstance(loss, Tensor) else loss,)

    def end_step(self) -> None:
        """The optimizer has made its step."""
        losses, self._accumulated = self._accumulated, ()
        Guard.step(self, sum(losses) / len(losses) if losses else None)

    def state_of_all(self) -> dict[str, Any]:
        """The state, with the losses of all ranks. Collective."""
        with self.gathered(connect(None)):
            return self.state_dict()

    def write(self, folder: str | os.PathLike[str]) -> None:
        """Write the guard into the folder of a checkpoint, completely or not at all. Collective."""
        write(folder, GUARD, self._optimizer, self.state_of_all())

    def read(self, folder: str | os.PathLike[str]) -> None:
        """Resume the guard from the folder of a checkpoint. Collective."""
        state = read(folder, GUARD, self._optimizer)
        if state is not None:
            self.load_state_dict(state)
        else:
            warn_without_guard(folder)


def warn_without_guard(checkpoint: str | os.PathLike[str]) -> None:
    """Warn on one rank, at the user's line, that a checkpoint has no guard for these ranks."""
    if connect(None).rank == 0:
        text = f"no hdet.Guard of as many ranks was saved at {checkpoint}: the guard starts again; to keep it, save "
        warnings.warn(f"{text}checkpoints with the same callback", ResumeWarning, stacklevel=users_level())
