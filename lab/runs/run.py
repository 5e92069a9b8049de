"""One training run, as one of its ranks sees it: build, train, evaluate, write down."""

from __future__ import annotations

import math
import time
from pathlib import Path
from statistics import fmean
from typing import Literal

import torch
from torch import Tensor

import hdet
from hdet.errors import DivergedError
from hdet.journal import Journal, Journals
from lab.runs.folder import Folder, write_atomically
from lab.runs.plan import AUTO, Plan
from lab.runs.ranks import Ranks
from lab.runs.schedulers import advance, base_rates, consensus, scheduler_of
from lab.runs.teller import Teller
from lab.tasks.task import moved

__all__ = ["Outcome", "Run", "has_crashed"]

Outcome = Literal["complete", "crashed"]
_PROGRESS, _ENOUGH_STEPS = 0.01, 100
_COLUMNS = "step,train_loss,validation_loss,rate"


def has_crashed(untrained: float, last: float, steps: int) -> bool:
    """Whether a run came to nothing: its last validation loss is not finite, or not even 1 % below the untrained one.

    Of less than 100 steps only the former is asked.

    >>> has_crashed(untrained=0.93, last=0.90, steps=500)
    False
    >>> has_crashed(0.93, 0.925, 500), has_crashed(0.93, math.nan, 500)
    (True, True)
    """
    return not math.isfinite(last) or (steps >= _ENOUGH_STEPS and last > (1 - _PROGRESS) * untrained)


class Run:
    """One run. Rank 0 writes its folder."""

    def __init__(self, plan: Plan, folder: Folder, ranks: Ranks, teller: Teller) -> None:
        self.plan, self.folder, self.ranks, self.teller = plan, folder, ranks, teller
        self.task = plan.make_task()
        model = self.task.model(plan.seed).to(ranks.device)
        is_warm = bool(plan.start or plan.noise)  # then the loss before the first step is not that of fresh weights
        self._fresh = self.task.evaluate(model)["loss"] if is_warm and ranks.rank == 0 else None
        if plan.start:
            hdet.load(Path(plan.start), model=model)
        self.model = model
        self.trained = self.model if plan.method == "arms" else ranks.wrapped(self.model)
        if plan.noise:  # after the wrap, which makes all ranks equal; only averaging allows several
            group = None if plan.explores else hdet.arms(1)
            hdet.perturb_(self.model, plan.noise, seed=plan.seed, group=group)
        rate = plan.guess if plan.lr == AUTO else float(plan.lr)
        self.optimizer = torch.optim.Adam(self.task.groups(self.model), lr=rate)
        self._file = Journal(folder.journal)
        journal: Journals = [self._file, teller] if ranks.rank == 0 else None
        self.scheduler = scheduler_of(plan, self.model, self.optimizer, journal)
        self._curve: list[tuple[int, float | None, float | None, float | None]] = []
        """Step, train loss, validation loss and rate."""

    def go(self) -> Outcome:
        """Train to the end."""
        began, steps = time.perf_counter(), self.plan.steps
        self.teller.say("start")
        first, final = self._evaluate(0)["loss"], {"loss": math.nan}
        untrained = first if self._fresh is None else self._fresh
        try:
            outcome = self._train()
        except DivergedError:
            outcome = "crashed"
        finally:
            self._file.close()
        if outcome == "complete":
            final = self._evaluate(steps) | {"train_loss": self._last_tenth()}
            hdet.save(self.folder.checkpoint, model=self.model)
        if self.ranks.rank == 0:
            self._write_curve()
            crashed = has_crashed(untrained, final["loss"], steps)
            result = {"final": final, "untrained": {"loss": untrained}, "crashed": crashed, "complete": True}
            self.folder.write(self.folder.read() | result | {"seconds": time.perf_counter() - began})
        self.teller.say("end", outcome=outcome)
        return outcome

    def _train(self) -> Outcome:
        plan = self.plan
        noted = max(1, plan.steps // 1000)  # a number from the device costs a wait
        for done in range(1, plan.steps + 1):
            rate = fmean(base_rates(self.scheduler))
            loss = self._step(done - 1)
            last = done == plan.steps
            if done % noted == 0 or last:
                mean = self.ranks.mean(float(loss.detach()))
                self._curve.append((done, mean, None, rate))
                self.teller.step(done, base_rates(self.scheduler), mean, last)
                if not math.isfinite(mean) and not self._can_recover:
                    return "crashed"
            if done % plan.evaluates_every == 0 and not last:
                self._evaluate(done)
        return "complete"

    def _step(self, step: int) -> Tensor:
        """One step of training."""
        ranks = self.ranks
        batch = moved(self.task.batch(self.plan.seed, step, ranks.rank, ranks.size), ranks.device)
        loss = self.task.loss(self.trained, batch)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        advance(self.scheduler, loss)
        return loss

    @property
    def _can_recover(self) -> bool:
        """Whether a loss that is not finite may be one replica's, which the others save, or one to go back from."""
        return self.plan.method == "search" or (self.plan.explores and self.ranks.size > 1)

    def _evaluate(self, step: int) -> dict[str, float]:
        """Loss and metrics of the consensus on the held-out batches; NaN on other ranks than 0. A collective."""
        with consensus(self.scheduler):
            if self.ranks.rank > 0:
                return {"loss": math.nan}
            metrics = self.task.evaluate(self.model)
            self._curve.append((step, None, metrics["loss"], None))
            return metrics

    def _last_tenth(self) -> float:
        """Mean train loss over the last tenth of the run: one batch alone is noise."""
        steps = self.plan.steps
        return fmean(loss for t, loss, _, _ in self._curve if loss is not None and t > steps - max(1, steps // 10))

    def _write_curve(self) -> None:
        lines = [",".join("" if cell is None else repr(cell) for cell in row) for row in self._curve]
        write_atomically(self.folder.curve, "\n".join([_COLUMNS, *lines]) + "\n")
