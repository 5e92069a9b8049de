"""Rows from other people's packages, each optional: Prodigy, D-Adaptation, DoG, Schedule-Free, GreedyLR.

The stack computes the gradients of all runs at once; then every run's own optimizer steps on a flat parameter that is
a view of its row. For these methods a flat vector is exact: they treat coordinates alike or look at whole norms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, Protocol

import torch
from misset_bench import Bench, Clock, Outcome
from misset_shapes import onecycle
from stacked import TrainStep
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR

__all__ = ["dadaptation", "dog", "greedy", "prodigy", "schedule_free", "schedule_free_tuned"]

SCHEDULE_FREE_DEFAULT = {"adam": 2.5e-3, "sgd": 1.0}


class Peer(Protocol):
    """One run's optimizer."""

    def step(self) -> None:
        """One step, the gradient being there."""
        ...

    def weights(self) -> Tensor:
        """What is validated."""
        ...


class Decayed:
    """An optimizer with rate 1 and a cosine decay, as the authors of Prodigy and D-Adaptation advise."""

    def __init__(self, optimizer: torch.optim.Optimizer, steps: int) -> None:
        self._optimizer, self._schedule = optimizer, CosineAnnealingLR(optimizer, steps)
        self._parameter: Tensor = optimizer.param_groups[0]["params"][0]

    def step(self) -> None:
        self._optimizer.step()
        self._schedule.step()

    def weights(self) -> Tensor:
        return self._parameter.detach()


class Averaged:
    """DoG with its polynomial-decay average."""

    def __init__(self, package: Any, parameter: nn.Parameter) -> None:
        self._optimizer = package.DoG([parameter])
        self._averager = package.PolynomialDecayAverager(nn.ParameterList([parameter]))

    def step(self) -> None:
        self._optimizer.step()
        self._averager.step()

    def weights(self) -> Tensor:
        return next(self._averager.averaged_model.parameters()).detach()


class Free:
    """Schedule-Free, which has two modes."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        optimizer.train()

    def step(self) -> None:
        self._optimizer.step()

    def weights(self) -> Tensor:
        self._optimizer.eval()
        return self._optimizer.param_groups[0]["params"][0].detach()  # type: ignore[no-any-return]


class Gradients:
    """Instead of an optimizer of the stack: puts the gradients where the runs' own optimizers find them."""

    state: Sequence[Tensor] = ()

    def __init__(self, theta: Tensor) -> None:
        self.now = torch.zeros_like(theta)

    def step_(self, theta: Tensor, gradient: Tensor, rate: Tensor) -> None:
        self.now.copy_(gradient)


def run_peers(bench: Bench, builders: Sequence[Callable[[nn.Parameter], Peer]], found: Sequence[float]) -> Outcome:
    """One configuration per builder."""
    stack = bench.stack(len(builders))
    gradients = Gradients(stack.theta)
    rates = bench.rates(stack, [0.0] * len(builders), onecycle(bench.steps))
    step = TrainStep(stack, gradients, bench.supply.batches, rates, graph=bench.graph)  # type: ignore[arg-type]
    places = [(u, k) for u in range(len(bench.seeds)) for k in range(len(builders))]
    peers = {}
    for place in places:
        parameter = nn.Parameter(stack.theta[place])
        parameter.grad = gradients.now[place]
        peers[place] = builders[place[1]](parameter)
    with Clock(bench.device) as clock:
        for _ in range(bench.steps):
            step()
            for peer in peers.values():
                peer.step()
    last = torch.stack([peers[place].weights().clone() for place in places]).view_as(stack.theta)
    return bench.outcome(stack, last, bench.same(found), clock)


def prodigy(bench: Bench, starts: Sequence[float]) -> Outcome:
    """Prodigy, lr 1, cosine decay."""
    package = import_module("prodigyopt")
    return run_peers(bench, [lambda p: Decayed(package.Prodigy([p], lr=1.0), bench.steps)], [math.nan])


def dadaptation(bench: Bench, starts: Sequence[float]) -> Outcome:
    """D-Adaptation of Adam or SGD, lr 1, cosine decay."""
    package = import_module("dadaptation")

    def build(p: nn.Parameter) -> Peer:
        if bench.optimizer == "adam":
            return Decayed(package.DAdaptAdam([p], lr=1.0), bench.steps)
        return Decayed(package.DAdaptSGD([p], lr=1.0, momentum=0.9), bench.steps)

    return run_peers(bench, [build], [math.nan])


def dog(bench: Bench, starts: Sequence[float]) -> Outcome:
    """DoG, averaged."""
    package = import_module("dog")
    return run_peers(bench, [lambda p: Averaged(package, p)], [math.nan])


def _schedule_free(bench: Bench, rates: Sequence[float]) -> Outcome:
    """Schedule-Free AdamW or SGD at some rates, with a warm-up of 5 %."""
    package = import_module("schedulefree")
    warm_up = round(0.05 * bench.steps)

    def builder(rate: float) -> Callable[[nn.Parameter], Peer]:
        if bench.optimizer == "adam":
            return lambda p: Free(package.AdamWScheduleFree([p], lr=rate, warmup_steps=warm_up))
        return lambda p: Free(package.SGDScheduleFree([p], lr=rate, momentum=0.9, warmup_steps=warm_up))

    return run_peers(bench, [builder(rate) for rate in rates], rates)


def schedule_free(bench: Bench, starts: Sequence[float]) -> Outcome:
    """Schedule-Free at its default rate."""
    return _schedule_free(bench, [SCHEDULE_FREE_DEFAULT[bench.optimizer]])


def schedule_free_tuned(bench: Bench, starts: Sequence[float]) -> Outcome:
    """Schedule-Free at the best of five rates around its default, chosen on other seeds."""
    rates = [SCHEDULE_FREE_DEFAULT[bench.optimizer] * 10 ** (i / 2) for i in range(-2, 3)]
    tried = _schedule_free(bench.choosing or bench, rates)
    means = [sum(row) / len(row) for row in tried.losses]
    best = min(range(len(rates)), key=lambda i: means[i] if math.isfinite(means[i]) else math.inf)
    return _schedule_free(bench, [rates[best]])


def greedy(bench: Bench, starts: Sequence[float]) -> Outcome:
    """GreedyLR of transformers on the stack's optimizer, smoothed, with bounds so wide that they never matter."""
    rule = import_module("transformers.optimization").GreedyLR
    stack = bench.stack(len(starts))
    rates = bench.rates(stack, starts, onecycle(bench.steps) * 0 + 1)
    step = TrainStep(stack, bench.update(stack.theta), bench.supply.batches, rates, graph=bench.graph)
    # The package moves a torch optimizer's rate: each run has one that is never stepped.
    handles = [[torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=rate) for rate in starts] for _ in bench.seeds]
    rules = [[rule(handle, min_lr=0.0, max_lr=1e9, eps=0.0, smooth=True) for handle in row] for row in handles]
    with Clock(bench.device) as clock:
        for t in range(1, bench.steps + 1):
            step()
            for row, losses in zip(rules, step.losses.tolist(), strict=True):
                for schedule, loss in zip(row, losses, strict=True):
                    schedule.step(loss)
            if t < bench.steps:
                now = torch.tensor([[handle.param_groups[0]["lr"] for handle in row] for row in handles])
                rates[t] = now.to(rates)[:, :, None]
    found = [[row[k].param_groups[0]["lr"] for row in handles] for k in range(len(starts))]
    return bench.outcome(stack, stack.theta, found, clock)
