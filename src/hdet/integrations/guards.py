"""A guard in a loop that makes an optimizer's step out of several batches."""

from __future__ import annotations

from torch import Tensor

from hdet.rollback.guard import Guard


class AccumulatingGuard(Guard):
    """Judges the mean loss of the batches of every step."""

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
