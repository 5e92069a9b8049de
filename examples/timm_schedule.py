"""hdet.auto finds the learning rate on a schedule of timm, whose schedulers leave the counting to their caller.

    python examples/timm_schedule.py

``TimmSchedule`` counts for them, so that hdet.Ensemble takes it as ``schedule=``, and hdet.auto a function that makes
it. Copy it into your project. In timm's training script ``scheduler.step(loss)`` takes the place of ``step_update`` and
``step``:

    def schedule(optimizer):
        cosine, epochs = create_scheduler_v2(optimizer, num_epochs=90, warmup_epochs=5)
        return TimmSchedule(cosine, updates_per_epoch=len(loader))

    scheduler = hdet.auto(optimizer, schedule=schedule, total_steps=90 * len(loader))

Running this file needs timm: pip install timm
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

import hdet


class TimmSchedule:
    """A timm scheduler that counts its own updates and epochs, so that ``step()`` needs no argument.

    After update n it calls ``step_update(n)`` and, at the end of an epoch, ``step(epoch)`` with the epoch to come, as
    timm's own training script does. timm itself acts on one of the two and ignores the other.

    Args:
        scheduler: one of timm's. Not a PlateauLRScheduler: it needs a metric, as torch's ReduceLROnPlateau does.
        updates_per_epoch: optimizer steps per epoch; needed if the scheduler counts in epochs (``t_in_epochs``).
    """

    def __init__(self, scheduler: Any, updates_per_epoch: int | None = None) -> None:
        if not hasattr(scheduler, "step_update"):
            raise hdet.ArgumentError(f"{scheduler!r} is not one of timm's: give it as schedule= as it is")
        if isinstance(getattr(scheduler, "lr_scheduler", None), ReduceLROnPlateau):
            raise hdet.ArgumentError("PlateauLRScheduler needs a metric, which step() does not bring")
        if updates_per_epoch is None and getattr(scheduler, "t_in_epochs", False):
            raise hdet.ArgumentError("this scheduler counts in epochs; give updates_per_epoch=len(loader)")
        self.scheduler = scheduler
        self.optimizer: Optimizer = scheduler.optimizer
        self.updates_per_epoch = updates_per_epoch
        self.updates = 0
        """Optimizer steps so far."""
        for group in self.optimizer.param_groups:  # timm keeps the object that it found here as its base value
            group["lr"] = group["lr"].clone() if isinstance(group["lr"], Tensor) else group["lr"]

    def step(self) -> None:
        """The optimizer has made a step: write the rates of the next one."""
        rates = [group["lr"] for group in self.optimizer.param_groups]
        self.updates += 1
        self.scheduler.step_update(self.updates)
        if self.updates_per_epoch is not None and self.updates % self.updates_per_epoch == 0:
            self.scheduler.step(self.updates // self.updates_per_epoch)
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            if isinstance(rate, Tensor):  # timm puts another tensor in its place, which captured graphs would not see
                group["lr"] = rate.fill_(group["lr"])

    def state_dict(self) -> dict[str, Any]:
        """timm's state, and the count that timm leaves to its caller."""
        return {"updates": self.updates, "scheduler": self.scheduler.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from :meth:`state_dict`. The rates themselves are in the optimizer's checkpoint."""
        self.updates = int(state_dict["updates"])
        self.scheduler.load_state_dict(state_dict["scheduler"])


def main() -> None:
    from timm.scheduler import create_scheduler_v2

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)  # a guess, and far too low
    epochs = 20

    def schedule(optimizer: Optimizer) -> TimmSchedule:
        cosine, _ = create_scheduler_v2(optimizer, num_epochs=epochs, warmup_epochs=2)
        return TimmSchedule(cosine, updates_per_epoch=10)

    scheduler = hdet.auto(optimizer, schedule=schedule, total_steps=10 * epochs)
    for step in range(10 * epochs):
        x = torch.randn(64, 10)
        loss = (model(x) - x.sin().sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step(loss)
        if step % 50 == 49:
            print(f"step {step + 1}: loss {loss.item():.3f}, rate {scheduler.get_last_lr()[0]:.3g}")
    print(scheduler.found)


if __name__ == "__main__":
    main()
