"""fastai: ``AutoLR``, a callback that finds the learning rate of a Learner, also inside ``fit_one_cycle``."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from torch.optim import Optimizer

from hdet.errors import ArgumentError
from hdet.schedulers.onecycle import OneCycleLR
from hdet.schedulers.scheduled import ScheduledSearch
from hdet.schedulers.several import auto

__all__ = ["AutoLR"]

_INSTALLED = importlib.util.find_spec("fastai") is not None
_Callback: Any = importlib.import_module("fastai.callback.core").Callback if _INSTALLED else object


class AutoLR(_Callback):  # type: ignore[misc]  # the type of an optional package
    """Finds the learning rate while a Learner trains.

    .. code-block:: python

        learn = Learner(dls, model, opt_func=partial(OptimWrapper, opt=torch.optim.AdamW))
        learn.fit_one_cycle(5, cbs=AutoLR())

    ``lr_max`` is a guess that may be far off. hdet's schedule replaces that of ``fit_one_cycle``, ``fit_flat_cos`` and
    similar methods. fastai's own optimizers are not torch optimizers: use ``OptimWrapper``. With
    ``GradientAccumulation`` the run has as many steps as the optimizer makes.

    Args:
        options: further arguments of :func:`hdet.auto`: ``journal``, ``go_back``, ``schedule``; without ``schedule``
            also those of :class:`hdet.OneCycleLR`.
    """

    order = -10
    """Before the callbacks that write rates and those that look at them."""
    run_valid = False

    def __init__(self, **options: Any) -> None:
        if not _INSTALLED:
            raise ModuleNotFoundError("AutoLR needs fastai, which is not installed: pip install fastai")
        super().__init__()
        self.options = options
        self.scheduler: OneCycleLR | ScheduledSearch | None = None
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
        schedules = importlib.import_module("fastai.callback.schedule").ParamScheduler
        for callback in self.learn.cbs:
            if isinstance(callback, schedules):
                callback.scheds = {}
        self.scheduler = auto(optimizer, **{"model": self.learn.model, **self.options, "total_steps": steps})

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
    kind = importlib.import_module("fastai.callback.training").GradientAccumulation
    enough = max((callback.n_acc for callback in learn.cbs if isinstance(callback, kind)), default=None)
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
