"""timm's schedulers as ``schedule=`` of :func:`hdet.auto` and :class:`hdet.Ensemble`."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from hdet.checks import is_int, must_be, shown
from hdet.errors import ArgumentError
from hdet.parameters import copy_rate

__all__ = ["TimmSchedule"]


class TimmSchedule:
    """A timm scheduler that counts its own updates and epochs, so that ``step()`` needs no argument.

    .. code-block:: python

        cosine, _ = timm.scheduler.create_scheduler_v2(optimizer, num_epochs=90, warmup_epochs=5)
        schedule = TimmSchedule(cosine, updates_per_epoch=len(loader))
        scheduler = hdet.auto(optimizer, schedule=schedule, total_steps=90 * len(loader))

    After update n it calls ``step_update(n)`` and, where an epoch ends, ``step(epoch)`` with the epoch to come, as
    timm's own training script does. timm itself acts on one of the two and ignores the other.

    Args:
        scheduler: one of timm's, which do not count by themselves. Not a PlateauLRScheduler: it needs a metric, as
            torch's ReduceLROnPlateau does.
        updates_per_epoch: optimizer steps per epoch; needed where the scheduler counts in epochs (``t_in_epochs``).
    """

    def __init__(self, scheduler: Any, updates_per_epoch: int | None = None) -> None:
        if not callable(getattr(scheduler, "step_update", None)):
            raise ArgumentError(
                f"scheduler must be one of timm's, with step_update(), but got {shown(scheduler)}; give a torch "
                "scheduler as schedule= as it is"
            )
        if isinstance(getattr(scheduler, "lr_scheduler", None), ReduceLROnPlateau):
            raise ArgumentError(
                "timm's PlateauLRScheduler needs a metric, which step() does not bring; give another schedule, or "
                "torch's ReduceLROnPlateau(optimizer) to hdet.Ensemble, and call ensemble.step(loss, metrics=...)"
            )
        if updates_per_epoch is None and getattr(scheduler, "t_in_epochs", False):
            raise ArgumentError(
                f"{type(scheduler).__name__} counts in epochs, so its rate would never change; give "
                "updates_per_epoch=len(loader), or build it with step_on_epochs=False (t_in_epochs=False)"
            )
        fits = updates_per_epoch is None or (is_int(updates_per_epoch) and updates_per_epoch >= 1)
        cure = "it is the number of optimizer steps in an epoch, for instance len(loader)"
        must_be("an integer, at least 1", fits, cure, updates_per_epoch=updates_per_epoch)
        self.scheduler = scheduler
        self.updates_per_epoch = updates_per_epoch
        self.updates = 0
        """Optimizer steps so far."""
        for row in self.optimizer.param_groups:
            row["lr"] = copy_rate(row["lr"])  # timm keeps the object it found here as its base value

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer whose rates timm writes."""
        return self.scheduler.optimizer  # type: ignore[no-any-return]

    def step(self) -> None:
        """One optimizer step was made: write the rates of the next one."""
        rates = [row["lr"] for row in self.optimizer.param_groups]
        self.updates += 1
        self.scheduler.step_update(self.updates)
        if self.updates_per_epoch is not None and self.updates % self.updates_per_epoch == 0:
            self.scheduler.step(self.updates // self.updates_per_epoch)
        for row, rate in zip(self.optimizer.param_groups, rates, strict=True):
            if isinstance(rate, Tensor):  # timm puts something new in its place, which captured graphs would not see
                row["lr"] = rate.fill_(row["lr"])

    def state_dict(self) -> dict[str, Any]:
        """timm's state, and the count that timm leaves to its caller."""
        return {"updates": self.updates, "scheduler": self.scheduler.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from :meth:`state_dict`. The rates themselves are in the optimizer's checkpoint."""
        self.updates = int(state_dict["updates"])
        self.scheduler.load_state_dict(state_dict["scheduler"])
