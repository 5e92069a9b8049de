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
from shapes import PEAK, Factors, falling, trapezoid
from torch import Tensor

from lab.algoperf.training import AVERAGED, BETAS, GUESS, RISE, WEIGHT_DECAY, share_of

Curves = list[list[float]]
"""[seed][evaluation]"""


def submitted(steps: int) -> Factors:
    """The schedule of `submission.py`.

    >>> np.allclose(submitted(100)[20:], falling(0.3)(100)[20:])
    True
    """
    return np.array([share_of(t, steps) for t in range(steps + 1)])


def linear(hold: float) -> Callable[[int], Factors]:
    """Held until a share of the run, then down along a line.

    >>> linear(0.4)(5).round(3).tolist()
    [1.0, 1.0, 0.667, 0.333, 0.0, 0.0]
    """
    return lambda steps: 1 - np.clip((np.arange(steps + 1.0) - hold * steps + 1) / (steps - hold * steps), 0, 1 - 1e-6)


def cosine(hold: float) -> Callable[[int], Factors]:
    """Held until a share of the run, then down as a cosine.

    >>> cosine(0.4)(5).round(3).tolist()
    [1.0, 1.0, 0.75, 0.25, 0.0, 0.0]
    """
    return lambda steps: np.cos(np.pi / 2 * (1 - linear(hold)(steps))) ** 2


def constant(steps: int) -> Factors:
    """The schedule of Schedule-Free.

    >>> constant(3).tolist()
    [1.0, 1.0, 1.0, 1.0]
    """
    return np.ones(steps + 1)


def half(steps: int) -> Factors:
    """Half of what the search has found; while it climbs, the search has no use for a schedule.

    >>> half(3).tolist()
    [0.5, 0.5, 0.5, 0.5]
    """
    return np.full(steps + 1, 0.5)


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
    rise: float = PEAK
    """The share of the run in which the search climbs."""
    ratios: Mapping[str, float] | None = None
    """Factors on the rates of parameter groups."""
    averages: tuple[float, ...] = ()
    """Shares of the run; each is a curve of its own beside that of the weights as they are."""
    is_schedule_free: bool = False


NADAMW = Setting(True, 0.0, 0.0, BETAS, WEIGHT_DECAY)
_LESS = NADAMW._replace(betas=(0.9, 0.99))
_AVERAGES = (0.04, 0.08)
ENTRIES = {
    "hold-60": Entry("as `hdet.auto` has it", NADAMW, averages=_AVERAGES[:1]),
    "hold-30": Entry("held to 0.3", NADAMW, falling(0.3), averages=_AVERAGES),
    "hold-45": Entry("held to 0.45", NADAMW, falling(0.45), averages=_AVERAGES),
    "climb-20": Entry("climb to 0.2", NADAMW, falling(0.2), 0.2, averages=_AVERAGES),
    "climb-20-hold-30": Entry("climb to 0.2, held to 0.3", NADAMW, falling(0.3), 0.2, averages=_AVERAGES),
    "climb-10": Entry("climb to 0.1", NADAMW, falling(0.1), 0.1, averages=_AVERAGES),
    "climb-10-hold-30": Entry("climb to 0.1, held to 0.3", NADAMW, falling(0.3), 0.1, averages=_AVERAGES),
    "hold-30-99": Entry("held to 0.3, betas 0.9 and 0.99", _LESS, falling(0.3), averages=_AVERAGES),
    "hold-30-linear": Entry("held to 0.3, down along a line", NADAMW, linear(0.3), averages=_AVERAGES),
    "hold-30-cosine": Entry("held to 0.3, down as a cosine", NADAMW, cosine(0.3), averages=_AVERAGES),
    "hold-30-embedding": Entry(
        "held to 0.3, embeddings three times", NADAMW, falling(0.3), ratios={"embedding": 3.0}, averages=_AVERAGES
    ),
    "hold-30-adamw": Entry(
        "with no second helping (AdamW), held to 0.3", NADAMW._replace(nesterov=False), falling(0.3), averages=_AVERAGES
    ),
    "hold-30-95": Entry("held to 0.3, down at 0.95", NADAMW, falling(0.3, 0.95), averages=_AVERAGES),
    "climb-15-hold-20": Entry("climb to 0.15, held to 0.2", NADAMW, falling(0.2), 0.15, averages=_AVERAGES),
    "climb-15-hold-30": Entry("climb to 0.15, held to 0.3", NADAMW, falling(0.3), 0.15, averages=_AVERAGES),
    "climb-10-hold-20": Entry("climb to 0.1, held to 0.2", NADAMW, falling(0.2), 0.1, averages=_AVERAGES),
    "climb-20-hold-30-99": Entry("climb to 0.2, held to 0.3, 0.99", _LESS, falling(0.3), 0.2, averages=_AVERAGES),
    "climb-20-hold-30-95": Entry(
        "climb to 0.2, held to 0.3, to 0.95", NADAMW, falling(0.3, 0.95), 0.2, averages=_AVERAGES
    ),
    "climb-20-hold-30-decay": Entry(
        "climb to 0.2, held to 0.3, decay 0.02", NADAMW._replace(decay=0.02), falling(0.3), 0.2, averages=_AVERAGES
    ),
    "climb-20-hold-30-embedding": Entry(
        "climb to 0.2, held to 0.3, embeddings three times", NADAMW, falling(0.3), 0.2, {"embedding": 3.0}, _AVERAGES
    ),
}
"""What was considered, each with its averages."""
_FREE = NADAMW._replace(betas=(0.9, NADAMW.betas[1]))
FREE_ENTRIES = {
    "free-30": Entry("climb to 0.3", _FREE, constant, is_schedule_free=True),
    "free-10": Entry("climb to 0.1", _FREE, constant, 0.1, is_schedule_free=True),
    "free-20": Entry("climb to 0.2", _FREE, constant, 0.2, is_schedule_free=True),
    "free-95": Entry("beta 0.95", _FREE._replace(betas=(0.95, 0.9955)), constant, is_schedule_free=True),
    "free-falling": Entry("held to 0.3", _FREE, falling(0.3), is_schedule_free=True),
    "free-falling-20": Entry("climb to 0.2", _FREE, falling(0.2), 0.2, is_schedule_free=True),
    "free-decay": Entry("decay 0.02", _FREE._replace(decay=0.02), constant, is_schedule_free=True),
    "free-05": Entry("climb to 0.05", _FREE, constant, 0.05, is_schedule_free=True),
    "free-15": Entry("climb to 0.15", _FREE, constant, 0.15, is_schedule_free=True),
    "free-10-linear-60": Entry("climb to 0.1, held to 0.6, a line", _FREE, linear(0.6), 0.1, is_schedule_free=True),
    "free-10-linear-30": Entry("climb to 0.1, held to 0.3, a line", _FREE, linear(0.3), 0.1, is_schedule_free=True),
    "free-10-falling-60": Entry("climb to 0.1, held to 0.6", _FREE, falling(0.6), 0.1, is_schedule_free=True),
    "free-10-half": Entry("climb to 0.1, then half the rate", _FREE, half, 0.1, is_schedule_free=True),
    "free-10-embedding": Entry(
        "climb to 0.1, embeddings three times", _FREE, constant, 0.1, ratios={"embedding": 3.0}, is_schedule_free=True
    ),
    "free-10-99": Entry("climb to 0.1, 0.99", _FREE._replace(betas=(0.9, 0.99)), constant, 0.1, is_schedule_free=True),
    "free-10-decay": Entry(
        "climb to 0.1, decay 0.02", _FREE._replace(decay=0.02), constant, 0.1, is_schedule_free=True
    ),
    "free-10-95": Entry(
        "climb to 0.1, 0.95", _FREE._replace(betas=(0.95, 0.9955)), constant, 0.1, is_schedule_free=True
    ),
    "free-10-80": Entry("climb to 0.1, 0.8", _FREE._replace(betas=(0.8, 0.9955)), constant, 0.1, is_schedule_free=True),
    "free-05-99": Entry(
        "climb to 0.05, 0.99", _FREE._replace(betas=(0.9, 0.99)), constant, 0.05, is_schedule_free=True
    ),
    "free-07-99": Entry(
        "climb to 0.07, 0.99", _FREE._replace(betas=(0.9, 0.99)), constant, 0.07, is_schedule_free=True
    ),
    "free-15-99": Entry(
        "climb to 0.15, 0.99", _FREE._replace(betas=(0.9, 0.99)), constant, 0.15, is_schedule_free=True
    ),
    "free-20-99": Entry("climb to 0.2, 0.99", _FREE._replace(betas=(0.9, 0.99)), constant, 0.2, is_schedule_free=True),
    "free-10-98": Entry("climb to 0.1, 0.98", _FREE._replace(betas=(0.9, 0.98)), constant, 0.1, is_schedule_free=True),
    "free-10-80-99": Entry(
        "climb to 0.1, 0.8 and 0.99", _FREE._replace(betas=(0.8, 0.99)), constant, 0.1, is_schedule_free=True
    ),
    "free-10-85-99": Entry(
        "climb to 0.1, 0.85 and 0.99", _FREE._replace(betas=(0.85, 0.99)), constant, 0.1, is_schedule_free=True
    ),
    "free-10-93-99": Entry(
        "climb to 0.1, 0.93 and 0.99", _FREE._replace(betas=(0.93, 0.99)), constant, 0.1, is_schedule_free=True
    ),
    "free-10-99-decay-05": Entry(
        "climb to 0.1, 0.99, decay 0.05",
        _FREE._replace(betas=(0.9, 0.99), decay=0.05),
        constant,
        0.1,
        is_schedule_free=True,
    ),
    "free-10-99-decay-12": Entry(
        "climb to 0.1, 0.99, decay 0.12",
        _FREE._replace(betas=(0.9, 0.99), decay=0.12),
        constant,
        0.1,
        is_schedule_free=True,
    ),
    "free-10-99-embedding": Entry(
        "climb to 0.1, 0.99, embeddings three times",
        _FREE._replace(betas=(0.9, 0.99)),
        constant,
        0.1,
        {"embedding": 3.0},
        is_schedule_free=True,
    ),
    "free-10-99-linear-60": Entry(
        "climb to 0.1, 0.99, held to 0.6, a line",
        _FREE._replace(betas=(0.9, 0.99)),
        linear(0.6),
        0.1,
        is_schedule_free=True,
    ),
    "free-20-decay": Entry(
        "climb to 0.2, decay 0.02", _FREE._replace(decay=0.02), constant, 0.2, is_schedule_free=True
    ),
}
SUBMITTED = Entry("NAdamW, averaged weights", NADAMW, submitted, RISE, averages=(AVERAGED,))
"""What `submission.py` does."""
CANDIDATES = {"hdet": SUBMITTED, "hdet-free": FREE_ENTRIES["free-10-85-99"]}
"""What trained the workloads of test, a run each."""


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
    run = [
        [Run(bench.steps, GUESS, shape=one.shape, rise=one.rise, ratios=one.ratios) for one in rows]
        for _ in bench.seeds
    ]
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
