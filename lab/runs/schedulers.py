"""The scheduler of a plan."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TypeAlias

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer, lr_scheduler

import hdet
from hdet.ensemble.controller import Controller
from hdet.journal import Journals
from lab.runs.placebo import Placebo
from lab.runs.plan import Plan

__all__ = ["Scheduler", "advance", "base_rates", "consensus", "controller_of", "scheduler_of"]

Scheduler: TypeAlias = lr_scheduler.LRScheduler
"""torch's, or one of hdet's, which is one of torch's by its methods."""


def scheduler_of(plan: Plan, model: Module, optimizer: Optimizer, journal: Journals) -> Scheduler:
    """torch's OneCycleLR, or hdet's: a search, or replicas; all else as in torch."""
    if plan.method == "none":
        return lr_scheduler.OneCycleLR(optimizer, float(plan.lr), plan.steps)
    if plan.method == "search":
        return hdet.auto(optimizer, plan.steps, model=model, journal=journal)
    return hdet.OneCycleLR(
        optimizer,
        float(plan.lr),
        plan.steps,
        spread=plan.spread,
        sync_every=plan.round_length,
        auto_lr=controller_of(plan),
        seed=plan.seed,
        group=hdet.arms(plan.replicas) if plan.method == "arms" else None,
        model=model,
        journal=journal,
    )


def controller_of(plan: Plan) -> Controller | bool:
    """What moves the rate of replicas, as ``auto_lr=`` takes it."""
    named: dict[str, Controller] = {"shuffled": Placebo(plan.seed), "printed": hdet.AsPrinted()}
    return named.get(plan.signal, plan.signal == "loss")


def advance(scheduler: Scheduler, loss: Tensor) -> None:
    """One step of either."""
    if isinstance(scheduler, (hdet.OneCycleLR, hdet.AutoScheduler)):
        scheduler.step(loss)
    else:
        scheduler.step()


def base_rates(scheduler: Scheduler) -> list[float]:
    """The rates around which the replicas spread, one per parameter group."""
    if isinstance(scheduler, hdet.OneCycleLR):
        return [float(rate) for rate in scheduler.base_lrs_now]
    return [float(rate) for rate in scheduler.get_last_lr()]


def consensus(scheduler: Scheduler) -> AbstractContextManager[None]:
    """The replicas' mean inside. A collective."""
    if isinstance(scheduler, (hdet.AutoScheduler, hdet.OneCycleLR)):
        return scheduler.consensus()
    return nullcontext()
