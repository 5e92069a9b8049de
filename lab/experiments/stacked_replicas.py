"""Ensembles of replicas as rows of one stack: ``theta[seed and replica, column, parameter]``, many runs in one process.

A column is one way to train at one rate: its replicas share gradients or have their own, spread around the base rate or
do not, and meet every T steps. Multipliers, their reassignment, the controllers and where rounds end are the library's
own pure rules; what is written here is only what ranks would do with tensors: sharing gradients, and the mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from shapes import PEAK, onecycle
from stacked import Adam, Optimizer, Stack
from torch import Tensor

from hdet.ensemble.bases import Bases
from hdet.ensemble.controller import Controller, comparable
from hdet.ensemble.design import Permuted, Rounds
from hdet.ensemble.knob import rate_knobs

__all__ = ["Column", "FusedAdam", "Method", "StackedReplicas", "Steered"]

Build = Callable[[int], Controller]
"""A controller, given the seed of the run."""


class Method(NamedTuple):
    """How the replicas of a run train."""

    label: str
    shares: bool
    """Whether they share gradients at every step; otherwise each applies its own, and moments are averaged too."""
    spread: float
    """alpha; 0: all train at the base rate."""
    controller: Build | None = None
    """Moves the base rates; None: they follow the schedule."""
    apart: tuple[float, float] = (0.0, 1.0)
    """If it does not share: from which share of the run until which replicas apply their own gradients. In the rest of
    it they share them."""
    clip: float = math.inf
    """The largest norm of a gradient; longer ones are scaled to it."""

    @property
    def is_plain(self) -> bool:
        """Whether the replicas stay equal, so that they never have to meet."""
        return self.shares and self.spread == 0


class Column(NamedTuple):
    """A method at one peak rate, whose replicas meet every T steps."""

    key: str
    method: Method
    every: int
    rate: float


class Steered:
    """The base rates of one run and where its replicas stand: numbers in, numbers out.

    What ``hdet.OneCycleLR`` does with its defaults: the controller begins at the end of the warm-up, rounded up to a
    round, and moves a factor on the schedule.

    Args:
        column: how it trains.
        groups: names of the parameter groups, each of which has a rate of its own.
        replicas: N.
        steps: of the run.
        seed: of the reassignment.
    """

    def __init__(self, column: Column, groups: Sequence[str], replicas: int, steps: int, seed: int) -> None:
        method = column.method
        self.rounds = Rounds(column.every, steps)
        self._specs = rate_knobs(groups, method.spread)
        self._controller = method.controller(seed) if method.controller is not None else None
        self._bases = Bases.begin([1.0] * len(groups), self._controller)
        self._replicas, self._seed = replicas, seed
        self._begins = self.rounds.next_end(math.ceil(PEAK * steps - 1))

    @property
    def learned(self) -> list[float]:
        """The factor on each group's schedule."""
        return self._bases.learned

    def factors(self, t: int) -> list[list[float]]:
        """Factors on the schedule at step ``t``: [replica][group]."""
        rows = self._places(t)
        return [[m * spec.factor(x) for m, spec, x in zip(self.learned, self._specs, row, strict=True)] for row in rows]

    def end_round(self, t: int, losses: Sequence[float], live: Sequence[bool]) -> None:
        """The round that ends as the counter arrives at ``t``: mean train losses of the replicas, and who counts."""
        if self._controller is None or t < self._begins:
            return
        shown = [(loss, row) for loss, row, lives in zip(losses, self._places(t - 1), live, strict=True) if lives]
        signals = comparable([loss for loss, _ in shown])
        if signals is None:
            return
        offsets = [[spec.spread * x for spec, x in zip(self._specs, row, strict=True)] for _, row in shown]
        update = self._controller.update(self._bases.controller, signals, offsets)
        self._bases = self._bases.moved(update, self._specs)

    def _places(self, t: int) -> list[list[float]]:
        return Permuted().places(self._replicas, len(self._specs), self._seed, self.rounds.index(t))


class StackedReplicas:
    """The replicas of all runs of a stack.

    Args:
        stack: its rows are the replicas of each seed, one after the other.
        optimizer: theirs; Adam, if some have gradients of their own.
        columns: those that share gradients first, so that they lie side by side.
        replicas: N.
        steps: of every run.
        seeds: one for each N rows of the stack.
    """

    def __init__(
        self,
        stack: Stack,
        optimizer: Optimizer,
        columns: Sequence[Column],
        replicas: int,
        steps: int,
        seeds: Sequence[int],
    ) -> None:
        shares = [column.method.shares for column in columns]
        if shares != sorted(shares, reverse=True):
            raise ValueError("columns that share gradients must come first; sort them by method.shares")
        self._stack, self._optimizer, self.replicas = stack, optimizer, replicas
        self.columns, self._steps, self._sharing = list(columns), steps, sum(shares)
        groups = stack.group_names
        self.runs = [[Steered(column, groups, replicas, steps, seed) for column in columns] for seed in seeds]
        """[seed][column]"""
        self._shape = torch.from_numpy(onecycle(steps))[:steps]
        self._peaks = torch.tensor([column.rate for column in columns], dtype=torch.float64)
        rows = stack.theta.shape[:2]
        self.rates = torch.zeros(steps, *rows, len(groups), device=stack.device, dtype=stack.theta.dtype)
        """[step, seed and replica, column, group], as ``TrainStep`` reads them; of rounds that have begun."""
        self.losses = torch.zeros(steps, *rows, device=stack.device, dtype=stack.theta.dtype)
        """Of each step, at the weights before it."""
        self._clock = torch.zeros(1, dtype=torch.long, device=stack.device)
        self._is_phased = any(column.method.apart != (0.0, 1.0) for column in columns)
        self._together = torch.zeros(len(columns) - self._sharing, 1, dtype=torch.bool, device=stack.device)
        """Which of the columns with gradients of their own share them in this round."""
        clips = [column.method.clip for column in columns]
        self._clips = torch.tensor(clips).to(stack.theta)[:, None] if min(clips) < math.inf else None
        for ids in self._by_round.values():
            self._place(0, ids)

    @cached_property
    def _by_round(self) -> dict[int, list[int]]:
        """Numbers of the columns whose rounds end together."""
        found: dict[int, list[int]] = {}
        for c, column in enumerate(self.columns):
            found.setdefault(column.every, []).append(c)
        return found

    # -- a step -------------------------------------------------------------------------------------------------------

    def share(self, gradient: Tensor) -> Tensor:
        """One gradient for the replicas of each run that shares it, none longer than its column allows; in place."""
        own = self._by_replica(gradient)[:, :, : self._sharing]
        own.copy_(own.mean(1, keepdim=True).expand_as(own))
        if self._is_phased:
            rest = self._by_replica(gradient)[:, :, self._sharing :]
            torch.where(self._together, rest.mean(1, keepdim=True), rest, out=rest)
        if self._clips is not None:
            gradient.mul_((self._clips / (gradient.norm(dim=-1, keepdim=True) + 1e-6)).clamp(max=1.0))
        return gradient

    def observe(self, losses: Tensor) -> None:
        """After each step, on the device."""
        self.losses.index_copy_(0, self._clock, losses[None])
        self._clock += 1

    def begin(self) -> None:
        """Before the first step: capturing has already observed some."""
        self.losses.zero_()
        self._clock.zero_()

    @torch.no_grad()
    def after_step(self, t: int) -> None:
        """The rounds that end after ``t`` steps: mean over the replicas that are finite, and new base rates."""
        for ids in self._by_round.values():
            rounds = self.runs[0][ids[0]].rounds
            if not rounds.ends_at(t):
                continue
            start = rounds.span(t)[0]
            losses = self._by_replica(self.losses[start:t][:, :, ids].double().mean(0))  # [seed, replica, column]
            live = losses.isfinite() & torch.stack([self._meet(c, losses[:, :, n]) for n, c in enumerate(ids)], -1)
            told, counts = losses.tolist(), live.tolist()
            for u, row in enumerate(self.runs):
                for n, c in enumerate(ids):
                    row[c].end_round(t, [one[n] for one in told[u]], [one[n] for one in counts[u]])
            if t < self._steps:
                self._place(t, ids)

    @torch.no_grad()
    def consensus(self) -> Tensor:
        """The mean of each run's replicas: [seed, column, parameter]. Right after a round's end they are all equal."""
        return self._by_replica(self._stack.theta).mean(1)

    def _meet(self, c: int, losses: Tensor) -> Tensor:
        """Average the replicas of one column in place: [seed, replica], whether the weights are finite."""
        arms = not self.columns[c].method.shares
        moments = (self._optimizer.first, self._optimizer.second) if arms else ()
        moving = [self._by_replica(tensor)[:, :, c] for tensor in (self._stack.theta, *moments)]
        finite = torch.stack([part.isfinite().all(-1) for part in moving]).all(0)
        if self.columns[c].method.is_plain:
            return finite
        live = (finite & losses.isfinite())[..., None]
        for part in moving:
            mean = torch.where(live, part, 0.0).sum(1, keepdim=True) / live.sum(1, keepdim=True)
            part.copy_(mean.expand_as(part))  # NaN where no replica is finite: that run has crashed for good
        return finite

    def _place(self, t: int, ids: Sequence[int]) -> None:
        """Write the rates of the round that begins at step ``t``, and who shares gradients in it."""
        for c in ids:
            if not self.columns[c].method.shares:
                begin, end = self.columns[c].method.apart
                self._together[c - self._sharing] = not begin * self._steps <= t < end * self._steps
        rounds = self.runs[0][ids[0]].rounds
        after = rounds.next_end(t + 1)
        factors = torch.tensor([[row[c].factors(t) for c in ids] for row in self.runs], dtype=torch.float64)
        rows = (
            factors.transpose(1, 2).flatten(0, 1) * self._peaks[list(ids)][:, None]
        )  # [seed and replica, column, group]
        table = self._shape[t:after, None, None, None] * rows
        self.rates[t:after, :, list(ids)] = table.to(self.rates)

    def _by_replica(self, rows: Tensor) -> Tensor:
        return rows.unflatten(0, (-1, self.replicas))


class FusedAdam(Adam):
    """The same Adam as one kernel: at a hundred million weights the step is bound by memory.

    Args:
        theta: the weights.
        groups: of each weight; rates are one for each group.
    """

    reads_groups = True

    def __init__(self, theta: Tensor, groups: Tensor) -> None:
        super().__init__(theta)
        self._groups = groups
        torch.compiler.reset()  # kernels of earlier stacks, of which only a few are kept beside each other
        self._compiled = torch.compile(_adam_, dynamic=False)

    def step_(self, theta: Tensor, gradient: Tensor, rate: Tensor) -> None:
        self.count += 1
        corrections = 1 - 0.9**self.count, 1 - 0.999**self.count
        self._compiled(theta, gradient, rate, self._groups, self.first, self.second, *corrections)


def _adam_(
    theta: Tensor,
    gradient: Tensor,
    rates: Tensor,
    groups: Tensor,
    first: Tensor,
    second: Tensor,
    correct: Tensor,
    square: Tensor,
) -> None:
    """Write weights and moments after one step; arithmetic as in ``stacked.Adam``."""
    m = first + 0.1 * (gradient - first)
    v = 0.999 * second + 0.001 * gradient * gradient
    first.copy_(m)
    second.copy_(v)
    theta.copy_(theta - rates[..., groups] * (m / correct) / ((v / square).sqrt() + 1e-8))
