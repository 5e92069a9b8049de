"""AdamW and NadamW at one setting for all workloads: what a method without a rate has to beat (arXiv 2505.24005).

The setting is chosen on *dev* alone, from a small grid, by `real_calibrate.py`, which writes `calibrated.json`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from shapes import warmed
from stacked import TrainStep
from torch import Tensor

from real.bench import Bench
from real.score import geometric_mean

FILE = Path(__file__).resolve().parents[1] / "results" / "real" / "calibrated.json"
ROWS = {"adamw-calibrated": False, "nadamw-calibrated": True}
"""Whether a row has Nesterov's momentum."""


class Setting(NamedTuple):
    """All that one has to say, for any workload."""

    nesterov: bool
    """NadamW instead of AdamW."""
    rate: float
    """At the peak."""
    warm_up: float
    """The share of the run in which the rate rises linearly; then it falls as a cosine to zero."""
    betas: tuple[float, float]
    decay: float
    """Of weights, beside the gradient and times the rate."""


RATES = (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)
GRID = [
    Setting(*values) for values in product((False, True), RATES, (0.02, 0.1), ((0.9, 0.99), (0.9, 0.999)), (0.01, 0.1))
]


class Calibrated:
    """AdamW or NadamW for all runs, each column with a setting of its own.

    NadamW as AlgoPerf has it: the gradient enters the first moment a second time before the step, with the bias
    correction of Adam. torch's NAdam is another: its momentum grows in the course of the run.

    Args:
        theta: the runs' weights [seed, column, parameter].
        settings: of the columns.
    """

    def __init__(self, theta: Tensor, settings: Sequence[Setting]) -> None:
        self.first, self.second = torch.zeros_like(theta), torch.zeros_like(theta)
        self.count = torch.zeros(*theta.shape[:2], 1, device=theta.device, dtype=theta.dtype)
        columns = torch.tensor([[*one.betas, one.decay, one.nesterov] for one in settings]).to(theta)
        self._beta1, self._beta2, self._decay, self._nesterov = columns.T[:, None, :, None]

    @property
    def state(self) -> list[Tensor]:
        return [self.first, self.second, self.count]

    def direction(self, gradient: Tensor) -> Tensor:
        self.count += 1
        self.first.lerp_(gradient, 1 - self._beta1)
        self.second.lerp_(gradient.square(), 1 - self._beta2)
        ahead = torch.lerp(self.first, gradient, self._nesterov * (1 - self._beta1))
        root = (self.second / (1 - self._beta2**self.count)).sqrt_().add_(1e-8)
        return ahead.div_(1 - self._beta1**self.count).div_(root)

    def step_(self, theta: Tensor, gradient: Tensor, rate: Tensor) -> None:
        theta.mul_(1 - rate * self._decay)
        theta.sub_(self.direction(gradient).mul_(rate))


def trained(bench: Bench, settings: Sequence[Setting]) -> tuple[list[list[list[float]]], float]:
    """Validation losses [setting][seed][evaluation] of runs with each setting, and the seconds."""
    stack = bench.stack(len(settings))
    columns = np.stack([one.rate * warmed(bench.steps, one.warm_up)[: bench.steps] for one in settings], 1)
    rates = torch.from_numpy(columns).to(stack.theta)[:, None, :, None]
    rates = rates.repeat(1, len(bench.seeds), 1, len(stack.sizes))
    step = TrainStep(stack, Calibrated(stack.theta, settings), bench.supply.batches, rates, graph=bench.graph)
    return bench.train(stack, step)


def best_of(settings: Sequence[Setting], ratios: Mapping[str, Sequence[float]], nesterov: bool) -> int:
    """The number of the best setting of its kind: its ratios to the best loss have the lowest geometric mean.

    Args:
        settings: all of them.
        ratios: of each setting, by workload.
        nesterov: of which kind.

    >>> two = [Setting(False, rate, 0.1, (0.9, 0.999), 0.1) for rate in (1e-3, 1e-2, 1e-1)]
    >>> best_of(two, {"a": [1.0, 2.0, 3.0], "b": [9.0, 3.0, 3.0]}, nesterov=False)
    1
    """
    of_kind = [number for number, one in enumerate(settings) if one.nesterov is nesterov]
    return min(of_kind, key=lambda number: geometric_mean([row[number] for row in ratios.values()]))


def chosen() -> dict[str, Setting]:
    """The settings by row; none if the calibration has not been run."""
    content = json.loads(FILE.read_text()) if FILE.exists() else {"chosen": {}}
    return {row: Setting(**found["setting"]) for row, found in content["chosen"].items()}
