"""One training run, as one of its ranks sees it: build, train, save at the ends of rounds, evaluate, write down."""

from __future__ import annotations

import math
import time
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple

from torch import Tensor

import hdet
from hdet.errors import ArgumentError, CheckpointError, DivergedError
from hdet.journal import Journal, open_journal
from lab.runs.curve import CurveFile
from lab.runs.folder import Folder
from lab.runs.noise import perturb_
from lab.runs.plan import Plan
from lab.runs.ranks import Ranks
from lab.runs.schedulers import advance, base_rates, consensus, optimizer_of, scheduler_of
from lab.runs.stop import Stop
from lab.runs.teller import Teller
from lab.tasks.task import moved

__all__ = ["Outcome", "Run", "has_crashed"]

Outcome = Literal["complete", "crashed", "stopped"]
_PROGRESS, _ENOUGH_STEPS = 0.01, 100


def has_crashed(first: float, last: float, steps: int) -> bool:
    """Whether a run came to nothing: its last validation loss is not finite, or not even 1 % below the untrained one.

    Of less than 100 steps only the former is asked.

    >>> has_crashed(first=0.93, last=0.90, steps=500), has_crashed(0.93, 0.925, 500), has_crashed(0.93, math.nan, 500)
    (False, True, True)
    """
    return not math.isfinite(last) or (steps >= _ENOUGH_STEPS and last > (1 - _PROGRESS) * first)


class At(NamedTuple):
    """How far a run has come."""

    step: int = 0
    """Steps that were made."""
    seconds: float = 0.0
    """Time that they took."""


class Run:
    """One run. Rank 0 writes its folder, and goes on from a checkpoint that it finds there."""

    def __init__(self, plan: Plan, folder: Folder, ranks: Ranks, teller: Teller) -> None:
        self.plan, self.folder, self.ranks, self.teller = plan, folder, ranks, teller
        self.task = plan.make_task()
        resumed = hdet.exists(folder.checkpoint)
        model = self.task.model(plan.seed)
        if plan.start and not resumed:
            _load(Path(plan.start), model=model)
        self.model = model.to(ranks.device)
        self.trained = ranks.wrapped(self.model)
        if plan.noise and not resumed:  # after the wrap, which makes all ranks equal; only averaging allows several
            perturb_(self.model, plan.noise, plan.seed, replica=ranks.rank if plan.method == "replicas" else 0)
        self.optimizer = optimizer_of(plan, self.task.groups(self.model))
        self._file = Journal(folder.journal)
        journal = open_journal([self._file, teller]) if ranks.rank == 0 else None
        self.scheduler = scheduler_of(plan, self.model, self.optimizer, journal)
        self.parts: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
        }
        self.at = At(**_load(folder.checkpoint, **self.parts)) if resumed else At()
        self.curve = CurveFile(folder.curve, self.at.step) if ranks.rank == 0 else None
        self._began = time.perf_counter() - self.at.seconds

    def go(self, stop: Stop) -> Outcome:
        """Train to the end, or until somebody asks to stop."""
        self.teller.say(
            "start",
            name=self.plan.name or self.folder.path.name,
            steps=self.plan.steps,
            step=self.at.step,
            replicas=self.ranks.size,
            method=self.plan.method,
            groups=[group["name"] for group in self.optimizer.param_groups],
        )
        try:
            outcome = self._loop(stop)
        except DivergedError:
            outcome = "crashed"
        finally:
            self._file.close()  # others may go on in it
        if outcome == "stopped":
            self._save()
        else:
            self._finish(outcome)
        if self.curve is not None:
            self.curve.close()
        self.teller.say("end", outcome=outcome, step=self.at.step)
        return outcome

    def _loop(self, stop: Stop) -> Outcome:
        plan = self.plan
        if self.at.step == 0:
            self._evaluate()
        noted = max(1, plan.steps // 1000)  # a number from the device costs a wait
        for step in range(self.at.step, plan.steps):
            rate = fmean(base_rates(self.scheduler))
            loss = self._step(step)
            done, last = step + 1, step + 1 == plan.steps
            self.at = At(done, time.perf_counter() - self._began)
            note = done % noted == 0 or last
            due = self._is_time_to_save(done, last)
            asked, due, mean = self.ranks.agree(stop.asked, due, float(loss.detach()) if note else 0.0)
            if note and self.curve is not None:
                self.curve.add(done, train=mean, rate=rate)
                self.teller.step(done, base_rates(self.scheduler), mean, last)
            if not math.isfinite(mean) and not self._can_recover:
                return "crashed"
            if asked and not last:
                return "stopped"
            if due:
                self._save()
            if done % plan.evaluates_every == 0 and not last:
                self._evaluate()
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
        return self.plan.method == "search" or (self.plan.method == "replicas" and self.ranks.size > 1)

    def _is_time_to_save(self, done: int, last: bool) -> bool:
        """Where a round has just ended, as rank 0 knows: the replicas are equal there, and nothing is lost."""
        if self.plan.method == "none":
            return done % self.plan.round_length == 0 or last
        return self.teller.round_has_ended()

    def _save(self) -> None:
        """A collective."""
        hdet.save(self.folder.checkpoint, **self.parts, **self.at._asdict())

    def _evaluate(self) -> dict[str, float]:
        """Loss and metrics of the consensus on the held-out batches, on rank 0. A collective."""
        with consensus(self.scheduler):
            if self.curve is None:
                return {}
            metrics = self.task.evaluate(self.model)
            self.curve.add(self.at.step, validation=metrics["loss"])
            return metrics

    def _finish(self, outcome: Outcome) -> None:
        """The last evaluation and ``run.json``."""
        metrics = self._evaluate() if outcome == "complete" else {"loss": math.nan}
        if self.curve is None:
            return
        train = self.curve.last_tenth(self.plan.steps) if outcome == "complete" else math.nan
        first = self.curve.validation[0][1] if self.curve.validation else math.nan
        crashed = has_crashed(first, metrics["loss"], self.plan.steps)
        result = {"final": {**metrics, "train_loss": train}, "untrained": {"loss": first}, "crashed": crashed}
        self.folder.write(self.folder.read() | result | {"complete": True, "seconds": self.at.seconds})


def _load(path: Path, **parts: Any) -> dict[str, Any]:
    """From a checkpoint of a run. A collective."""
    try:
        return hdet.load(path, **parts)
    except (CheckpointError, ArgumentError) as error:
        raise ArgumentError(f"{error}; or start anew with --force") from error
