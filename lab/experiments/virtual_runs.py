"""Many runs of virtual, gradient-isolated replicas in one process, steered by the library's pure parts.

What an engine does, without processes: place the replicas by the design, let each train for a round, average their
weights, and let the controller move the base values by the replicas' signals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from known_problems import Problem
from torch import Generator, Tensor

from hdet.ensemble.controller import Controller
from hdet.ensemble.design import Balanced
from hdet.ensemble.knob import KnobSpec


@dataclass(frozen=True)
class Run:
    """One run: where each knob starts, who steers, and whether the signals are shuffled over the replicas."""

    starts: tuple[float, ...]
    controller: Controller
    seed: int
    """Of the design."""
    shuffled: bool = False


def generator(*key: int) -> Generator:
    """A random stream of its own for each key."""
    number = 0
    for part in key:
        number = number * 1_000_003 + part + 1
    return Generator().manual_seed(number % 2**63)


@lru_cache(maxsize=100_000)
def places(replicas: int, knobs: int, seed: int, k: int) -> tuple[tuple[float, ...], ...]:
    """The balanced design, remembered: it is a function of its arguments."""
    return tuple(tuple(row) for row in Balanced().places(replicas, knobs, seed, k))


def explore(
    problems: Sequence[Problem], units: Sequence[float], runs: Sequence[Run], replicas: int, rounds: int, seed: int
) -> list[list[list[float]]]:
    """Base values [run][round][knob], the starts first. The one signal is the sum of all problems' losses / unit.

    All runs of a seed share its tasks; what each replica draws in training is its own.
    """
    knobs = [problem.knob for problem in problems]
    streams = [generator(seed, replicas, len(problems), g) for g in range(len(problems))]
    shuffler = generator(seed, replicas, len(problems), 99)
    tasks = [task_of(problem, seed, len(runs)) for problem in problems]
    weights = [problem.start(len(runs)) for problem in problems]
    states = [run.controller.init(len(knobs)) for run in runs]
    paths = [[list(run.starts)] for run in runs]
    for k in range(rounds):
        x = [places(replicas, len(knobs), run.seed, k) for run in runs]
        signals = torch.zeros(len(runs), replicas, dtype=torch.double)
        for g, problem in enumerate(problems):
            values = _values(problem.knob, [path[-1][g] for path in paths], [[row[g] for row in rows] for rows in x])
            trained, losses = problem.round(tasks[g], weights[g], values, streams[g])
            weights[g] = trained.mean(1, keepdim=True)
            signals += losses / units[g]
        shuffled = signals.gather(1, torch.rand(signals.shape, generator=shuffler).argsort(1))
        for i, run in enumerate(runs):
            seen = (shuffled if run.shuffled else signals)[i].tolist()
            offsets = [[knob.spread * a for knob, a in zip(knobs, row, strict=True)] for row in x[i]]
            update = run.controller.update(states[i], seen, offsets)
            states[i] = update.state
            moves = zip(knobs, paths[i][-1], update.moves, strict=True)
            paths[i].append([knob.moved(base, move) for knob, base, move in moves])
    return paths


def _values(knob: KnobSpec, bases: Sequence[float], x: Sequence[Sequence[float]]) -> Tensor:
    """Values [run, replica] of one knob."""
    rows = [[knob.value(base, place) for place in row] for base, row in zip(bases, x, strict=True)]
    return torch.tensor(rows, dtype=torch.double)


def task_of(problem: Problem, seed: int, runs: int) -> Tensor:
    """The task of a seed, for that many runs."""
    task = problem.task(1, generator(seed, 500))
    return task.expand(runs, *task.shape[1:])


def fixed_value_loss(problem: Problem, value: float, seed: int, replicas: int = 8, rounds: int = 32) -> float:
    """Mean probe loss of a run that holds the knob at ``value``, less its first quarter; equal draws for all values."""
    stream = generator(seed, 501)
    task, weights = task_of(problem, seed, 1), problem.start(1)
    values = torch.full((1, replicas), value, dtype=torch.double)
    losses = []
    for _ in range(rounds):
        trained, signal = problem.round(task, weights, values, stream)
        weights = trained.mean(1, keepdim=True)
        losses.append(float(signal.mean()))
    late = losses[rounds // 4 :]
    return sum(late) / len(late)
