"""Rows that train several models for one result: the published HDET, and population-based training."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import torch
from misset_bench import Bench, Clock, Outcome
from misset_shapes import Factors, onecycle
from stacked import Optimizer, Stack, TrainStep
from torch import Tensor

from hdet.algorithm.design import Permuted
from hdet.algorithm.published import Published
from hdet.algorithm.rounds import Rounds, default_length

__all__ = ["population", "trained"]

REPLICAS, ALPHA = 4, 1 / 9
MEMBERS, CONTESTS = 4, 10


# The published method ------------------------------------------------------------------------------------------------


class Trained:
    """Replicas that share gradients and spread their rates; averaged after every round, moved by the published rule.

    Each replica sees a quarter of the batch, so that a step costs as many samples as plain training.
    """

    def __init__(self, bench: Bench, stack: Stack, starts: Sequence[float], shape: Factors) -> None:
        self._stack, self._starts, self._shape = stack, starts, shape
        self._steps, self._seeds = bench.steps, list(bench.seeds)
        self.rounds = Rounds(default_length(bench.steps), bench.steps)
        self._knobs = len(stack.sizes)
        self._rule = Published()
        self._sum = torch.zeros(stack.theta.shape[:2], device=stack.device)
        self.learned = [[[1.0] * self._knobs for _ in starts] for _ in self._seeds]
        """m: [seed][start][knob]"""
        self._memory = [[self._rule.init(self._knobs) for _ in starts] for _ in self._seeds]
        self.rates = torch.zeros(bench.steps, *stack.theta.shape[:2], self._knobs, device=stack.device)
        self._fan_out(0)

    def share(self, gradient: Tensor) -> Tensor:
        """The mean over the replicas of each run, for all of them."""
        replicas = gradient.unflatten(0, (-1, REPLICAS))
        return replicas.mean(1, keepdim=True).expand_as(replicas).flatten(0, 1)

    def begin(self) -> None:
        """Before the first step."""
        self._sum.zero_()

    def observe(self, losses: Tensor) -> None:
        """After each step, on the device."""
        self._sum.add_(losses)

    @torch.no_grad()
    def after_step(self, t: int) -> None:
        """Converge, listen and fan out again where a round ends."""
        if not self.rounds.ends_at(t):
            return
        theta, start = self._stack.theta, self.rounds.span(t)[0]
        theta.copy_(self.share(theta))
        losses = (self._sum / (t - start)).unflatten(0, (-1, REPLICAS)).tolist()  # [seed][replica][start]
        if t >= 0.3 * self._steps:
            for u, rows in enumerate(losses):
                for k in range(len(self._starts)):
                    self._move(u, k, [row[k] for row in rows], self.rounds.index(t - 1))
        self._sum.zero_()
        if t < self._steps:
            self._fan_out(t)

    def _move(self, u: int, k: int, signals: list[float], number: int) -> None:
        if not all(map(math.isfinite, signals)):
            return
        places = Permuted().places(REPLICAS, self._knobs, self._seeds[u], number)
        update = self._rule.update(self._memory[u][k], signals, [[ALPHA * x for x in row] for row in places])
        self._memory[u][k] = update.state
        self.learned[u][k] = [m * (1 + move) for m, move in zip(self.learned[u][k], update.moves, strict=True)]

    def _fan_out(self, t: int) -> None:
        """The rates of the round that begins at ``t``."""
        end, number = min(self.rounds.next_end(t + 1), self._steps), self.rounds.index(t)
        base = torch.tensor(self.learned) * torch.tensor(self._starts)[:, None]  # [seed, start, knob]
        rho = 1 + ALPHA * torch.tensor([Permuted().places(REPLICAS, self._knobs, s, number) for s in self._seeds])
        spread = (base[:, None] * rho[:, :, None]).flatten(0, 1)  # [seed and replica, start, knob]
        shape = torch.from_numpy(self._shape[t:end]).to(spread)
        self.rates[t:end] = (shape[:, None, None, None] * spread).to(self.rates)


def trained(bench: Bench, starts: Sequence[float]) -> Outcome:
    """The published HDET: four replicas, spread 1/9, OneCycle, the controller from 30 % on."""
    stack = bench.stack(len(starts), each=REPLICAS)
    runs = Trained(bench, stack, starts, onecycle(bench.steps))
    step = TrainStep(
        stack,
        bench.update(stack.theta),
        bench.supply.quarters(),
        runs.rates,
        runs.share,
        after=runs.observe,
        graph=bench.graph,
    )
    runs.begin()
    with Clock(bench.device) as clock:
        for t in range(bench.steps):
            step()
            runs.after_step(t + 1)
    means = [[math.exp(sum(map(math.log, m)) / len(m)) for m in row] for row in runs.learned]
    found = [[start * row[k] for row in means] for k, start in enumerate(starts)]
    return bench.outcome(stack, stack.theta[::REPLICAS], found, clock)


# Population-based training -------------------------------------------------------------------------------------------


def population(bench: Bench, starts: Sequence[float]) -> Outcome:
    """Four members of a quarter of the steps each, their rates spread evenly over the range of the starts.

    Ten times the worst takes over weights, optimizer state and rate of the best, and its rate is multiplied by 0.8 or
    1.25; at the end the best counts. Judged on probe batches.
    """
    low, high = math.log(min(starts)), math.log(max(starts))
    members = [math.exp(low + (high - low) * i / (MEMBERS - 1)) for i in range(MEMBERS)]
    steps = max(bench.steps // MEMBERS, 1)
    stack = bench.stack(MEMBERS)
    optimizer = bench.update(stack.theta)
    now = torch.tensor([members] * len(bench.seeds)).to(stack.theta)
    table = now[None, :, :, None].repeat(steps, 1, 1, len(stack.sizes))
    step = TrainStep(stack, optimizer, bench.supply.batches, table, graph=bench.graph)
    dice = [random.Random(f"population {seed}") for seed in bench.seeds]
    every = max(1, steps // CONTESTS)
    with Clock(bench.device) as clock:
        for t in range(1, steps + 1):
            step()
            if t % every == 0 and t < steps:
                _contest(stack, optimizer, _judged(bench, stack, [t]), table, t, dice)
    last = _judged(bench, stack, range(steps + 1, steps + 5))
    best = [min(range(MEMBERS), key=row.__getitem__) for row in last]
    chosen = torch.stack([stack.theta[u, k] for u, k in enumerate(best)])[:, None]
    rates = [float(table[-1, u, k, 0]) for u, k in enumerate(best)]
    outcome = bench.outcome(stack, chosen, [rates], clock)
    return outcome._replace(run_steps=len(bench.seeds) * MEMBERS * steps)


def _judged(bench: Bench, stack: Stack, numbers: Sequence[int]) -> list[list[float]]:
    """Mean probe losses [seed][member]; what is not finite is the worst."""
    wanted = [bench.supply.probes([(seed, number) for seed in bench.seeds]) for number in numbers]
    mean = torch.stack([stack.losses_at(stack.theta, batch) for batch in wanted]).mean(0)
    return [[loss if math.isfinite(loss) else math.inf for loss in row] for row in mean.tolist()]


@torch.no_grad()
def _contest(
    stack: Stack, optimizer: Optimizer, losses: list[list[float]], table: Tensor, t: int, dice: list[random.Random]
) -> None:
    for u, row in enumerate(losses):
        best, worst = row.index(min(row)), row.index(max(row))
        if best == worst:
            continue
        for tensor in (stack.theta, *optimizer.state):
            tensor[u, worst] = tensor[u, best]
        table[t:, u, worst] = table[t, u, best] * dice[u].choice((0.8, 1.25))
