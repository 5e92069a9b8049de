"""ultralytics: the learning rate of a YOLO model is found while it trains, in place of ``lr0``.

    python examples/ultralytics_autolr.py --model yolo11n.yaml --data coco8.yaml --epochs 100

Copy ``AutoLR`` into your project:

    model = YOLO("yolo11n.yaml")
    AutoLR().attach(model)
    model.train(data="data.yaml", epochs=100)

Needs ultralytics, which is licensed under AGPL-3.0: pip install ultralytics
"""

from __future__ import annotations

import argparse
from typing import Any

from torch.optim.lr_scheduler import LambdaLR

import hdet
from hdet import ArgumentError


class AutoLR:
    """Finds the learning rate while a model of ultralytics trains.

    ``lr0`` is a guess that may be far off; with ``optimizer="auto"`` the guess is the rate that ultralytics chooses.
    Its linear or cosine decay, by ``lrf`` and ``cos_lr``, stays. Its warm-up is removed: the search climbs by itself.

    Args:
        options: further arguments of :func:`hdet.auto`: ``journal``, ``rollback``, ``schedule``.
    """

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.scheduler: Any = None
        """What steps the rate; there once ``train`` has begun."""
        self._stepped = False
        """Whether the optimizer has stepped since the last batch ended."""

    def attach(self, model: Any) -> Any:
        """Join a ``YOLO``, or a trainer, before its ``train()``. Gives it."""
        if not callable(getattr(model, "add_callback", None)):
            raise ArgumentError(f"attach() takes a model of ultralytics, but got {model!r}; call attach(YOLO(...))")
        model.add_callback("on_pretrain_routine_start", self._check)
        model.add_callback("on_pretrain_routine_end", self._begin)
        model.add_callback("on_train_batch_end", self._batch_ends)
        return model

    def _check(self, trainer: Any) -> None:
        """Before anything is built."""
        if trainer.world_size > 1:
            raise ArgumentError(
                f"AutoLR needs one device, but this run has {trainer.world_size}: ultralytics starts other processes, "
                "to which it hands no callbacks; give one device"
            )
        if trainer.args.time:
            raise ArgumentError(
                f"AutoLR needs the length of the run, but got time={trainer.args.time}; give epochs= in its place"
            )
        if trainer.args.resume:
            raise ArgumentError(
                "AutoLR begins a search, but got resume=True: a checkpoint of ultralytics has rounded weights and no "
                "scheduler; begin a new run from it with the rate that was found as lr0=, and without AutoLR"
            )

    def _begin(self, trainer: Any) -> None:
        """The optimizer is there, and no batch was seen."""
        trainer.args.warmup_epochs = 0.0
        batches = len(trainer.train_loader)
        per_epoch = batches / trainer.accumulate
        steps = max(batches * trainer.epochs // trainer.accumulate, 1)
        for group in trainer.optimizer.param_groups:
            group["lr"] = group["initial_lr"]
        shape = trainer.lf

        def decay(optimizer: Any) -> LambdaLR:
            return LambdaLR(optimizer, lambda step: shape(step / per_epoch))

        known = {"model": trainer.model, "schedule": decay, "total_steps": steps, **self.options}
        self.scheduler = hdet.auto(trainer.optimizer, **known)
        trainer.scheduler = _Still()
        step = trainer.optimizer_step

        def optimizer_step() -> None:
            step()
            self._stepped = True
            if self.scheduler is not None:
                self.scheduler.step(trainer.loss.detach())

        trainer.optimizer_step = optimizer_step

    def _batch_ends(self, trainer: Any) -> None:
        """A batch without a step, as in accumulation: its loss counts too."""
        if not self._stepped and self.scheduler is not None:
            self.scheduler.observe(trainer.loss.detach())
        self._stepped = False


class _Still:
    """Stands where the trainer steps its own scheduler once an epoch."""

    last_epoch = -1

    def step(self) -> None:
        """Nothing: the rate is written at every step of the optimizer."""


def main(args: argparse.Namespace) -> None:
    from ultralytics import YOLO

    auto = AutoLR()
    auto.attach(YOLO(args.model)).train(data=args.data, epochs=args.epochs, lr0=args.lr)
    print(auto.scheduler.found)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="yolo11n.yaml", help="a model's configuration or weights")
    parser.add_argument("--data", default="coco8.yaml", help="a data set")
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--lr", type=float, default=1e-3, help="a guess of the rate")
    main(parser.parse_args())
