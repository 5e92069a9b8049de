"""Runs whose ranks are simulated: the weights of all replicas of many runs are rows of one tensor.

A step of all of them is one forward and backward under ``torch.func.vmap``. Rates, multipliers, their reassignment and
the controllers are the library's own: each run asks the :class:`~hdet.ensemble.steering.Steering` of a real
``hdet.OneCycleLR``. Written here is only what ranks do with tensors: sharing gradients, Adam, and the mean.
``lab/tests/runs/test_simulated.py`` holds it to real processes.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.optim import lr_scheduler

import hdet
from hdet.ensemble.steering import Ending
from hdet.ensemble.warm_start import add_noise_
from hdet.ranks.agreement import Agreement
from hdet.ranks.group import ReplicaIndex
from lab.runs.folder import Folder
from lab.runs.plan import Plan
from lab.runs.run import has_crashed
from lab.runs.schedulers import controller_of
from lab.runs.teller import Tell, Teller
from lab.tasks import Task

__all__ = ["simulate"]

_BETA2, _EPS = 0.999, 1e-8
_TOGETHER = 32
"""Runs in one stack: more gain nothing, and need memory."""


def simulate(folders: Sequence[Folder], plans: Sequence[Plan], tell: Tell) -> None:
    """Run the plans from the beginning, those whose weights others begin with first; a process for each core.

    Args:
        folders: in which the plans were begun.
        plans: one for each folder.
        tell: gets a message when a run starts and when it ends.
    """
    needed = {plan.start for plan in plans}
    for is_early in (True, False):
        chosen = [i for i, folder in enumerate(folders) if (str(folder.checkpoint.resolve()) in needed) == is_early]
        chunks = _chunks(chosen, plans)
        processes = min(len(chunks), os.cpu_count() or 1)
        if processes <= 1:
            for chunk in chunks:
                _told(_simulated([folders[i] for i in chunk], [plans[i] for i in chunk]), chunk, tell)
            continue
        with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
            work = {pool.submit(_simulated, [folders[i] for i in c], [plans[i] for i in c]): c for c in chunks}
            try:
                for done in as_completed(work):
                    _told(done.result(), work[done], tell)
            except BaseException:
                for process in pool._processes.values():
                    process.kill()
                raise


def _chunks(numbers: Iterable[int], plans: Sequence[Plan]) -> list[list[int]]:
    """Plans that can train in step: of one seed, length and task; not too many together."""
    alike: dict[Any, list[int]] = {}
    for i in numbers:
        plan = plans[i]
        alike.setdefault((plan.seed, plan.steps, plan.task, plan.replicas, plan.batch_size), []).append(i)
    return [found[at : at + _TOGETHER] for found in alike.values() for at in range(0, len(found), _TOGETHER)]


def _told(outcomes: Sequence[str], numbers: Sequence[int], tell: Tell) -> None:
    for number, outcome in zip(numbers, outcomes, strict=True):
        Teller(tell, number).say("start")
        Teller(tell, number).say("end", outcome=outcome)


def _simulated(folders: Sequence[Folder], plans: Sequence[Plan]) -> list[str]:
    """One stack, from its beginning to the results in the folders. One thread: other stacks have the other cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return Stack(plans).go(folders)
    finally:
        torch.set_num_threads(before)


class _Simulation:
    """One run: its rates, and what became of it."""

    def __init__(self, plan: Plan, task: Task, model: nn.Module) -> None:
        self.plan = plan
        self.optimizer = torch.optim.Adam(task.groups(model), lr=1.0)
        explores: dict[str, Any] = (
            {"spread": plan.spread, "auto_lr": controller_of(plan)} if plan.explores else {"spread": 0.0}
        )
        self.scheduler = hdet.OneCycleLR(
            self.optimizer, float(plan.lr), plan.steps, sync_every=plan.round_length, seed=plan.seed, **explores
        )
        self.steering: Any = self.scheduler._run.steering
        self.losses: list[list[float]] = []
        """Of each replica in each step."""
        self.crashed = False

    def rates(self, t: int) -> list[list[float]]:
        """[replica][group] at step ``t``."""
        size, plain = self.plan.replicas, self.scheduler._rates_at(t)
        return [self.steering.rates(plain, t, ReplicaIndex(r, size)) for r in range(size)]

    def ends_at(self, t: int) -> bool:
        return self.plan.explores and bool(self.steering.rounds.ends_at(t))

    def end_round(self, t: int, finite: list[bool]) -> list[bool]:
        """New base rates; who is live. Nobody is: the run has crashed."""
        start = self.steering.rounds.span(t)[0]
        size, means = self.plan.replicas, [fmean(column) for column in zip(*self.losses[start:t], strict=True)]
        roll = Agreement(means, means, True, finite, False, True, None, [0.0] * size)
        if not any(roll.live):
            self.crashed = True
            return roll.live
        end = Ending(self.optimizer, (t - 1, t), self.scheduler._rates_at)
        self.steering.bases, _ = self.steering.decide(end, roll, ReplicaIndex(0, size))
        return roll.live


class Stack:
    """Runs that train in step on the same batches: ``theta[run, replica, parameter]``, groups side by side."""

    def __init__(self, plans: Sequence[Plan]) -> None:
        first = plans[0]
        self.steps, self.replicas, self.seed = first.steps, first.replicas, first.seed
        self.task = first.make_task()
        self.model = self.task.model(first.seed)
        groups = [group["params"] for group in self.task.groups(self.model)]
        names = {id(p): name for name, p in self.model.named_parameters()}
        self.layout = [(names[id(p)], p.shape, p.numel()) for group in groups for p in group]
        ends = torch.tensor([sum(p.numel() for p in group) for group in groups]).cumsum(0).tolist()
        self.spans = list(zip([0, *ends[:-1]], ends, strict=True))
        self.runs = [_Simulation(plan, self.task, self.model) for plan in plans]
        self.theta = torch.stack([self._first(plan) for plan in plans])
        self.first, self.second = torch.zeros_like(self.theta), torch.zeros_like(self.theta)
        self.shares = torch.tensor([plan.method != "arms" for plan in plans])

    def go(self, folders: Sequence[Folder]) -> list[str]:
        """Train to the end and write what came of it."""
        began = time.perf_counter()
        untrained = self.task.evaluate(self.model)["loss"]  # of fresh weights, with which a warm run does not begin
        betas = self._betas()
        for t in range(self.steps):
            self._step(t, betas[t])
            for number, run in enumerate(self.runs):
                if not run.crashed and run.ends_at(t + 1):
                    self._end_round(number, t + 1)
        seconds = (time.perf_counter() - began) / len(self.runs)
        return [self._conclude(number, folder, untrained, seconds) for number, folder in enumerate(folders)]

    # -- a step -------------------------------------------------------------------------------------------------------

    def _step(self, t: int, beta: float) -> None:
        """Adam at each replica's own rates, as torch computes it."""
        parts = [self.task.batch(self.seed, t, r, self.replicas) for r in range(self.replicas)]
        batch = tuple(torch.stack(part) for part in zip(*parts, strict=True))
        gradient, losses = vmap(vmap(grad_and_value(self._loss)), (0, None))(self.theta, batch)
        for run, row in zip(self.runs, losses.tolist(), strict=True):
            run.losses.append(row)
            if not run.plan.explores and not all(map(math.isfinite, row)):
                run.crashed = True
        with torch.no_grad():
            if bool(self.shares.any()):
                gradient[self.shares] = gradient[self.shares].mean(1, keepdim=True).expand_as(gradient[self.shares])
            self.first.lerp_(gradient, 1 - beta)
            self.second.mul_(_BETA2).addcmul_(gradient, gradient, value=1 - _BETA2)
            scale = (1 - _BETA2 ** (t + 1)) ** 0.5
            step = self.first / self.second.sqrt().div_(scale).add_(_EPS)
            rates = torch.tensor([run.rates(t) for run in self.runs], dtype=torch.float64) / (1 - beta ** (t + 1))
            for g, (begin, end) in enumerate(self.spans):
                self.theta[..., begin:end] -= rates[..., g, None].to(step.dtype) * step[..., begin:end]

    def _loss(self, row: Tensor, batch: tuple[Tensor, ...]) -> Tensor:
        def model(*inputs: Tensor) -> Tensor:
            return functional_call(self.model, self._named(row), inputs)  # type: ignore[no-any-return]

        return self.task.loss(model, batch)  # type: ignore[arg-type]  # it is called, and no more

    def _named(self, row: Tensor) -> dict[str, Tensor]:
        pieces = torch.split(row, [size for *_, size in self.layout])
        return {name: piece.view(shape) for (name, shape, _), piece in zip(self.layout, pieces, strict=True)}

    @torch.no_grad()
    def _end_round(self, number: int, t: int) -> None:
        """The mean of the replicas that are live, for all of them; of moments too where gradients are their own."""
        run = self.runs[number]
        live = run.end_round(t, self.theta[number].isfinite().all(-1).tolist())
        if run.crashed:
            return
        moments = [] if bool(self.shares[number]) else [self.first[number], self.second[number]]
        for rows in (self.theta[number], *moments):
            rows.copy_(rows[torch.tensor(live)].mean(0, keepdim=True).expand_as(rows))

    # -- beginning and end --------------------------------------------------------------------------------------------

    def _first(self, plan: Plan) -> Tensor:
        """First weights of all replicas: fresh ones or those of a checkpoint, with their noise."""
        model = self.task.model(plan.seed)
        if plan.start:
            hdet.load(Path(plan.start), model=model)
        weights = dict(model.named_parameters())
        rows = torch.cat([weights[name].detach().flatten() for name, *_ in self.layout]).repeat(self.replicas, 1)
        if plan.noise:
            for r in range(self.replicas):
                named = self._named(rows[r])
                parts = [named[name] for name, _ in model.named_parameters()]  # in the order of perturb_
                add_noise_(parts, plan.noise, plan.seed, r if plan.explores else 0)
        return rows

    def _betas(self) -> list[float]:
        """beta1 of every step, which OneCycleLR cycles."""
        optimizer = torch.optim.Adam([nn.Parameter(torch.zeros(1))])
        scheduler, betas = lr_scheduler.OneCycleLR(optimizer, 1.0, self.steps), []
        for _ in range(self.steps):
            betas.append(float(optimizer.param_groups[0]["betas"][0]))
            optimizer.step()
            scheduler.step()
        return betas

    def _evaluate(self, number: int) -> dict[str, float]:
        self._load(self.theta[number].mean(0))
        return self.task.evaluate(self.model)

    @torch.no_grad()
    def _load(self, row: Tensor) -> None:
        weights = self._named(row)
        for name, p in self.model.named_parameters():
            p.copy_(weights[name])

    def _conclude(self, number: int, folder: Folder, untrained: float, seconds: float) -> str:
        """Write the result, and the weights that others may begin with."""
        run, last = self.runs[number], max(1, self.steps // 10)
        final: Mapping[str, float] = {"loss": math.nan}
        if not run.crashed:
            train_loss = fmean(fmean(row) for row in run.losses[-last:])
            rate = fmean(fmean(row) for row in run.rates(self.steps - 1))
            final = {**self._evaluate(number), "train_loss": train_loss, "last_rate": rate}
            if run.plan.method == "none":
                hdet.save(folder.checkpoint, model=self.model)
        crashed = has_crashed(untrained, final["loss"], self.steps)
        result = {"final": final, "untrained": {"loss": untrained}, "crashed": crashed, "complete": True}
        folder.write(folder.read() | result | {"seconds": seconds})
        return "crashed" if run.crashed else "complete"
