"""fastai: a callback that finds the learning rate of a Learner while it trains, also inside ``fit_one_cycle``.

    python examples/fastai_autolr.py

Copy ``AutoLR`` into your project, and give it to any ``fit``:

    learn = Learner(dls, model, opt_func=partial(OptimWrapper, opt=torch.optim.AdamW))
    learn.fit_one_cycle(5, cbs=AutoLR())

Needs fastai: pip install fastai
"""

from __future__ import annotations

from functools import partial
from typing import Any

import fastai.callback.schedule  # it adds fit_one_cycle to Learner
import torch
from fastai.callback.core import Callback
from fastai.callback.training import GradientAccumulation
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastai.optimizer import OptimWrapper
from torch import nn
from torch.optim import Optimizer

import hdet
from hdet import ArgumentError


class AutoLR(Callback):
    """Finds the learning rate while a Learner trains.

    ``lr_max`` is a guess that may be far off. hdet's schedule replaces that of ``fit_one_cycle``, ``fit_flat_cos`` and
    similar methods. fastai's own optimizers are not torch optimizers: use ``OptimWrapper``. With
    ``GradientAccumulation`` the run has as many steps as the optimizer makes.

    Args:
        options: further arguments of :func:`hdet.auto`: ``journal``, ``rollback``, ``schedule``, ``highest``.
    """

    order = -10
    """Before the callbacks that write rates and those that look at them."""
    run_valid = False

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options
        self.scheduler: Any = None
        """What steps the rate; there once ``fit`` has begun."""

    def before_fit(self) -> None:
        """Make the scheduler: the optimizer is there. Others write no rates any more."""
        if self._looks_for_a_rate():
            return
        optimizer = getattr(self.learn.opt, "opt", None)
        if not isinstance(optimizer, Optimizer):
            raise ArgumentError(
                f"AutoLR needs an optimizer of torch, but this Learner has fastai's own, "
                f"{type(self.learn.opt).__name__}; give Learner(..., opt_func=partial(OptimWrapper, "
                "opt=torch.optim.AdamW))"
            )
        if any(type(callback).__name__ == "SkipToEpoch" for callback in self.learn.cbs):
            raise ArgumentError(
                "AutoLR begins a search at the first epoch, but this fit was given a start_epoch; leave start_epoch out"
            )
        steps = self.options.get("total_steps") or _optimizer_steps(self.learn)
        for callback in self.learn.cbs:
            if isinstance(callback, fastai.callback.schedule.ParamScheduler):
                callback.scheds = {}
        self.scheduler = hdet.auto(optimizer, **{"model": self.learn.model, **self.options, "total_steps": steps})

    def after_step(self) -> None:
        """The optimizer has stepped."""
        if self.scheduler is not None:
            self.scheduler.step(self.learn.loss.detach())

    def after_fit(self) -> None:
        """One model for what comes after training."""
        if self.scheduler is not None:
            self.scheduler.converge()

    def _looks_for_a_rate(self) -> bool:
        """Whether this is ``lr_find`` or ``get_preds``, which make no run."""
        self.scheduler = None
        return hasattr(self.learn, "lr_finder") or hasattr(self.learn, "gather_preds")


def _optimizer_steps(learn: Any) -> int:
    """Of the fit that begins: ``GradientAccumulation`` lets the optimizer step once enough samples were seen."""
    loader = learn.dls.train
    found = [callback.n_acc for callback in learn.cbs if isinstance(callback, GradientAccumulation)]
    enough = max(found, default=None)
    if enough is None:
        return int(learn.n_epoch * len(loader))
    size = getattr(loader, "bs", getattr(loader, "batch_size", None))
    if size is None:
        raise ArgumentError(
            f"AutoLR counts optimizer steps, which GradientAccumulation({enough}) makes by samples, but the batch size "
            f"of a {type(loader).__name__} is not known; give AutoLR(total_steps=...), the number of optimizer steps"
        )
    samples = len(loader.dataset)
    steps = seen = 0
    for batch in list(range(len(loader))) * learn.n_epoch:
        seen += min(size, samples - batch * size)
        if seen >= enough:
            steps, seen = steps + 1, 0
    return steps


def main() -> None:
    torch.manual_seed(0)
    batches = [(x, x.sin().sum(1, keepdim=True)) for x in torch.randn(100, 64, 10)]
    model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 1))
    adam = partial(OptimWrapper, opt=torch.optim.Adam)
    learn = Learner(DataLoaders(batches, batches[:2]), model, loss_func=nn.MSELoss(), opt_func=adam, lr=1e-5)
    auto = AutoLR()
    learn.fit_one_cycle(2, cbs=auto)
    print(auto.scheduler.found)


if __name__ == "__main__":
    main()
