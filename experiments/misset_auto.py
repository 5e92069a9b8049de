"""``max_lr="auto"`` on a stack: one pilot per run, by the product's own rules. What the library does to one model."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import numpy as np
import torch
from misset_data import Supply
from misset_shapes import Factors, along
from stacked import Optimizer, Stack, captured, tf32
from torch import Tensor

from hdet.algorithm.auto.constants import SNAPSHOTS
from hdet.algorithm.auto.evidence import Evidence, Fan
from hdet.algorithm.auto.pilot import Action, Order, Pilot
from hdet.algorithm.auto.reach import Tally, estimate
from hdet.algorithm.auto.rounds import Growing
from hdet.algorithm.auto.takeoff import Phase
from hdet.algorithm.linesearch import LineSearch
from hdet.engine.round_mean import RoundMean

__all__ = ["AutoRuns", "Prober", "Run"]

_TOGETHER = 32
"""Runs probed in one call; bounds memory."""
_GRAPHS = (16, 4, 1)
"""Runs per captured graph."""


class Run:
    """One run: its pilot and where it stands.

    Args:
        steps: S.
        seed: of the design and of the probe batches.
        knobs: 1 for one rate, or the number of parameter groups.
        guess: the user's rate.
        pct_start: where the schedule's rising phase ends.
        shuffled: a placebo: losses are shuffled over the points before the pilot sees them, and it sees no gradient.
    """

    def __init__(
        self, steps: int, seed: int, knobs: int, guess: float, pct_start: float = 0.3, shuffled: bool = False
    ) -> None:
        self.seed, self.guess, self.peak = seed, guess, pct_start * steps - 1
        self.pilot = Pilot(LineSearch(), knobs, steps, seed=seed)
        self.state = self.pilot.begin()
        self.slots: dict[int, list[Tensor]] = {}
        """Rows of weights and of the optimizer's state; the pilot says which to keep."""
        self.events: list[tuple[int, Action, float]] = []
        """(step, what was done to the weights, the base rate of the first knob from there on)"""
        self._dice = random.Random(f"placebo {seed} {guess}") if shuffled else None

    @property
    def rounds(self) -> Growing:
        """Where rounds end."""
        return self.pilot.rounds(self.state)

    def seen(self, losses: list[float]) -> list[float]:
        """What the pilot sees of a round's losses."""
        if self._dice is not None:
            self._dice.shuffle(losses)
        return losses

    def after_round(
        self, t: int, fan: Fan, losses: list[float], moved: float, shape: float, rate: float, earlier: float
    ) -> Order:
        """What the pilot says at the end of the round at ``t``.

        ``rate``: what the gradients ask for. ``earlier``: the loss of the proven weights, where the pilot doubts.
        """
        reach = math.log(rate / self.guess) if rate > 0 and self._dice is None else -math.inf
        span = self.rounds.span(t)
        evidence = Evidence(span, fan, losses, self.peak, shape, span[1] - span[0], moved, reach, earlier=earlier)
        return self.pilot.after_round(self.state, evidence)

    def rates(self, steps: Factors, shape: Factors) -> np.ndarray:
        """[step, knob] from now on."""
        way = along(self.state.course, steps) * shape * self.guess
        return way[:, None] * np.array(self.state.learned)

    @property
    def found(self) -> float:
        """The peak rate that the run has found: the geometric mean of the knobs'."""
        return self.guess * math.exp(sum(map(math.log, self.state.learned)) / len(self.state.learned))


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
        self._sums = torch.zeros(3, *theta.shape[:2], device=theta.device, dtype=theta.dtype)
        """asked, rates and the last rate"""

    def before_step(self, start: Tensor, theta: Tensor, gradient: Tensor, rate: Tensor) -> None:
        """The step at ``rate`` [seed, configuration] is about to be made."""
        asked, rates, last = self._sums
        kept = torch.where(last > 0, (last / rate).square().clamp(max=1), 1.0)
        asked.mul_(kept).add_((gradient * (start - theta)).sum(-1))
        self._pull.mul_(kept[..., None]).add_(gradient)
        rates.add_(rate)
        last.copy_(rate)

    def tallies(self, seeds: Tensor, columns: Tensor, start: Tensor, theta: Tensor) -> Tensor:
        """[run, 3] of the chosen runs: asked, gained and rates."""
        gained = (self._pull[seeds, columns] * (start - theta)).sum(-1)
        asked, rates, _ = self._sums[:, seeds, columns]
        return torch.stack([asked, gained, rates], 1)

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
        shape: the schedule with its rise held at 1, at steps 0 ... S.
        supply: of probe batches.
        graph: whether probes are captured on a GPU.
    """

    def __init__(
        self,
        stack: Stack,
        optimizer: Optimizer,
        runs: Sequence[Sequence[Run]],
        shape: Factors,
        supply: Supply,
        graph: bool = True,
    ) -> None:
        self._stack, self._optimizer, self._shape, self._supply = stack, optimizer, shape, supply
        self.runs = {(u, k): run for u, row in enumerate(runs) for k, run in enumerate(row)}
        self._steps = len(shape) - 1
        self._anchor, self._drift = stack.theta.clone(), torch.zeros_like(stack.theta)
        self._clock = torch.zeros(1, dtype=torch.long, device=stack.device)
        self._counted = torch.ones(self._steps + 1, *stack.theta.shape[:2], 1, device=stack.device)
        """[step, seed, configuration, 1]: whether the weights after a step are a snapshot of its round."""
        self._began = dict.fromkeys(self.runs, 0)
        self._next = {place: run.rounds.next_end(1) for place, run in self.runs.items()}
        self._prober = Prober(stack, graph)
        self._reaches = Reaches(stack.theta)
        groups = len(stack.sizes)
        self.rates = torch.zeros(
            self._steps, *stack.theta.shape[:2], groups, device=stack.device, dtype=stack.theta.dtype
        )
        """[step, seed, configuration, group]: for TrainStep."""
        self._write_rates(0, list(self.runs))

    def before_step(self, gradient: Tensor, rate: Tensor) -> None:
        """Before each step, on the device: part of the reach."""
        self._reaches.before_step(self._anchor, self._stack.theta, gradient, rate[..., 0])

    def observe(self, losses: Tensor) -> None:
        """After each step, on the device: part of the round's mean."""
        self._clock += 1
        counted = self._counted.index_select(0, self._clock)[0]
        self._drift.add_((self._stack.theta - self._anchor) * counted)

    def begin(self) -> None:
        """Before the first step: forget what the capture of the step observed."""
        self._drift.zero_()
        self._clock.zero_()
        self._reaches.reset(*_indices(list(self.runs), self._stack.device))

    @torch.no_grad()
    def after_step(self, t: int) -> None:
        """The step to ``t`` has been made: end the rounds that end here."""
        due = [place for place, end in self._next.items() if end == t]
        if not due:
            return
        changed: list[tuple[int, int]] = []
        climbing = [place for place in due if self._is_climbing(place)]
        for first in range(0, len(due), _TOGETHER):
            changed += self._end_rounds(t, due[first : first + _TOGETHER])
        anew = [place for place in due if not (place in climbing and self._is_climbing(place))]
        if anew:
            seeds, columns = _indices(anew, self._stack.device)
            self._anchor[seeds, columns] = self._stack.theta[seeds, columns]
            self._drift[seeds, columns] = 0
            self._reaches.reset(seeds, columns)
        for place in due:
            self._began[place] = t
            self._next[place] = self.runs[place].rounds.next_end(t + 1) if t < self._steps else -1
            self._plan_snapshots(place, t)
        if t < self._steps and changed:
            self._write_rates(t, changed)

    def _plan_snapshots(self, place: tuple[int, int], start: int) -> None:
        """Which steps of the round that begins at ``start`` count for its mean."""
        length = self._next[place] - start
        mean = RoundMean(SNAPSHOTS)
        counted = [float(mean.is_due(step, length)) for step in range(1, length + 1)]
        self._counted[start + 1 : start + 1 + length, place[0], place[1], 0] = torch.tensor(counted).to(self._counted)

    def _end_rounds(self, t: int, due: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Probe, decide, carry out; the runs whose rates have changed."""
        fans = [self.runs[place].pilot.fan(self.runs[place].state, self._round(place, t)) for place in due]
        rows = self._evaluate(t, due, fans)
        seen = [self.runs[p].seen(row[: len(fan.rho)]) for p, fan, row in zip(due, fans, rows, strict=True)]
        doubtful = [
            p for p, losses in zip(due, seen, strict=True) if self.runs[p].pilot.doubts(self.runs[p].state, losses)
        ]
        proven = self._losses_of_proven(t, doubtful)
        changed = []
        for place, fan, row, losses in zip(due, fans, rows, seen, strict=True):
            run = self.runs[place]
            was = run.state
            far, tally = row[-4], Tally(*row[-3:])
            rate = estimate(tally) / self._shape[t - 1] if all(map(math.isfinite, tally)) else 0.0
            moved = far if math.isfinite(far) else math.inf
            order = run.after_round(t, fan, losses, moved, self._shape[t], rate, proven.get(place, math.nan))
            self._carry_out(place, order, t)
            if (was.learned, was.course) != (run.state.learned, run.state.course):
                changed.append(place)
        return changed

    def _losses_of_proven(self, t: int, places: list[tuple[int, int]]) -> dict[tuple[int, int], float]:
        """The losses of the weights that some runs would go back to, on their rounds' batches."""
        proven = {place: self.runs[place].state.memory.proven for place in places}
        weights = {p: self.runs[p].slots[moment.slot][0] for p, moment in proven.items() if moment is not None}
        if not weights:
            return {}
        points = torch.stack([row.expand(self.runs[place].pilot.points, -1) for place, row in weights.items()])
        batch = self._supply.probes([(self.runs[place].seed, self._round(place, t)) for place in weights])
        return dict(zip(weights, self._prober(points, batch)[:, 0].double().tolist(), strict=True))

    def _round(self, place: tuple[int, int], t: int) -> int:
        return self.runs[place].rounds.index(t - 1)

    def _is_climbing(self, place: tuple[int, int]) -> bool:
        return self.runs[place].state.takeoff.phase is Phase.RISING

    def _evaluate(self, t: int, due: list[tuple[int, int]], fans: list[Fan]) -> list[list[float]]:
        """Per due run: the losses of its points, how far it went relative to the weights, and its tally."""
        stack = self._stack
        seeds, columns = _indices(due, stack.device)
        anchor = self._anchor[seeds, columns]
        taken = torch.tensor([[min(t - self._began[place], SNAPSHOTS)] for place in due], device=stack.device)
        fixed = torch.tensor([[fan.fixed] for fan in fans], device=stack.device)
        mean = anchor + self._drift[seeds, columns] / taken
        end = torch.where(fixed, stack.theta[seeds, columns], mean)
        rho = torch.tensor([self._filled(place, fan) for place, fan in zip(due, fans, strict=True)], dtype=anchor.dtype)
        points = torch.lerp(anchor[:, None], end[:, None], rho.to(stack.device)[..., stack.column_group])
        wanted = [
            (self.runs[place].seed, 0 if fan.fixed else self._round(place, t))
            for place, fan in zip(due, fans, strict=True)
        ]
        losses = self._prober(points, self._supply.probes(wanted))
        own = anchor.norm(dim=-1)
        moved = (end - anchor).norm(dim=-1) / torch.where(own > 0, own, 1.0)
        tallies = self._reaches.tallies(seeds, columns, anchor, stack.theta[seeds, columns])
        return torch.cat([losses, moved[:, None], tallies], 1).double().tolist()  # the one synchronisation of a round

    def _filled(self, place: tuple[int, int], fan: Fan) -> list[list[float]]:
        """rho by group, with the first point again where a fan has fewer points: all runs of a call have as many."""
        rows = [self._by_group(row) for row in fan.rho]
        return rows + rows[:1] * (self.runs[place].pilot.points - len(rows))

    def _by_group(self, row: list[float]) -> list[float]:
        return row if len(row) > 1 else row * len(self._stack.sizes)

    def _carry_out(self, place: tuple[int, int], order: Order, t: int) -> None:
        """Do what the pilot wants with the weights."""
        run, state = self.runs[place], order.state
        rows = [tensor[place] for tensor in (self._stack.theta, *self._optimizer.state)]
        if order.action is Action.KEEP and order.slot is not None:
            run.slots[order.slot] = [row.clone() for row in rows]
        elif order.action is Action.RESTART:
            rows[0].copy_(self._anchor[place])
            for row in rows[1:]:
                row.zero_()
        elif order.action is Action.GO_BACK and order.slot is not None:
            for row, value in zip(rows, run.slots[order.slot], strict=True):
                row.copy_(value)
        run.state = state
        run.slots = {slot: rows for slot, rows in run.slots.items() if slot in state.memory.slots}
        run.events.append((t, order.action, run.guess * state.learned[0] * state.course.at(t) * self._shape[t]))

    def _write_rates(self, t: int, places: list[tuple[int, int]]) -> None:
        """The rates of some runs from step ``t`` on."""
        steps = np.arange(float(t), self._steps)
        tables = [self.runs[place].rates(steps, self._shape[t : self._steps]) for place in places]
        groups = len(self._stack.sizes)
        wide = [np.broadcast_to(table, (len(steps), groups)) for table in tables]
        seeds, columns = _indices(places, self._stack.device)
        values = torch.from_numpy(np.stack(wide, 1)).to(self.rates)
        self.rates[t:, seeds, columns] = values


def _indices(places: list[tuple[int, int]], device: torch.device) -> tuple[Tensor, Tensor]:
    seeds, columns = torch.tensor(places, device=device).T
    return seeds, columns
