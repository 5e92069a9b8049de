"""The rows of the table: how a rate is chosen, from every start or without one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import NamedTuple

import misset_ensembles as ensembles
import misset_peers as peers
import torch
from misset_auto import AutoRuns, Run
from misset_bench import Bench, Clock, Outcome
from misset_shapes import Factors, cosine, held, onecycle
from stacked import Optimizer, TrainStep
from torch import Tensor

__all__ = ["ROWS", "Row", "fixed"]


class Row(NamedTuple):
    """One row.

    ``starts``: "all"; "few" for controls, from three of them; "none" where the method has no rate to start from.
    """

    name: str
    label: str
    run: Callable[[Bench, Sequence[float]], Outcome]
    starts: str = "all"
    package: str | None = None
    optimizers: tuple[str, ...] = ("adam", "sgd")

    def missing(self, optimizer: str) -> str | None:
        """Why it cannot be run here; None if it can."""
        if optimizer not in self.optimizers:
            return f"not for {optimizer}"
        if self.package is not None and find_spec(self.package) is None:
            return f"{self.package} is not installed"
        return None


def fixed(bench: Bench, rates: Sequence[float], shape: Factors) -> Outcome:
    """Plain training with a schedule, at each rate."""
    stack = bench.stack(len(rates))
    step = TrainStep(
        stack,
        bench.update(stack.theta),
        bench.supply.batches,
        bench.rates(stack, rates, shape),
        graph=bench.graph,
    )
    with Clock(bench.device) as clock:
        for _ in range(bench.steps):
            step()
    return bench.outcome(stack, stack.theta, bench.same(rates), clock)


def auto(
    bench: Bench,
    starts: Sequence[float],
    pct_start: float = 0.3,
    linear: bool = False,
    shuffled: bool = False,
) -> Outcome:
    """``max_lr="auto"``, the start being the guess."""
    stack = bench.stack(len(starts))
    optimizer = bench.update(stack.theta)
    runs = [[Run(bench.steps, seed, start, pct_start, linear, shuffled) for start in starts] for seed in bench.seeds]
    auto_runs = AutoRuns(stack, optimizer, runs, bench.supply, bench.graph)
    step = auto_runs.train_step()
    with Clock(bench.device) as clock:
        for t in range(1, bench.steps + 1):
            step()
            auto_runs.after_step(t)
    found = [[row[k].found for row in runs] for k in range(len(starts))]
    return bench.outcome(stack, stack.theta, found, clock)


class Hypergradient:
    """Hypergradient descent (Baydin et al. 2018) in its multiplicative form, on any optimizer of a stack.

    The factor on the rate is multiplied by 1 + beta cos(gradient, last direction).
    """

    def __init__(self, inner: Optimizer, theta: Tensor, beta: float = 0.02) -> None:
        self._inner, self._beta = inner, beta
        self._last = torch.zeros_like(theta)
        self.log_factor = torch.zeros(*theta.shape[:2], 1, device=theta.device, dtype=theta.dtype)

    @property
    def state(self) -> list[Tensor]:
        return [*self._inner.state, self._last, self.log_factor]

    def direction(self, gradient: Tensor) -> Tensor:
        return self._inner.direction(gradient)

    def step_(self, theta: Tensor, gradient: Tensor, rate: Tensor) -> None:
        norms = gradient.norm(dim=-1, keepdim=True) * self._last.norm(dim=-1, keepdim=True)
        cosine_now = (gradient * self._last).sum(-1, keepdim=True) / norms.clamp(min=1e-30)
        self.log_factor.add_(torch.log1p(self._beta * cosine_now))
        self._last.copy_(self.direction(gradient))
        theta.sub_(self._last * (rate * self.log_factor.exp()))


def hypergradient(bench: Bench, starts: Sequence[float]) -> Outcome:
    """Adam-HD or SGD-HD from every start; no other schedule."""
    stack = bench.stack(len(starts))
    optimizer = Hypergradient(bench.update(stack.theta), stack.theta)
    rates = bench.rates(stack, starts, onecycle(bench.steps) * 0 + 1)
    step = TrainStep(stack, optimizer, bench.supply.batches, rates, graph=bench.graph)
    with Clock(bench.device) as clock:
        for _ in range(bench.steps):
            step()
    factors = optimizer.log_factor[..., 0].exp().T.tolist()
    found = [[start * factor for factor in row] for start, row in zip(starts, factors, strict=True)]
    return bench.outcome(stack, stack.theta, found, clock)


ROWS: dict[str, Row] = {
    row.name: row
    for row in (
        Row("onecycle", "fixed rate, OneCycle", lambda b, s: fixed(b, s, onecycle(b.steps))),
        Row("cosine", "fixed rate, cosine", lambda b, s: fixed(b, s, cosine(b.steps))),
        Row("auto", "auto", auto),
        Row("auto-linear", "auto, linear tail", lambda b, s: auto(b, s, pct_start=0.7, linear=True)),
        Row("trained", "published HDET", ensembles.trained),
        Row("placebo", "auto, losses shuffled", lambda b, s: auto(b, s, shuffled=True), "few"),
        Row("held", "no controller", lambda b, s: fixed(b, s, held(b.steps)), "few"),
        Row("hypergradient", "hypergradient descent", hypergradient),
        Row("greedy", "GreedyLR", peers.greedy, package="transformers"),
        Row("prodigy", "Prodigy", peers.prodigy, "none", "prodigyopt", ("adam",)),
        Row("dadaptation", "D-Adaptation", peers.dadaptation, "none", "dadaptation"),
        Row("dog", "DoG, averaged", peers.dog, "none", "dog"),
        Row("schedulefree", "Schedule-Free, default rate", peers.schedule_free, "none", "schedulefree"),
        Row("schedulefree-tuned", "Schedule-Free, tuned", peers.schedule_free_tuned, "none", "schedulefree"),
        Row("population", "population-based training", ensembles.population, "none"),
    )
}
