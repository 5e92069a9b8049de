"""The library on small problems of many kinds, beside a grid of fixed rates.

    python experiments/zoo.py --json experiments/results/zoo.json

Ten models, six optimizers, three lengths. Every cell: the final held-out loss of ``hdet.OneCycleLR(max_lr="auto")`` over
that of torch's OneCycleLR at the best of a grid of fixed rates, three to a decade. The grid's losses are kept in the file
and used again: delete it to run them anew.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from experiments.zoo_problems import OPTIMIZERS, PROBLEMS, Batch, Problem
from torch.optim.lr_scheduler import OneCycleLR

import hdet

LENGTHS = (100, 400, 1600)
RATES = tuple(10 ** (k / 3) for k in range(-15, 5))
BATCH, PROBE = 64, 32


def model_of(problem: Problem, seed: int) -> torch.nn.Module:
    """Its weights as drawn with the seed; the global generator stays as it was."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return problem.model()


def probe_of(problem: Problem, model: torch.nn.Module, seed: int) -> hdet.ProbeBatch:
    """Fresh samples, other ones than training sees."""

    def batch(k: int) -> Batch:
        return problem.batch(torch.Generator().manual_seed(2**30 + 1000 * seed + k), PROBE)

    return hdet.ProbeBatch(model, problem.loss, batch)


def train(
    problem: Problem, optimizer: torch.optim.Optimizer, model: torch.nn.Module, scheduler: Any, seed: int
) -> float:
    """The held-out loss after all steps of the scheduler; infinite if training broke."""
    stream, ours = torch.Generator().manual_seed(seed), isinstance(scheduler, hdet.OneCycleLR)
    for _ in range(scheduler.total_steps):
        loss = problem.loss(model, problem.batch(stream, BATCH))
        if not (ours or math.isfinite(float(loss))):
            return math.inf
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step(loss) if ours else scheduler.step()
    model.eval()
    with torch.no_grad():
        final = float(problem.loss(model, problem.held_out()))
    return final if math.isfinite(final) else math.inf


def fixed(problem: str, optimizer: str, length: int, seed: int, rate: float) -> float:
    """torch's OneCycleLR at one rate."""
    model = model_of(PROBLEMS[problem], seed)
    opt = OPTIMIZERS[optimizer](model.parameters(), lr=rate)
    return train(PROBLEMS[problem], opt, model, OneCycleLR(opt, rate, total_steps=length, cycle_momentum=False), seed)


def auto(problem: str, optimizer: str, length: int, seed: int, guess: float = 1e-3) -> tuple[float, dict[str, Any]]:
    """hdet's, without an idea of the rate; and what it did."""
    model = model_of(PROBLEMS[problem], seed)
    opt = OPTIMIZERS[optimizer](model.parameters(), lr=guess)
    probe = probe_of(PROBLEMS[problem], model, seed)
    scheduler = hdet.OneCycleLR(opt, "auto", total_steps=length, probe=probe, cycle_momentum=False)
    loss = train(PROBLEMS[problem], opt, model, scheduler, seed)
    flight = scheduler._engine.flight
    return loss, {"flight": flight, "guess": guess, "landed": flight.landed, "takeoff": flight.takeoff._asdict()}
