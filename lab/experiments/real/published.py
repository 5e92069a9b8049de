"""HDET with the corrected controller on a stack: four replicas for one result."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from shapes import Factors
from stacked import Stack
from torch import Tensor

from hdet.ensemble.controller import Corrected
from hdet.ensemble.design import Permuted, Rounds, default_length
from real.bench import Bench

REPLICAS, ALPHA = 4, 1 / 9


class Trained:
    """Replicas that share gradients and spread their rates; averaged after every round, moved by ``hdet.Corrected``.

    Each replica sees a quarter of the batch, so that a step costs as many samples as plain training.
    """

    def __init__(self, bench: Bench, stack: Stack, starts: Sequence[float], shape: Factors) -> None:
        self._stack, self._starts, self._shape = stack, starts, shape
        self._steps, self._seeds = bench.steps, list(bench.seeds)
        self.rounds = Rounds(default_length(bench.steps), bench.steps)
        self._knobs = len(stack.sizes)
        self._rule = Corrected()
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
