"""What an entry of AlgoPerf around ``hdet.auto`` may be: an optimizer, a schedule, and weights that are averaged.

All variants of a workload train as one stack, with the library's own rule (``auto_runs.py``); `rehearsal.py` has the
workloads. Averages change what is evaluated and nothing of the training, so each costs no run of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from auto_runs import AutoRuns, Run
from real.bench import Bench
from real.calibrated import Calibrated, Setting
from shapes import PEAK, Factors, held, trapezoid
from torch import Tensor

GUESS = 1e-6
"""The rate from which `submission.py` begins, whatever the workload."""

Curves = list[list[float]]
"""[seed][evaluation]"""


def falling(hold: float, until: float) -> Callable[[int], Factors]:
    """A trapezoid that is held until a share of the run and ends at another; then its rate is nearly 0.

    >>> falling(0.6, 1.0)(10).round(3).tolist() == trapezoid(10).round(3).tolist()
    True
    >>> falling(0.4, 0.8)(10).round(3).tolist()
    [0.04, 0.52, 1.0, 1.0, 0.5, 0.293, 0.134, 0.0, 0.0, 0.0, 0.0]
    """

    def shape(steps: int) -> Factors:
        end = round(until * steps)
        fall = np.append(held(end, hold * steps - 1), np.full(steps - end, 1e-6))
        return np.where(np.arange(steps + 1) <= PEAK * steps - 1, trapezoid(steps), fall)

    return shape


def constant(steps: int) -> Factors:
    """The schedule of Schedule-Free.

    >>> constant(3).tolist()
    [1.0, 1.0, 1.0, 1.0]
    """
    return np.ones(steps + 1)


class ScheduleFree:
    """Schedule-Free AdamW for all runs, each column with a setting of its own: ``theta`` is y, where gradients are.

    What is kept of z is its distance from y, which is 0 in the beginning as all state of a stack is. Weighted by the
    square of the highest rate so far, as the package has it.
    """

    def __init__(self, theta: Tensor, settings: Sequence[Setting]) -> None:
        self.away, self.second = torch.zeros_like(theta), torch.zeros_like(theta)
        self.count, self.highest, self.weights = (torch.zeros_like(theta[..., :1]) for _ in range(3))
        columns = torch.tensor([[*one.betas, one.decay] for one in settings]).to(theta)
        self._beta1, self._beta2, self._decay = columns.T[:, None, :, None]

    @property
    def state(self) -> list[Tensor]:
        return [self.away, self.second, self.count, self.highest, self.weights]

    def direction(self, gradient: Tensor) -> Tensor:
        self.count += 1
        self.second.lerp_(gradient.square(), 1 - self._beta2)
        return gradient / (self.second / (1 - self._beta2**self.count)).sqrt_().add_(1e-8)

    def step_(self, theta: Tensor, gradient: Tensor, rate: Tensor) -> None:
        update = self.direction(gradient).add_(self._decay * theta).mul_(rate)
        torch.maximum(self.highest, rate[..., :1], out=self.highest)
        weight = self.highest.square()
        self.weights += weight
        share = weight / self.weights
        theta.add_(share * self.away).add_(update * (self._beta1 * (1 - share) - 1))
        self.away.sub_(update.mul_(self._beta1)).mul_(1 - share)

    def averaged(self, theta: Tensor) -> Tensor:
        """x, which is evaluated."""
        return theta - self.away * ((1 - self._beta1) / self._beta1)


class Averages:
    """Exponential averages of some columns' weights, each over a share of the run; begun anew at a rollback.

    Args:
        runs: the searches, whose weights are averaged.
        theta: their weights.
        columns: which.
        horizons: over how many steps.
    """

    def __init__(self, runs: AutoRuns, theta: Tensor, columns: Sequence[int], horizons: Sequence[float]) -> None:
        self._runs, self._theta, self._columns = runs, theta, torch.tensor(columns, device=theta.device)
        self._shares = torch.tensor([1 / max(1.0, one) for one in horizons]).to(theta)[:, None]
        self.weights = theta[:, self._columns].clone()
        self._rolled_back = self._counts()

    def _counts(self) -> dict[tuple[int, int], int]:
        return {place: run.rolled_back for place, run in self._runs.runs.items()}

    def step(self) -> None:
        """After each step of training."""
        now = self._theta[:, self._columns]
        self.weights.lerp_(now, self._shares)
        counts = self._counts()
        if counts != self._rolled_back:
            changed = [[counts[u, k] != self._rolled_back[u, k] for k in self._columns.tolist()] for u in self._seeds]
            fresh = torch.tensor(changed, device=now.device)[..., None]
            self.weights = torch.where(fresh, now, self.weights)
            self._rolled_back = counts

    @property
    def _seeds(self) -> range:
        return range(self._theta.shape[0])


class Entry(NamedTuple):
    """A variant: whose weights are evaluated when."""

    label: str
    setting: Setting
    """Its rate and warm-up are not used."""
    shape: Callable[[int], Factors] = trapezoid
    ratios: Mapping[str, float] | None = None
    """Factors on the rates of parameter groups."""
    averages: tuple[float, ...] = ()
    """Shares of the run; each is a curve of its own beside that of the weights as they are."""
    is_schedule_free: bool = False


NADAMW = Setting(True, 0.0, 0.0, (1 - 0.06733926164, 0.9955159689799007), 0.08121616522670176)
"""The momenta and the decay of the benchmark's own self-tuning baseline."""
AVERAGES = (0.01, 0.04)
ENTRIES = {
    "adamw": Entry("AdamW, decay 0.05", Setting(False, 0.0, 0.0, (0.9, 0.999), 0.05), averages=AVERAGES),
    "nadamw": Entry("NAdamW", NADAMW, averages=AVERAGES),
    "nadamw-99": Entry("NAdamW, betas 0.9 and 0.99", NADAMW._replace(betas=(0.9, 0.99)), averages=AVERAGES),
    "nadamw-85": Entry("NAdamW, held to 0.5, down at 0.85", NADAMW, falling(0.5, 0.85), averages=AVERAGES),
    "nadamw-30": Entry("NAdamW, held to 0.3, down at the end", NADAMW, falling(0.3, 1.0), averages=AVERAGES),
    "nadamw-30-85": Entry("NAdamW, held to 0.3, down at 0.85", NADAMW, falling(0.3, 0.85), averages=AVERAGES),
    "nadamw-embedding": Entry("NAdamW, embeddings three times", NADAMW, ratios={"embedding": 3.0}, averages=AVERAGES),
}
"""What was considered, each with its averages."""
FREE_ENTRIES = {
    "free": Entry("Schedule-Free", NADAMW, constant, is_schedule_free=True),
    "free-9": Entry("Schedule-Free, beta 0.9", NADAMW._replace(betas=(0.9, 0.9955)), constant, is_schedule_free=True),
}
SUBMITTED = ENTRIES["adamw"]


def names(entries: Mapping[str, Entry]) -> list[str]:
    """Of the curves: those of averages end with their shares.

    >>> names({"one": Entry("", None, averages=(0.01, 0.04))})
    ['one', 'one ~0.01', 'one ~0.04']
    """
    plain = list(entries)
    return plain + [f"{name} ~{share:g}" for name, entry in entries.items() for share in entry.averages]


def trained(bench: Bench, entries: Mapping[str, Entry]) -> dict[str, Curves]:
    """The curves of some entries by their names; either all or none of them Schedule-Free."""
    rows = list(entries.values())
    stack = bench.stack(len(rows))
    settings = [one.setting for one in rows]
    free = ScheduleFree(stack.theta, settings) if rows[0].is_schedule_free else None
    optimizer = Calibrated(stack.theta, settings) if free is None else free
    run = [[Run(bench.steps, GUESS, shape=one.shape, ratios=one.ratios) for one in rows] for _ in bench.seeds]
    runs = AutoRuns(stack, optimizer, run)
    step = runs.train_step(bench.supply.batches, bench.graph)
    pairs = [(column, share * bench.steps) for column, one in enumerate(rows) for share in one.averages]
    columns, horizons = zip(*pairs, strict=True) if pairs else ((), ())
    averages = Averages(runs, stack.theta, columns, horizons) if pairs else None

    def after(t: int) -> None:
        runs.end_rounds(t)
        if averages is not None:
            averages.step()

    def weights() -> Tensor:
        own = stack.theta if free is None else free.averaged(stack.theta)
        return own if averages is None else torch.cat([own, averages.weights], 1)

    curves = bench.train(stack, step, after, weights)[0]
    return dict(zip(names(entries), curves, strict=True))
