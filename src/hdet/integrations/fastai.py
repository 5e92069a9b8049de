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
    similar methods. fastai's own optimizers are not torch optimizers: use ``OptimWrapper``.

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
        schedules = importlib.import_module("fastai.callback.schedule").ParamScheduler
        for callback in self.learn.cbs:
            if isinstance(callback, schedules):
                callback.scheds = {}
        steps = self.learn.n_epoch * len(self.learn.dls.train)
        self.scheduler = auto(optimizer, **{"model": self.learn.model, "total_steps": steps, **self.options})

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
