"""AdamW and NadamW at one setting for all workloads: what a method without a rate has to beat.

arXiv 2505.24005 compares methods that claim to need no settings with these two, each at the single setting that did
best over many workloads. Ours is chosen on *dev* and *kin* alone, from a small grid, by `real_calibrate.py`, which
writes it to `results/real/calibrated.json`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from shapes import Factors
from stacked import Stack, TrainStep
from torch import Tensor

from real.bench import Bench

FILE = Path(__file__).resolve().parents[1] / "results" / "real" / "calibrated.json"
LABELS = {
    "adamw-calibrated": "AdamW, one calibrated setting",
    "nadamw-calibrated": "NadamW, one calibrated setting",
}


class Setting(NamedTuple):
    """All that one has to say, for any workload."""

    rate: float
    """At the peak."""
    first: float
    """Beta 1."""
    second: float
    """Beta 2."""
    decay: float
    """Of weights, as AdamW does it."""
    warm_up: float
    """The share of the run in which the rate rises linearly; then it falls as a cosine to zero."""


GRID = tuple(
    Setting(*values) for values in product((3e-4, 1e-3, 3e-3, 1e-2), (0.9,), (0.99, 0.999), (0.0, 0.1), (0.02, 0.1))
)


def warmed(steps: int, share: float) -> Factors:
    """Linear to 1, then a cosine to 0.

    >>> warmed(6, 0.34).round(3).tolist()
    [0.5, 1.0, 0.854, 0.5, 0.146, 0.0, 0.0]
    """
    t, rising = np.arange(steps + 1.0), max(1, round(share * steps))
    fall = 0.5 * (1 + np.cos(math.pi * np.clip((t + 1 - rising) / max(1, steps - rising), 0, 1)))
    return np.minimum((t + 1) / rising, fall)


class Calibrated:
    """AdamW or NadamW for all runs, each column with a setting of its own.

    NadamW is Adam with Nesterov's momentum (Dozat 2016) at a constant beta 1, with AdamW's decay of weights.

    Args:
        theta: the runs' weights [seed, column, parameter].
        settings: of the columns.
        ahead: whether each of them looks ahead, as Nesterov's momentum does.
    """

    def __init__(self, theta: Tensor, settings: Sequence[Setting], ahead: Sequence[bool]) -> None:
        self.moment, self.square = torch.zeros_like(theta), torch.zeros_like(theta)
        self.count = torch.zeros(*theta.shape[:2], 1, device=theta.device, dtype=theta.dtype)
        columns = torch.tensor([[s.first, s.second, s.decay] for s in settings]).to(theta)
        self._first, self._second, self._decay = columns.T[:, None, :, None]
        self._ahead = torch.tensor(ahead).to(theta)[None, :, None]

    @property
    def state(self) -> list[Tensor]:
        return [self.moment, self.square, self.count]

    def direction(self, gradient: Tensor) -> Tensor:
        first, second = self._first, self._second
        self.count += 1
        self.moment.lerp_(gradient, 1 - first)
        self.square.lerp_(gradient.square(), 1 - second)
        used, later = 1 - first**self.count, 1 - first ** (self.count + 1)
        old = self._ahead * first / later + (1 - self._ahead) / used
        new = self._ahead * (1 - first) / used
        denominator = (self.square / (1 - second**self.count)).sqrt_().add_(1e-8)
        return (self.moment * old + gradient * new).div_(denominator)

    def step_(self, theta: Tensor, gradient: Tensor, rate: Tensor) -> None:
        theta.mul_(1 - rate * self._decay)
        theta.sub_(self.direction(gradient).mul_(rate))


def trained(bench: Bench, settings: Sequence[Setting], ahead: Sequence[bool]) -> tuple[list[list[list[float]]], float]:
    """Validation losses [column][seed][evaluation] of a run with each setting, and the seconds."""
    stack = bench.stack(len(settings))
    optimizer = Calibrated(stack.theta, settings, ahead)
    step = TrainStep(stack, optimizer, bench.supply.batches, _rates(bench, stack, settings), graph=bench.graph)
    return bench.train(stack, step)


def _rates(bench: Bench, stack: Stack, settings: Sequence[Setting]) -> Tensor:
    """[step, seed, column, group]"""
    columns = np.stack([s.rate * warmed(bench.steps, s.warm_up)[: bench.steps] for s in settings], 1)
    wide = torch.from_numpy(columns).to(stack.theta)[:, None, :, None]
    return wide.repeat(1, len(stack.seeds), 1, len(stack.sizes))


def best_of(losses: Mapping[str, Sequence[float]]) -> int:
    """The number of the setting with the lowest geometric mean of losses over workloads.

    Args:
        losses: of every setting, by workload; none above that of the first weights, all above zero.

    >>> best_of({"a": [1.0, 2.0, 3.0], "b": [9.0, 3.0, 3.0]})
    1
    """
    means = np.mean([np.log(row) for row in losses.values()], axis=0)
    return int(np.argmin(means))


def chosen(name: str, file: Path | None = None) -> Setting | None:
    """The setting of a row, if the calibration has been run."""
    file = FILE if file is None else file
    if not file.exists():
        return None
    return Setting(**json.loads(file.read_text())["chosen"][name])
