"""``max_lr="auto"`` on a stack: one pilot per run, by the product's own rules. What the library does to one model."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import torch
from shapes import Factors, held, onecycle, risen
from stacked import Optimizer, Stack, TrainStep, captured, tf32
from supply import Supply
from torch import Tensor

from hdet.algorithm.auto.evidence import Evidence
from hdet.algorithm.auto.pilot import Action, Order, Phase, Pilot
from hdet.algorithm.auto.reach import Tally, estimate, straightness
from hdet.algorithm.auto.rounds import Growing, heard

__all__ = ["AutoRuns", "Prober", "Run"]

_TOGETHER = 32
"""Runs probed in one call; bounds memory."""
_GRAPHS = (16, 4, 1)
"""Runs per captured graph."""
_POINTS = 2
"""Losses of a round: of the weights as they are, and of those of a round ago."""


class Run:
    """One run: its pilot and where it stands.

    Args:
        steps: S.
        seed: of the probe batches.
        guess: the user's rate.
        pct_start, linear: where the schedule's rising phase ends, and how it falls.
        shuffled: a placebo: the two losses are exchanged by the toss of a coin, and by another the gradients ask for
            as much as they can get or for nothing.
    """

    def __init__(
        self,
        steps: int,
        seed: int,
        guess: float,
        pct_start: float = 0.3,
        linear: bool = False,
        shuffled: bool = False,
    ) -> None:
        self.steps, self.seed, self.guess, self.peak = steps, seed, guess, pct_start * steps - 1
        self._held, self._plain = held(steps, pct_start, linear), onecycle(steps, pct_start, linear)
        self.pilot = Pilot(steps)
        self.state = self.pilot.begin()
        self.slots: dict[int, list[Tensor]] = {}
        """Rows of weights and of the optimizer's state; the pilot says which to keep."""
        self.events: list[tuple[int, Action, float]] = []
        """(step, what was done to the weights, the rate from there on)"""
        self._dice = random.Random(f"placebo {seed} {guess}") if shuffled else None

    @property
    def rounds(self) -> Growing:
        """Where rounds end."""
        return self.pilot.rounds

    @property
    def shape(self) -> Factors:
        """The schedule at steps 0 ... S: its rise is held at 1, unless the guess is kept to."""
        return self._plain if self.state.phase is Phase.KEPT else self._held

    def after_round(self, t: int, losses: list[float], moved: float, tally: Tally) -> Order:
        """What the pilot says at the end of the round at ``t``."""
        rate, straight = estimate(tally), straightness(tally)
        reach = math.log(rate / (self.guess * self.shape[t - 1])) if rate > 0 else -math.inf
        if self._dice is not None:
            reach, straight = -math.inf, float(self._dice.random() < 0.5)
            self._dice.shuffle(losses)
        span = self.rounds.span(t)
        before = losses[1] if self.state.moments else math.nan
        seen = (span[1] - span[0], moved, reach, straight)
        evidence = Evidence(span, losses[0], before, self.peak, self.shape[t], *seen)
        return self.pilot.after_round(self.state, evidence)

    def rates(self, t: int) -> Factors:
        """[step] from step ``t`` on."""
        return risen(self.state, np.arange(float(t), self.steps)) * self.shape[t : self.steps] * self.found

    def rate(self, t: int) -> float:
        """At step ``t``."""
        return float(self.found * self.state.rise(t) * self.shape[t])

    @property
    def found(self) -> float:
        """The peak rate that the run has found."""
        return self.guess * self.state.factor


class Prober:
    """Losses of points, in full fp32; on a GPU by graphs for sixteen runs, four and one, captured when first needed."""

    def __init__(self, stack: Stack, graph: bool) -> None:
        self._stack = stack
        self._sizes = _GRAPHS if graph and stack.device.type == "cuda" else ()
        self._graphs: dict[int, Callable[[Tensor, tuple[Tensor, ...]], Tensor]] = {}

    def __call__(self, points: Tensor, batch: tuple[Tensor, ...]) -> Tensor:
        """[run, point] for ``points[run, point, parameter]``; the batch has one row per run."""
        found, first = [], 0
        with tf32(False), torch.no_grad():
            while first < len(points):
                size = next((size for size in self._sizes if size <= len(points) - first), len(points))
                part = slice(first, first + size)
                evaluate = self._graph(size, points, batch) if self._sizes else self._stack.losses_at
                found.append(evaluate(points[part], tuple(rows[part] for rows in batch)))
                first += size
        return torch.cat(found)

    def _graph(
        self, size: int, points: Tensor, batch: tuple[Tensor, ...]
    ) -> Callable[[Tensor, tuple[Tensor, ...]], Tensor]:
        """``losses_at`` for so many runs, captured."""
        if size not in self._graphs:
            inputs = [rows[:size].clone() for rows in (points, *batch)]
            losses = torch.zeros(inputs[0].shape[:2], device=points.device, dtype=points.dtype)

            def run() -> None:
                losses.copy_(self._stack.losses_at(inputs[0], tuple(inputs[1:])))

            replay = captured(run)

            def evaluate(points: Tensor, batch: tuple[Tensor, ...]) -> Tensor:
                for mine, rows in zip(inputs, (points, *batch), strict=True):
                    mine.copy_(rows)
                replay()
                return losses.clone()

            self._graphs[size] = evaluate
        return self._graphs[size]


class Reaches:
    """``hdet.engine.probed.gradients.Gradients`` for all runs: sums over steps, on the device."""

    def __init__(self, theta: Tensor) -> None:
        self._pull = torch.zeros_like(theta)
        self._sums = torch.zeros(5, *theta.shape[:2], device=theta.device, dtype=theta.dtype)
        """asked, rates, the last rate, and for a straight way: sums of rates so far, and of weights"""

    def before_step(self, start: Tensor, theta: Tensor, gradient: Tensor, rate: Tensor, listens: Tensor) -> None:
        """The step at ``rate`` [seed, configuration] is about to be made; ``listens``: 1, or 0 where nobody does."""
        asked, rates, last, ahead, weight = self._sums
        kept = torch.where((last > 0) & (listens > 0), (last / rate).square().clamp(max=1), 1.0)
        asked.mul_(kept).add_(listens * (gradient * (start - theta)).sum(-1))
        self._pull.mul_(kept[..., None]).add_(listens * gradient)
        ahead.mul_(kept).add_(listens * rates)
        weight.mul_(kept).add_(listens)
        rates.add_(rate)
        last.copy_(torch.where(listens > 0, rate, last))

    def tallies(self, seeds: Tensor, columns: Tensor, start: Tensor, theta: Tensor) -> Tensor:
        """[run, 4] of the chosen runs: asked, gained, rates, and the rate that a straight way would ask for."""
        gained = (self._pull[seeds, columns] * (start - theta)).sum(-1)
        asked, rates, _, ahead, weight = self._sums[:, seeds, columns]
        return torch.stack([asked, gained, rates, ahead / weight], 1)

    def reset(self, seeds: Tensor, columns: Tensor) -> None:
        """Some runs begin anew."""
        self._pull[seeds, columns] = 0
        self._sums[:, seeds, columns] = 0


class AutoRuns:
    """All runs of a stack under their pilots.

    Args:
        stack: the runs' weights.
        optimizer: whose state goes back with them.
        runs: ``runs[seed][configuration]``.
        supply: of probe batches.
        graph: whether probes are captured on a GPU.
    """

    def __init__(
        self,
        stack: Stack,
        optimizer: Optimizer,
        runs: Sequence[Sequence[Run]],
        supply: Supply,
        graph: bool = True,
    ) -> None:
        self._stack, self._optimizer, self._supply = stack, optimizer, supply
        self.runs = {(u, k): run for u, row in enumerate(runs) for k, run in enumerate(row)}
        self._steps = runs[0][0].steps
        self._origin = stack.theta.clone()
        self._next = {place: run.rounds.next_end(1) for place, run in self.runs.items()}
        self._prober, self._graph = Prober(stack, graph), graph
        self._reaches = Reaches(stack.theta)
        ears = [
            float(heard(t - start, end - start))
            for start, end in pairwise((0, *runs[0][0].rounds.ends))
            for t in range(start, end)
        ]
        self._listens = torch.tensor(ears, device=stack.device, dtype=stack.theta.dtype)
        """[step]: 1 where the gradient is listened to; the rounds of all runs are the same."""
        self._clock = torch.zeros(1, dtype=torch.long, device=stack.device)
        self.rates = torch.zeros(
            self._steps, *stack.theta.shape[:2], len(stack.sizes), device=stack.device, dtype=stack.theta.dtype
        )
        """[step, seed, configuration, group]: for TrainStep."""
        self._write_rates(0, list(self.runs))

    def before_step(self, gradient: Tensor, rate: Tensor) -> None:
        """Before each step, on the device: part of the reach."""
        listens = self._listens.index_select(0, self._clock)
        self._reaches.before_step(self._origin, self._stack.theta, gradient, rate[..., 0], listens)
        self._clock += 1

    def train_step(self) -> TrainStep:
        """The step of all runs, ready for the first one."""
        batches, before = self._supply.batches, self.before_step
        step = TrainStep(self._stack, self._optimizer, batches, self.rates, before=before, graph=self._graph)
        self._reaches.reset(*_indices(list(self.runs), self._stack.device))  # what its capture observed
        self._clock.zero_()
        return step

    @torch.no_grad()
    def after_step(self, t: int) -> None:
        """The step to ``t`` has been made: end the rounds that end here."""
        due = [place for place, end in self._next.items() if end == t]
        if not due:
            return
        anew = [
            place
            for first in range(0, len(due), _TOGETHER)
            for place in self._end_rounds(t, due[first : first + _TOGETHER])
        ]
        if anew:
            seeds, columns = _indices(anew, self._stack.device)
            self._origin[seeds, columns] = self._stack.theta[seeds, columns]
            self._reaches.reset(seeds, columns)
        for place in due:
            self._next[place] = self.runs[place].rounds.next_end(t + 1) if t < self._steps else -1
        if t < self._steps:
            self._write_rates(t, due)

    def _end_rounds(self, t: int, due: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Probe, decide, carry out; the runs whose reach begins anew."""
        anew = []
        for place, row in zip(due, self._evaluate(t, due), strict=True):
            run, sums = self.runs[place], row[-4:]
            finite = all(map(math.isfinite, sums))
            tally = Tally(*sums) if finite else Tally(0.0, 0.0, 0.0)
            moved = row[_POINTS] if math.isfinite(row[_POINTS]) else math.inf
            order = run.after_round(t, row[:_POINTS], moved, tally)
            self._carry_out(place, order, t)
            if order.anew or not finite:
                anew.append(place)
        return anew

    def _evaluate(self, t: int, due: list[tuple[int, int]]) -> list[list[float]]:
        """Per due run: its two losses, how far it went relative to the weights, and its tally."""
        seeds, columns = _indices(due, self._stack.device)
        origin, now = self._origin[seeds, columns], self._stack.theta[seeds, columns]
        points = torch.stack([now, torch.stack([self._before(place) for place in due])], 1)
        wanted = [(self.runs[place].seed, self.runs[place].rounds.index(t - 1)) for place in due]
        losses = self._prober(points, self._supply.probes(wanted))
        own = origin.norm(dim=-1)
        moved = (now - origin).norm(dim=-1) / torch.where(own > 0, own, 1.0)
        tallies = self._reaches.tallies(seeds, columns, origin, now)
        return torch.cat([losses, moved[:, None], tallies], 1).double().tolist()  # the one synchronisation of a round

    def _before(self, place: tuple[int, int]) -> Tensor:
        """The weights of a round ago; the origin where none are kept, and nobody looks."""
        run = self.runs[place]
        return run.slots[run.state.moments[-1].slot][0] if run.state.moments else self._origin[place]

    def _carry_out(self, place: tuple[int, int], order: Order, t: int) -> None:
        """Do what the pilot wants with the weights."""
        run, state = self.runs[place], order.state
        rows = [tensor[place] for tensor in (self._stack.theta, *self._optimizer.state)]
        if order.action is Action.KEEP and order.slot is not None:
            run.slots[order.slot] = [row.clone() for row in rows]
        elif order.action is Action.RESTART:
            rows[0].copy_(self._origin[place])
            for row in rows[1:]:
                row.zero_()
        elif order.action is Action.GO_BACK and order.slot is not None:
            for row, value in zip(rows, run.slots[order.slot], strict=True):
                row.copy_(value)
        run.state = state
        run.slots = {slot: rows for slot, rows in run.slots.items() if slot in state.slots}
        run.events.append((t, order.action, run.rate(t)))

    def _write_rates(self, t: int, places: list[tuple[int, int]]) -> None:
        """The rates of some runs from step ``t`` on."""
        tables = np.stack([self.runs[place].rates(t) for place in places], 1)
        seeds, columns = _indices(places, self._stack.device)
        values = torch.from_numpy(tables).to(self.rates)
        self.rates[t:, seeds, columns] = values[..., None].expand(-1, -1, len(self._stack.sizes))


def _indices(places: list[tuple[int, int]], device: torch.device) -> tuple[Tensor, Tensor]:
    seeds, columns = torch.tensor(places, device=device).T
    return seeds, columns
